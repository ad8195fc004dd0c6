"""Pages of a model that keeps no KV cache: those of one step and one layer.

Attention backends read K and V from pages. A bidirectional model computes all tokens of a sequence
in one step, and its K and V are needed only within a layer, so a few pages serve all layers. They
are handed out in the order of the step:

    sequences   [ a a a a a ][ b b ][ c c c c c c c ]
    pages       | a a a a | a . . . | b b . . | c c c c | c c c . |
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import KVCache

SCRATCH_BLOCK: Final = 16
"""Tokens of a page."""


def num_scratch_blocks(num_tokens: int, num_seqs: int) -> int:
    """Return how many pages are enough for a step with these numbers of tokens and sequences."""
    return num_tokens // SCRATCH_BLOCK + min(num_seqs, num_tokens)


def with_pages(inputs: Sequence[AttentionInputs], kv_cache: KVCache) -> tuple[AttentionInputs, ...]:
    """Return inputs for each group of a cache's layout, with scratch pages if it keeps nothing.

    inputs: one for each group in the engine.
    """
    if not kv_cache.layout.is_scratch:
        return tuple(inputs)
    (step,) = inputs
    counts, size = np.diff(step.query_start), kv_cache.block_size
    assert (counts == step.seq_lens).all(), "a sequence must be computed in one step"
    num_pages = -(-counts // size)
    first = (np.cumsum(num_pages) - num_pages).astype(np.int32)
    assert num_pages.sum() <= kv_cache.num_blocks, "the step is larger than its pages"
    # Entries beyond a sequence's last page are pages of others, and are not read.
    table = first[:, None] + np.arange(num_pages.max(), dtype=np.int32)
    start = first.astype(np.int64) * size - step.query_start[:-1]
    slots = np.arange(step.query_start[-1], dtype=np.int64) + np.repeat(start, counts)
    paged = AttentionInputs(step.query_start, step.seq_lens, table, slots)
    return (paged,) * len(kv_cache.layout.windows)
