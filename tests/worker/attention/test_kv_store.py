"""Both ways of writing K and V against a loop over tokens.

The kernel runs in Triton's interpreter.
"""

import pytest
import torch

from tests.fakes.triton import interpret_kernels
from tests.worker.reference.torch_kernels import store_by_index
from worker.attention.kv_cache import DensePages, KVCache, kv_cache_geometry, kv_layout
from worker.cuda.attention.kv_store import PADDING_SLOT, TritonStore

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 6, 4, 64
SLOTS = (9, 4, 23, PADDING_SLOT, 10, 5, PADDING_SLOT)


@pytest.fixture(params=["torch", "triton"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonStore:
    if request.param == "torch":
        return store_by_index
    interpret_kernels(monkeypatch)
    return TritonStore()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_tokens_are_stored_in_their_slots_only(
    store: TritonStore, num_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    layout = kv_layout([None, None])
    geometry = kv_cache_geometry(layout, num_heads, HEAD_DIM, kv_dtype)
    cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    # Values that 8 bits represent exactly, and sometimes larger ones.
    fused = torch.randint(-15, 16, (len(SLOTS), 3, num_heads * HEAD_DIM), generator=generator)
    fused[:, :, ::7] *= 128
    _, key, value = (
        part.view(len(SLOTS), num_heads, HEAD_DIM) for part in fused.to(dtype).unbind(1)
    )
    before = torch.randint(0, 16, cache.buffer.shape, generator=generator).to(kv_dtype)
    cache.buffer.copy_(before)
    store(torch.tensor(SLOTS), key, value, cache.layer_pages(1))
    expected = before.float()
    largest = torch.finfo(kv_dtype).max
    for part, tokens in enumerate((key, value)):
        for slot, token in zip(SLOTS, tokens, strict=True):
            if slot != PADDING_SLOT:
                block, offset = divmod(slot, BLOCK_SIZE)
                expected[block, 1, part, :, offset] = token.float().clamp(-largest, largest)
    # The contents of the null block are arbitrary.
    assert torch.equal(cache.buffer[1:].float(), expected[1:])


def test_the_two_parts_of_latents_are_stored_side_by_side(store: TritonStore) -> None:
    layout = kv_layout([None, None])
    cache = KVCache(
        kv_cache_geometry(layout, 1, 128 + 16, torch.bfloat16, 1), layout, NUM_BLOCKS, BLOCK_SIZE
    )
    rows = cache.layer_pages(1)[0].rows
    key = torch.randn(len(SLOTS), 1, 128 + 16).bfloat16()
    store(
        torch.tensor(SLOTS),
        key[..., :128],
        key[..., 128:].contiguous(),
        (DensePages(rows[..., :128]), DensePages(rows[..., 128:])),
    )
    expected = torch.zeros_like(cache.buffer)
    for slot, token in zip(SLOTS, key, strict=True):
        if slot != PADDING_SLOT:
            expected[slot // BLOCK_SIZE, 1, 0, :, slot % BLOCK_SIZE] = token
    # The contents of the null block are arbitrary.
    assert torch.equal(cache.buffer[1:], expected[1:])
