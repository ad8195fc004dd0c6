"""Selection of the attention backend by its name."""

import logging
from pathlib import Path

import pytest
import torch

from proto.errors import ConfigError
from proto.settings.config import DeviceConfig, ServeConfig
from tests.fakes.devices import CPU
from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cpu import device
from worker.cpu.attention import CpuAttention
from worker.cpu.build_kernels import X86_VARIANTS, usable_variants
from worker.cpu.kernels import KernelsUnavailableError, load_kernels
from worker.create_device import create_device
from worker.reference.attention import ReferenceAttention
from worker.reference.device import ReferenceDevice

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)


@pytest.fixture
def kv_cache() -> KVCache:
    layout = kv_layout([None])
    return KVCache(kv_cache_geometry(layout, 1, 8, torch.float32), layout, 2, 4)


def test_auto_selects_the_kernels_if_built(kv_cache: KVCache) -> None:
    try:
        load_kernels()
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
    assert isinstance(CPU.attention("auto", kv_cache, SHAPE), CpuAttention)


def test_a_host_without_kernels_computes_in_plain_torch(
    kv_cache: KVCache, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(device, "load_kernels", lambda: load_kernels(tmp_path))
    with caplog.at_level(logging.WARNING):
        reference = create_device(ServeConfig(device=DeviceConfig(device="cpu")), 0)
    assert isinstance(reference, ReferenceDevice)
    assert "python -m worker.cpu.build_kernels" in caplog.text
    assert isinstance(reference.attention("auto", kv_cache, SHAPE), ReferenceAttention)
    with pytest.raises(ConfigError, match="--attention-backend cpu needs kernels") as raised:
        reference.attention("cpu", kv_cache, SHAPE)
    assert raised.value.param == "attention_backend"


def test_unsupported_head_sizes_fall_back_or_are_a_config_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        load_kernels()
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
    layout = kv_layout([None])
    kv_cache = KVCache(kv_cache_geometry(layout, 1, 12, torch.float32), layout, 2, 4)
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=12, scale=1.0)
    with caplog.at_level(logging.WARNING):
        assert isinstance(CPU.attention("auto", kv_cache, shape), ReferenceAttention)
    assert "head_dim must be a multiple of 8, got 12" in caplog.text
    with pytest.raises(ConfigError, match="--attention-backend cpu needs kernels: head_dim"):
        CPU.attention("cpu", kv_cache, shape)


def test_a_backend_of_another_device_is_a_config_error(kv_cache: KVCache) -> None:
    with pytest.raises(ConfigError, match="flashinfer does not run on a CPU"):
        CPU.attention("flashinfer", kv_cache, SHAPE)


@pytest.mark.parametrize(
    ("missing", "best"),
    [
        (set(), "amx"),
        ({"amx_int8"}, "avx512_bf16"),
        ({"amx_tile", "avx512_bf16"}, "avx512_vnni"),
        ({"avx512_vnni"}, "avx512"),
        ({"avx512vl"}, "avx2_vnni"),
        ({"avx512vl", "avx_vnni"}, "avx2"),
        ({"avx512f", "avx2"}, "baseline"),
    ],
)
def test_the_best_variant_that_the_cpu_has(missing: set[str], best: str) -> None:
    everything = frozenset().union(*(each.cpu_flags for each in X86_VARIANTS))
    usable = usable_variants(X86_VARIANTS, everything - missing)
    assert usable[0].name == best
    assert usable[-1].name == "baseline"
