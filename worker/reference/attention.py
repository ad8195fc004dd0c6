"""Attention in plain torch: one sequence after another, float32 arithmetic.

The fallback on machines without kernels, and slow: it gathers every page of a sequence that a
window leaves visible.
"""

from collections.abc import Sequence

import torch

from worker.attention.backend import AttentionInputs, AttentionShape, QuerySplit, Rotation
from worker.attention.kv_cache import KVCache, Pages, Window
from worker.attention.scratch_pages import with_pages
from worker.batch.transfers import HostTransfers, Transfers
from worker.models.rotary import rotate


class ReferenceAttention:
    """An attention backend without kernels. transfers: to the memory of the cache."""

    query_split = QuerySplit.DRAFTS

    def __init__(
        self, kv_cache: KVCache, shape: AttentionShape, transfers: Transfers | None = None
    ) -> None:
        self._shape = shape
        self._kv_cache = kv_cache
        self._transfers = transfers or HostTransfers()

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        self._groups = with_pages(inputs, self._kv_cache)
        arrays = [
            each for group in self._groups for each in (group.slot_mapping, group.block_table)
        ]
        attend_end = self._groups[0].attend_end  # the same in all groups
        sent = self._transfers.to_device(arrays if attend_end is None else [*arrays, attend_end])
        self._attend_end = None if attend_end is None else sent.pop()
        # Of each group the slots, and the pages of each sequence.
        self._slots = sent[::2]
        self._tables = [
            table.view(group.block_table.shape).long()
            for table, group in zip(sent[1::2], self._groups, strict=True)
        ]

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = self._kv_cache.layout
        group = layout.layer_slots[layer].group
        inputs, window = self._groups[group], layout.windows[group]
        key_pages, value_pages = self._kv_cache.layer_pages(layer)
        slots, tables = self._slots[group], self._tables[group]
        latent_dim, value_dim = self._shape.latent_dim, self._shape.value_dim
        key_pages.write(slots, rotate(key.float(), rotation, latent_dim))
        if value is not None:
            value_pages.write(slots, value)
        turned = rotate(query, rotation, latent_dim).float()
        output = query.new_empty((*query.shape[:2], value_dim))
        for row, seq_len in enumerate(inputs.seq_lens.tolist()):
            tokens = slice(int(inputs.query_start[row]), int(inputs.query_start[row + 1]))
            first = first_in_sight(seq_len - (tokens.stop - tokens.start), window)
            table = tables[row]
            attend_end = None if self._attend_end is None else self._attend_end[tokens]
            output[tokens] = dense_attention(
                turned[tokens],
                _gather(key_pages, table, first, seq_len),
                _gather(value_pages, table, first, seq_len)[..., :value_dim],
                self._shape,
                window,
                sinks,
                None if attend_end is None else attend_end - first,
            ).to(query.dtype)
        return output


def first_in_sight(position: int, window: Window) -> int:
    """Return the first token that the query at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: AttentionShape,
    window: Window,
    sinks: torch.Tensor | None = None,
    attend_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [Q, Hq, V] of query [Q, Hq, D] to key [Hkv, N, D] and value [Hkv, N, V].

    The queries have the last Q of the N positions. sinks: as in AttentionBackend.run. attend_end:
    int [Q], end among the N of what each query sees; None: after its own position.
    """
    num_queries, num_tokens = query.shape[0], key.shape[1]
    grouped = query.view(num_queries, shape.num_kv_heads, shape.group_size, shape.head_dim)
    scores = torch.einsum("qhgd,hnd->hgqn", grouped, key) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    device = query.device
    positions = torch.arange(num_tokens - num_queries, num_tokens, device=device)
    distance = positions[:, None] - torch.arange(num_tokens, device=device)
    if shape.bidirectional:
        distance = distance.abs()
    hidden = distance < 0
    if attend_end is not None:
        hidden = torch.arange(num_tokens, device=device) >= attend_end[:, None]
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.view(shape.num_kv_heads, shape.group_size, 1, 1)
        sink = sink.expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    # Zero times NaN is NaN, so a masked key would spread its NaN to queries that do not see it.
    broken = ~value.isfinite().all(dim=-1)
    output = torch.einsum("hgqn,hnd->qhgd", weights, value.masked_fill(broken[..., None], 0.0))
    seen = torch.einsum("qn,hn->qh", (~hidden).float(), broken.float()) > 0
    return output.masked_fill(seen[:, :, None, None], float("nan")).flatten(1, 2)


def _gather(pages: Pages, table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return tokens [first, end) of a sequence, float32 [num_kv_heads, end - first, head_dim]."""
    block_size = pages.rows.shape[2]
    skipped = first // block_size
    gathered = pages.read(table[skipped : -(-end // block_size)]).transpose(0, 1)
    tokens = gathered.reshape(gathered.shape[0], -1, gathered.shape[3])
    return tokens[:, first - skipped * block_size : end - skipped * block_size]
