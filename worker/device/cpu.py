"""The CPU as a device: arithmetic, threads and memory of the machine.

Knows nothing of models; the worker asks it which dtype to load, how many threads
to run and how much memory the KV cache may take.
"""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Final

import torch

from proto.config import GIB, CacheConfig, DeviceConfig, DType, KVCacheDType, SchedulerConfig
from proto.errors import ConfigError
from proto.host_resources import available_memory, cores_of_worker
from worker.device.base import ALL, DTYPES, gib

DEFAULT_KV_CACHE_BYTES: Final = 4 * GIB
_MATRIX_FLAGS: Final = ("avx512_bf16", "amx_bf16")
"""CPU features that multiply bfloat16 matrices faster than float32 ones."""


class CpuDevice:
    """The CPU cores that this process may run on.

    `root` holds the `proc` and `sys` trees that describe the machine. num_workers: that share
    its cores.
    """

    def __init__(
        self, config: DeviceConfig, root: Path = Path("/"), *, num_workers: int = 1
    ) -> None:
        self._root = root
        self._model_name, self._flags = _read_cpuinfo(root)
        self.num_threads = config.cpu_threads or cores_of_worker(num_workers, root)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        """For example "AMD EPYC (2 threads, avx512_bf16)"."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self._model_name} ({', '.join((threads, *self.matrix_flags))})"

    def resolve_dtype(self, dtype: DType) -> torch.dtype:
        """bfloat16 for "auto" where the CPU multiplies it in hardware, else float32."""
        if dtype == "auto":
            return torch.bfloat16 if self.matrix_flags else torch.float32
        return DTYPES[dtype]

    def step_tokens(self, config: SchedulerConfig) -> int:
        return config.step_tokens

    def check_kv_dtype(self, setting: KVCacheDType) -> None:
        """No kernel of a CPU reads 8 bits without scales."""
        if setting == "fp8":
            raise ConfigError(
                "--kv-cache-dtype fp8 needs --device cuda; a CPU has int8", "kv_cache_dtype"
            )

    def peak_of(self, run: Callable[[], None]) -> int:
        """None is set aside: the operating system gives and takes."""
        return 0

    def kv_cache_bytes(self, config: CacheConfig, part: Fraction = ALL, beside: int = 0) -> int:
        """A part of the setting, or of 4 GiB but at most half of the memory that is free.

        Raises ConfigError with both numbers for a setting beyond the free memory.
        """
        wanted = config.kv_cache_memory
        if wanted is None:
            return int(min(DEFAULT_KV_CACHE_BYTES, available_memory(self._root) // 2) * part)
        self._check_room(wanted, f"--kv-cache-memory {wanted} ({gib(wanted)})", "kv_cache_memory")
        return int(wanted * part)

    def check_blocks(self, config: CacheConfig, bytes_per_token: int) -> None:
        """As the Protocol says; the error has both numbers."""
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is not None:
            wanted = num_blocks * config.block_size * bytes_per_token
            what = f"--num-gpu-blocks-override {num_blocks}: {wanted} bytes ({gib(wanted)})"
            self._check_room(wanted, what, "num_gpu_blocks_override")

    def check_rows(self, num_rows: int, num_bytes: int, pool_bytes: int) -> None:
        """As the Protocol says; the pool takes its memory only as it is used."""
        what = f"--max-num-seqs {num_rows}: {num_bytes} bytes ({gib(num_bytes)}) of rows"
        self._check_room(num_bytes, what, "max_num_seqs", pool_bytes, " beside the KV pool")

    def _check_room(
        self, wanted: int, what: str, setting: str, taken: int = 0, beside: str = ""
    ) -> None:
        """taken: bytes of what is free that are spoken for, by what `beside` names."""
        free = max(0, available_memory(self._root) - taken)
        if wanted > free:
            raise ConfigError(
                f"{what} is more than the {free} bytes ({gib(free)}) of memory that are "
                f"free{beside}",
                setting,
            )

    @property
    def matrix_flags(self) -> tuple[str, ...]:
        """What it has to multiply bfloat16 matrices with."""
        return tuple(flag for flag in _MATRIX_FLAGS if flag in self._flags)


def _read_cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the first CPU, as far as the kernel gives them."""
    name, flags = "CPU", frozenset[str]()
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return name, flags
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
    return name, flags
