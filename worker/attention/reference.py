"""Attention in plain torch: one sequence after another, float32 arithmetic.

Works wherever torch does and is meant to be read. Gathers every page of a
sequence, so it is slow.
"""

import torch

from worker.attention.base import AttentionInputs, AttentionShape
from worker.kv_cache import KVCache


class ReferenceAttention:
    """AttentionBackend without kernels."""

    def __init__(self, kv_cache: KVCache, shape: AttentionShape) -> None:
        self._shape = shape
        self._kv_cache = kv_cache

    def plan(self, inputs: AttentionInputs) -> None:
        self._starts = inputs.query_start.tolist()
        self._seq_lens = inputs.seq_lens.tolist()
        self._block_table = torch.from_numpy(inputs.block_table).long()
        slots = torch.from_numpy(inputs.slot_mapping)
        self._write_blocks = slots // self._kv_cache.block_size
        self._write_offsets = slots % self._kv_cache.block_size

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        key_pages, value_pages = self._kv_cache.layer_views(layer)
        key_pages[self._write_blocks, :, self._write_offsets] = key
        value_pages[self._write_blocks, :, self._write_offsets] = value
        output = torch.empty(query.shape, dtype=query.dtype)
        for row, seq_len in enumerate(self._seq_lens):
            tokens = slice(self._starts[row], self._starts[row + 1])
            num_pages = -(-seq_len // self._kv_cache.block_size)
            pages = self._block_table[row, :num_pages]
            output[tokens] = causal_attention(
                query[tokens].float(),
                _gather(key_pages, pages, seq_len).float(),
                _gather(value_pages, pages, seq_len).float(),
                self._shape,
            ).to(query.dtype)
        return output


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """query [Q, Hq, D] at the last Q of the N positions of key, value [Hkv, N, D] → [Q, Hq, D]."""
    num_queries, num_tokens = query.shape[0], key.shape[1]
    grouped = query.view(num_queries, shape.num_kv_heads, shape.group_size, shape.head_dim)
    scores = torch.einsum("qhgd,hnd->hgqn", grouped, key) * shape.scale
    positions = torch.arange(num_tokens - num_queries, num_tokens)
    hidden = torch.arange(num_tokens) > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqn,hnd->qhgd", weights, value).reshape(query.shape)


def _gather(pages: torch.Tensor, block_ids: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first seq_len tokens of a sequence, [num_kv_heads, seq_len, head_dim]."""
    gathered = pages[block_ids].transpose(0, 1)
    return gathered.reshape(gathered.shape[0], -1, gathered.shape[3])[:, :seq_len]
