"""Layout and memory use of the KV cache."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from proto.errors import ConfigError
from proto.messages.lifecycle import KVGroup
from worker.attention.kv_cache import (
    Int8Pages,
    KVCache,
    kv_cache_geometry,
    kv_layout,
    resolve_kv_dtype,
)

LAYOUT = kv_layout([None] * 4)


def small_cache(dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(kv_cache_geometry(LAYOUT, 3, 16, dtype), LAYOUT, num_blocks=5, block_size=8)


def test_geometry_counts_all_layers_and_both_k_and_v() -> None:
    geometry = kv_cache_geometry(kv_layout([None] * 30), 3, 64, torch.bfloat16)
    assert geometry.bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert geometry.dtype == "bfloat16"
    assert geometry.groups == (KVGroup(None),)


def test_geometry_of_groups_counts_the_layers_of_one() -> None:
    layout = kv_layout([512, None, 512])
    geometry = kv_cache_geometry(layout, 1, 256, torch.float32)
    assert geometry.num_slots == 1
    assert geometry.bytes_per_token == 2 * 256 * 4
    assert geometry.groups == (KVGroup(None), KVGroup(512), KVGroup(512))


def test_geometry_of_int8_counts_a_scale_for_each_token_and_head() -> None:
    geometry = kv_cache_geometry(kv_layout([None] * 30), 3, 64, torch.int8)
    assert geometry.bytes_per_token == 30 * 2 * 3 * (64 + 4)
    assert geometry.dtype == "int8"
    wide = kv_cache_geometry(kv_layout([None]), 1, 256, torch.int8)
    assert wide.bytes_per_token == 2 * (256 + 2 * 4)


@pytest.mark.parametrize(
    ("setting", "activations", "dtype"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.float16),
        ("bf16", torch.float32, torch.bfloat16),
        ("f32", torch.bfloat16, torch.float32),
        ("int8", torch.float32, torch.int8),
    ],
)
def test_dtype_of_the_cache(setting, activations: torch.dtype, dtype: torch.dtype) -> None:
    assert resolve_kv_dtype(setting, activations, 64) == dtype


def test_int8_head_sizes_must_be_aligned() -> None:
    with pytest.raises(ConfigError, match="int8 needs heads of a multiple of 4, got 18") as raised:
        resolve_kv_dtype("int8", torch.float32, 18)
    assert raised.value.param == "kv_cache_dtype"
    assert resolve_kv_dtype("auto", torch.float32, 18) == torch.float32


def test_layers_of_several_groups_share_slots() -> None:
    layout = kv_layout([8, None, 8, 8, None, 8])
    geometry = kv_cache_geometry(layout, 1, 8, torch.float32)
    cache = KVCache(geometry, layout, num_blocks=4, block_size=2)
    addresses = [cache.layer_pages(layer)[0].rows.data_ptr() for layer in range(6)]
    assert addresses[1] == addresses[0] == addresses[2]
    assert addresses[4] == addresses[3] == addresses[5] != addresses[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
def test_the_cache_has_the_size_of_its_geometry(dtype: torch.dtype) -> None:
    cache = small_cache(dtype)
    assert cache.dtype == dtype == cache.buffer.dtype
    num_tokens = cache.block_size * cache.num_blocks
    assert cache.buffer.nbytes == cache.geometry.bytes_per_token * num_tokens
    assert not cache.buffer.any()


def test_layers_are_strided_views_with_equal_strides() -> None:
    cache = small_cache()
    for layer in range(4):
        key, value = (pages.rows for pages in cache.layer_pages(layer))
        assert key.shape == value.shape == (5, 3, 8, 16)
        assert key.stride() == value.stride()
        assert key.stride()[2:] == (16, 1)
        key.fill_(layer + 1)
        value.fill_(-layer - 1)
    for layer in range(4):
        assert (cache.buffer[:, layer, 0] == layer + 1).all()
        assert (cache.buffer[:, layer, 1] == -layer - 1).all()


def test_int8_rows_and_scales_fill_the_buffer_without_overlap() -> None:
    """Every byte of the buffer belongs to exactly one row or scale of one layer."""
    cache = small_cache(torch.int8)
    for layer in range(4):
        key, value = (pages for pages in cache.layer_pages(layer))
        assert isinstance(key, Int8Pages)
        assert isinstance(value, Int8Pages)
        assert key.rows.shape == value.rows.shape == (5, 3, 8, 16)
        assert key.rows.stride() == value.rows.stride()
        assert key.scales.shape == value.scales.shape == (5, 3, 1, 8)
        assert key.scales.stride() == value.scales.stride()
        for part in (key, value):
            part.rows.add_(1)
            part.scales.view(torch.int32).add_(0x01010101)
    assert (cache.buffer == 1).all()


def test_copying_an_int8_block_copies_its_scales() -> None:
    cache = small_cache(torch.int8)
    tokens = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(0))
    pages = cache.layer_pages(2)[1]
    pages.write(torch.arange(8, 16), tokens)
    cache.copy_blocks(torch.tensor([1]), torch.tensor([4]))
    first, copy = pages.read(torch.tensor([1, 4]))
    assert torch.equal(first, copy)
    torch.testing.assert_close(copy.transpose(0, 1), tokens, rtol=0.0, atol=0.02)


def test_a_block_is_one_contiguous_range() -> None:
    cache = small_cache()
    assert cache.buffer[2].is_contiguous()
    key = cache.layer_pages(3)[0].rows
    key[2].fill_(7)
    assert cache.buffer[2].count_nonzero() == key[2].numel()
    assert not cache.buffer[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copying_a_block_copies_all_layers(dtype: torch.dtype) -> None:
    cache = small_cache(dtype)
    for block in range(5):
        cache.buffer[block] = block
    cache.copy_blocks(torch.tensor([1, 2, 1]), torch.tensor([3, 4, 0]))
    copied = [cache.buffer[block].float().unique().tolist() for block in range(5)]
    assert copied == [[1], [1], [2], [1], [2]]


def test_the_buffer_is_aligned_to_a_cache_line() -> None:
    assert small_cache().buffer.data_ptr() % 64 == 0


def resident() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc on this system")
    line = next(each for each in status.read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def resident_share(tensor: torch.Tensor) -> float:
    """Return the share of the whole pages of a tensor that are in memory (mincore)."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        pytest.skip("no mincore on this system")
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * num_pages)()
    size = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert mincore(ctypes.c_void_p(begin), size, found) == 0
    return sum(each & 1 for each in found) / num_pages


def test_an_unused_pool_has_no_resident_memory() -> None:
    before = resident()
    layout = kv_layout([None] * 30)
    cache = KVCache(kv_cache_geometry(layout, 3, 64, torch.bfloat16), layout, 1 << 11, 16)
    assert cache.buffer.nbytes > 512 << 20
    cache.buffer[1000].fill_(1)
    assert resident() - before < 32 << 20


def test_a_populated_pool_is_fully_resident() -> None:
    layout = kv_layout([None] * 30)
    cache = KVCache(kv_cache_geometry(layout, 3, 64, torch.bfloat16), layout, 1 << 8, 16)
    cache.populate()
    assert resident_share(cache.buffer) == 1.0
    assert not cache.buffer.any()
