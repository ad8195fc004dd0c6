"""Attention of encoders on CUDA by FlashInfer's BatchPrefillWithRaggedKVCacheWrapper.

A bidirectional model computes all tokens of a text in one step, so K and V are read where the
projections put them, without pages. The library has windows to the left only. A window of w tokens
to both sides, reach r = w - 1, is two plans, each of which has some of the queries:

    text                 0 1 2 3 4 5 6 7 8 9                 r = 3
    query 4              . K K K q K K K . .     most queries: causal, for keys that end r later
    queries 7, 8, 9      . . . . . . . . . .     the last r queries: all keys to their right exist

Causal masks count from the right: with n - r queries over n keys, query i sees keys up to i + r,
and a window to the left of 2r begins at i - r. The last r queries see keys to the end, with a
window of r. Their plan does not split sequences: the planner would count on a causal mask, and
leave out keys (scheduler.cuh, effective_kv_len_arr).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from worker.attention.backend import (
    AttentionInputs,
    AttentionShape,
    QuerySplit,
    Rotation,
    start_offsets,
)
from worker.attention.kv_cache import KVCache, Window
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer_group import Library, Options, PlannedWrapper, WrapperMaker
from worker.cuda.layers.flashinfer_kernels import FlashInferRotary
from worker.cuda.transfers import QueuedTransfers
from worker.models.rotary import rotate

RAGGED_DIMS: Final = (64, 128, 256)
"""Sizes of heads that there are kernels for; smaller heads are padded with zeros."""

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """Queries of a step that are planned together; S sequences.

    counts: int32 [S], queries of each sequence, its first or its last. causal, window_left: of
    the mask, which counts from the right. may_split: whether the keys of a sequence may be divided.
    """

    counts: Int32s
    causal: bool
    window_left: int
    may_split: bool = True


def ragged_parts(lengths: Int32s, window: Window) -> list[RaggedPart]:
    """Return the parts of a step in layers with this window to both sides; none without queries.

    lengths: int32 [S], tokens of each sequence.
    """
    if window is None:
        return [RaggedPart(lengths, causal=False, window_left=-1)]
    reach = window - 1
    last = np.minimum(lengths, reach)
    parts = (
        RaggedPart(lengths - last, causal=True, window_left=2 * reach),
        RaggedPart(last, causal=False, window_left=reach, may_split=False),
    )
    return [part for part in parts if part.counts.any()]


def padded_dim(head_dim: int) -> int:
    """Return the size of a head that kernels compute, 0 if there is none."""
    return next((size for size in RAGGED_DIMS if size >= head_dim), 0)


class FlashInferRaggedAttention:
    """An attention backend for bidirectional models; used by one thread on one stream."""

    query_split = QuerySplit.DRAFTS

    def __init__(
        self,
        kv_cache: KVCache,
        shape: AttentionShape,
        dtype: torch.dtype,
        accelerator: Accelerator,
        library: Library,
    ) -> None:
        """Arguments as of FlashInferAttention; nothing is kept in the pages of the cache."""
        self._layout = kv_cache.layout
        self._head_dim, self._kernel_dim = shape.head_dim, padded_dim(shape.head_dim)
        self._is_narrow = self._head_dim != self._kernel_dim
        self._rotate = None if self._is_narrow else FlashInferRotary(library, accelerator)
        self._transfers = QueuedTransfers(accelerator)
        make = WrapperMaker(
            accelerator, library, replace(shape, head_dim=self._kernel_dim), Options()
        )
        self._groups = [
            _Group(make, shape, self._kernel_dim, dtype, window) for window in self._layout.windows
        ]

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """Plan the step for each window; waits only for the copies of the plans before."""
        step = inputs[0]
        lengths = np.diff(step.query_start)
        assert (lengths == step.seq_lens).all(), "a sequence must be computed in one step"
        orders = [group.plan(lengths) for group in self._groups]
        moved = [order for order in orders if order is not None]
        sent = iter(self._transfers.to_device([each for pair in moved for each in pair]))
        self._orders = [None if order is None else (next(sent), next(sent)) for order in orders]

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the kernels of one layer and wait for none."""
        assert value is not None, "encoders have no latents"
        assert sinks is None, "encoders have no sinks"
        index = self._layout.layer_slots[layer].group
        if self._rotate is not None:
            self._rotate(query, key, rotation)
        else:
            query, key = (self._padded(rotate(each, rotation)) for each in (query, key))
            value = self._padded(value)
        order = self._orders[index]
        ordered = query if order is None else query.index_select(0, order[0])
        output = ordered.new_empty(ordered.shape)
        self._groups[index].run(ordered, key, value, output)
        if order is not None:
            output = output.index_select(0, order[1])
        return output[..., : self._head_dim].contiguous() if self._is_narrow else output

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        """Return heads with zeros behind them, up to the size that kernels compute."""
        return F.pad(heads, (0, self._kernel_dim - self._head_dim))


class _Group:
    """The wrappers of the layers with one window, and which of them the current step runs."""

    def __init__(
        self,
        make: WrapperMaker,
        shape: AttentionShape,
        head_dim: int,
        dtype: torch.dtype,
        window: Window,
    ) -> None:
        self._window = window
        self._wrappers = [make.ragged() for _ in range(1 if window is None else 2)]
        self._runs: list[tuple[PlannedWrapper, slice]] = []
        self._sizes = (shape.num_heads, shape.num_kv_heads, head_dim)
        self._settings = {
            "pos_encoding_mode": "NONE",
            "sm_scale": shape.scale,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "o_data_type": dtype,
        }

    def plan(self, lengths: Int32s) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Plan the parts of a step; return the order of its queries and the way back.

        Both int64 [T]: query i of the parts, one after the other, is token order[i] of the step,
        and token i of the step is query back[i]. None if they are in the order of the step.
        """
        parts = ragged_parts(lengths, self._window)
        kv_indptr = torch.from_numpy(start_offsets(lengths))
        self._runs, begin = [], 0
        # A step without queries of one part leaves the last wrapper unused.
        for wrapper, part in zip(self._wrappers, parts, strict=False):
            end = begin + int(part.counts.sum())
            wrapper.plan(
                torch.from_numpy(start_offsets(part.counts)),
                kv_indptr,
                *self._sizes,
                causal=part.causal,
                window_left=part.window_left,
                disable_split_kv=not part.may_split,
                **self._settings,
            )
            self._runs.append((wrapper, slice(begin, end)))
            begin = end
        if len(parts) == 1:
            return None
        starts = start_offsets(lengths)[:-1]
        position = np.arange(begin) - np.repeat(starts, lengths)
        is_last = position >= np.repeat(parts[0].counts, lengths)
        order = np.argsort(is_last, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(begin)
        return order, back

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        for wrapper, queries in self._runs:
            wrapper.run(query[queries], key, value, out=output[queries])
