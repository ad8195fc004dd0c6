"""Selection of the attention backend by its name."""

import logging
from pathlib import Path

import pytest
import torch

from proto.errors import ConfigError
from worker.attention import registry
from worker.attention.base import AttentionShape
from worker.attention.cpu import CpuAttention
from worker.attention.reference import ReferenceAttention
from worker.build_kernels import X86_VARIANTS, usable_variants
from worker.kernels import KernelsUnavailableError, load_kernels
from worker.kv_cache import KVCache, kv_cache_geometry, kv_layout

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)


@pytest.fixture
def kv_cache() -> KVCache:
    layout = kv_layout([None])
    return KVCache(kv_cache_geometry(layout, 1, 8, torch.float32), layout, 2, 4)


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_kernels", lambda: load_kernels(tmp_path))


def test_reference_by_name(kv_cache: KVCache) -> None:
    assert isinstance(registry.create_backend("reference", kv_cache, SHAPE), ReferenceAttention)


def test_auto_selects_the_kernels_if_built(kv_cache: KVCache) -> None:
    try:
        load_kernels()
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
    assert isinstance(registry.create_backend("auto", kv_cache, SHAPE), CpuAttention)


def test_auto_without_kernels_warns_and_selects_the_reference(
    kv_cache: KVCache, no_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        backend = registry.create_backend("auto", kv_cache, SHAPE)
    assert isinstance(backend, ReferenceAttention)
    assert "python -m worker.build_kernels" in caplog.text


def test_cpu_without_kernels_is_a_config_error(kv_cache: KVCache, no_kernels: None) -> None:
    with pytest.raises(ConfigError, match="--attention-backend cpu needs kernels") as raised:
        registry.create_backend("cpu", kv_cache, SHAPE)
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
        assert isinstance(registry.create_backend("auto", kv_cache, shape), ReferenceAttention)
    assert "head_dim must be a multiple of 8, got 12" in caplog.text
    with pytest.raises(ConfigError, match="--attention-backend cpu needs kernels: head_dim"):
        registry.create_backend("cpu", kv_cache, shape)


def test_a_backend_of_another_device_is_a_config_error(kv_cache: KVCache) -> None:
    with pytest.raises(ConfigError, match="flashinfer does not run on a CPU"):
        registry.create_backend("flashinfer", kv_cache, SHAPE)


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
