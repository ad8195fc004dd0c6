"""The CPU device on simulated machines: files replace /proc and /sys."""

from pathlib import Path

import pytest
import torch

from proto.runtime.host_resources import usable_cores
from proto.settings.config import GIB, DeviceConfig, ParallelConfig
from worker.cpu.device import CpuDevice


def machine(
    root: Path,
    *,
    flags: str = "fpu sse2",
    free: int = 16 * GIB,
) -> Path:
    """Write /proc and /sys files of a machine with these CPU flags and free bytes."""
    (root / "proc").mkdir(parents=True)
    cpu = f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\n"
    (root / "proc/cpuinfo").write_text(cpu + "processor\t: 1\nmodel name\t: Other\n\n")
    memory = {"MemTotal": 64 * GIB, "MemAvailable": free}
    lines = [f"{name}: {size // 1024} kB\n" for name, size in memory.items()]
    (root / "proc/meminfo").write_text("".join(lines))
    return root


@pytest.mark.parametrize(
    ("flags", "dtype", "name"),
    [
        ("avx2 avx512f", torch.float32, "Some CPU (3 threads)"),
        ("avx512_bf16 avx2", torch.bfloat16, "Some CPU (3 threads, avx512_bf16)"),
        ("amx_bf16 amx_tile", torch.bfloat16, "Some CPU (3 threads, amx_bf16)"),
    ],
)
def test_dtype_auto_is_bfloat16_if_the_cpu_supports_it(
    flags: str, dtype: torch.dtype, name: str, tmp_path: Path
) -> None:
    device = CpuDevice(DeviceConfig(cpu_threads=3), machine(tmp_path, flags=flags))
    assert device.resolve_dtype("auto") == dtype
    assert device.resolve_dtype("float16") == torch.float16
    assert device.name == name


def test_a_machine_without_proc_files_has_defaults(tmp_path: Path) -> None:
    device = CpuDevice(DeviceConfig(cpu_threads=1), tmp_path)
    assert device.name == "CPU (1 thread)"
    assert device.resolve_dtype("auto") == torch.float32


def test_threads_equal_the_physical_cores(tmp_path: Path) -> None:
    assert CpuDevice(DeviceConfig(), machine(tmp_path)).num_threads == usable_cores(tmp_path)


def test_workers_of_a_machine_share_its_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, free=16 * GIB)
    assert (
        CpuDevice(
            DeviceConfig(),
            root,
            parallel=ParallelConfig(data_parallel_size=10, tensor_parallel_size=100),
        ).num_threads
        == 1
    )
    assert (
        CpuDevice(
            DeviceConfig(cpu_threads=3), root, parallel=ParallelConfig(tensor_parallel_size=2)
        ).num_threads
        == 3
    )
    assert CpuDevice(DeviceConfig(), root).division == ""
    device = CpuDevice(
        DeviceConfig(),
        root,
        parallel=ParallelConfig(data_parallel_size=10, tensor_parallel_size=100),
    )
    cores, threads = usable_cores(root), torch.get_num_threads()
    assert device.division == (
        f"1000 workers share {cores} cores: {threads} thread{'s' if threads > 1 else ''} each, "
        "more than there are"
    )
    device = CpuDevice(DeviceConfig(), root, parallel=ParallelConfig(tensor_parallel_size=2))
    assert device.num_threads == max(1, usable_cores(tmp_path) // 2)
