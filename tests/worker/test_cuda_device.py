"""The CUDA device over a simulated GPU."""

from types import SimpleNamespace

import pytest
import torch

from proto.errors import ConfigError
from proto.settings.config import (
    GIB,
    CacheConfig,
    DeviceConfig,
    ParallelConfig,
    SchedulerConfig,
    ServeConfig,
)
from tests.fakes.simulated_gpu import device_of
from worker.cpu.device import CpuDevice
from worker.create_device import create_device


def test_the_name_and_dtypes_of_a_gpu() -> None:
    device = device_of(80 * GIB)
    assert device.name == "Some GPU (80.00 GiB)"
    assert device.resolve_dtype("auto") == torch.bfloat16
    assert device.resolve_dtype("float32") == torch.float32
    assert device_of(GIB, capability=(7, 5)).resolve_dtype("auto") == torch.float16


@pytest.mark.parametrize(("gibibytes", "tokens"), [(141, 8192), (80, 8192), (40, 4096), (16, 2048)])
def test_the_default_step_size_follows_the_memory(gibibytes: int, tokens: int) -> None:
    device = device_of(free=GIB, total=gibibytes * GIB)
    assert device.step_tokens(SchedulerConfig()) == tokens
    assert device.step_tokens(SchedulerConfig(max_num_batched_tokens=300)) == 300
    assert CpuDevice(DeviceConfig()).step_tokens(SchedulerConfig()) == 256


def test_the_pool_takes_the_memory_left_by_weights_and_the_largest_step() -> None:
    device, ran = device_of(free=60 * GIB), []
    peak = device.peak_bytes(lambda: ran.append(True))
    assert (peak, ran) == (GIB, [True])
    # 72 of 80 GiB may be used; 20 are in use, and a step takes one more.
    assert device.free_bytes(CacheConfig()) == 72 * GIB - 20 * GIB
    assert device.kv_cache_bytes(CacheConfig(), 0, peak) == 72 * GIB - 20 * GIB - GIB
    beside_states = device.kv_cache_bytes(CacheConfig(), 0, peak, 5 * GIB)
    assert beside_states == 72 * GIB - 20 * GIB - GIB - 5 * GIB
    with pytest.raises(ConfigError, match=r"states of 60\.00 GiB and the largest step needs"):
        device.kv_cache_bytes(CacheConfig(), 0, peak, 60 * GIB)


def test_a_pool_without_memory_is_an_error_with_all_sizes() -> None:
    cache = CacheConfig(gpu_memory_utilization=0.25)
    with pytest.raises(ConfigError) as raised:
        device_of(free=60 * GIB).kv_cache_bytes(cache, 0, 2 * GIB)
    assert raised.value.param == "gpu_memory_utilization"
    for number in ("0.25", "20.00 GiB", "2.00 GiB", str(80 * GIB)):
        assert number in str(raised.value)


def test_a_step_that_runs_out_of_memory_is_an_error_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"\(2\.00 GiB\) of .* \(80\.00 GiB\)") as raised:
        device_of(free=2 * GIB, peak=3 * GIB).peak_bytes(lambda: None)
    assert raised.value.param == "max_num_batched_tokens"


@pytest.mark.parametrize("parameter", ["kv_cache_memory", "num_gpu_blocks_override"])
def test_a_pool_beyond_the_free_memory_is_refused(parameter: str) -> None:
    """A pool with a size of its own may take all that the largest step leaves."""
    cache, device = CacheConfig(**{parameter: 1}), device_of(free=4 * GIB)
    assert device.kv_cache_bytes(cache, 3 * GIB, GIB) == 3 * GIB
    with pytest.raises(ConfigError, match=rf"{3 * GIB + 1} .*{3 * GIB} bytes") as raised:
        device.kv_cache_bytes(cache, 3 * GIB + 1, GIB)
    assert raised.value.param == parameter


def config_of(**settings: object) -> ServeConfig:
    return ServeConfig(device=DeviceConfig(**settings))  # type: ignore[arg-type]


def test_device_auto_is_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(create_device(config_of(), 0), CpuDevice)


def test_device_cuda_without_a_gpu_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: .*; --device cpu works here") as raised:
        create_device(config_of(device="cuda"), 0)
    assert raised.value.param == "device"


def simulate_gpus(monkeypatch: pytest.MonkeyPatch, *gibibytes: int) -> list[torch.device]:
    """Simulate GPUs with this memory; return the devices that workers select."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gibibytes))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda number: SimpleNamespace(total_memory=gibibytes[number] * GIB),
    )
    return chosen


def ranks_on_gpus(count: int, num_engines: int = 1, **scheduler: int) -> ServeConfig:
    return ServeConfig(
        parallel=ParallelConfig(tensor_parallel_size=count, data_parallel_size=num_engines),
        scheduler=SchedulerConfig(**scheduler),
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_fewer_gpus_than_workers_are_refused_with_both_counts(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_gpus(monkeypatch, 80, 80)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: .* 2 found") as raised:
        create_device(ranks_on_gpus(3), rank)
    assert raised.value.param == "tensor_parallel_size"


def test_a_worker_uses_the_gpu_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = simulate_gpus(monkeypatch, 80, 80, 80, 80, 24)
    created = [create_device(ranks_on_gpus(2, 2), index) for index in range(4)]
    assert [each.torch_device.index for each in created] == [0, 1, 2, 3]
    assert chosen == [torch.device("cuda", index) for index in range(4)]


def test_fewer_gpus_than_workers_of_all_engines_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_gpus(monkeypatch, 80, 80, 80)
    message = "--data-parallel-size 2 with --tensor-parallel-size 2: each .* 3 found"
    with pytest.raises(ConfigError, match=message):
        create_device(ranks_on_gpus(2, 2), 0)


def test_gpus_of_different_sizes_need_an_explicit_step_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_gpus(monkeypatch, 80, 24)
    with pytest.raises(ConfigError, match=f"{24 * GIB} to {80 * GIB} bytes"):
        create_device(ranks_on_gpus(2), 0)
    create_device(ranks_on_gpus(2, max_num_batched_tokens=512), 0)


def test_fp8_kv_cache_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs --device cuda"):
        CpuDevice(DeviceConfig()).check_kv_dtype("fp8")
    device_of(GIB).check_kv_dtype("fp8")
