"""Attention by the C++ kernels (csrc/attention/): one call per layer for the whole batch.

CpuAttention holds the structures that the kernels read. Groups with the same window share a plan,
which depends on lengths and on what queries see alone; each group has pages of its own.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from worker.attention.backend import AttentionInputs, AttentionShape, QuerySplit, Rotation
from worker.attention.kv_cache import KVCache, Window
from worker.attention.scratch_pages import with_pages
from worker.cpu.kernel_structures import (
    AttentionCall,
    AttentionLayer,
    AttentionSchedule,
    AttentionStep,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels

_CACHE_DTYPE_CODES: Final = {**DTYPE_CODES, torch.int8: 3}
_TILE_FIELDS: Final = 9
_TASK_FIELDS: Final = 3
_ROUND_FIELDS: Final = 2
MOST_PARTIAL_BYTES: Final = 32 << 20
"""Most bytes for the partial results of split sequences; more are computed in rounds."""
_UNBOUNDED: Final = 1 << 40
"""A window of more tokens than any sequence has, for layers without one."""


class UnsupportedShapeError(Exception):
    """The kernels do not support these heads; the message says why."""


class AttentionPlan:
    """How the kernels cut the current step into tasks, for one window."""

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        most_partial_bytes: int = MOST_PARTIAL_BYTES,
    ) -> None:
        self.structure = AttentionSchedule()
        self._kernels = kernels
        self._partial_width = int(kernels.partial_width(shape.head_dim))
        self._most_partial_rows = most_partial_bytes // (4 * self._partial_width)

    def make(self, step: AttentionStep) -> None:
        """Plan a step; its block table and slots do not matter."""
        plan = self.structure
        plan.tiles = plan.tasks = plan.rounds = None
        step.most_partial_rows = self._most_partial_rows
        self._kernels.attention_plan(step, plan)
        self._tiles = np.empty((plan.num_tiles, _TILE_FIELDS), dtype=np.int32)
        self._tasks = np.empty((plan.num_tasks, _TASK_FIELDS), dtype=np.int32)
        self._rounds = np.empty((plan.num_rounds, _ROUND_FIELDS), dtype=np.int32)
        self._partials = np.empty((plan.num_partial_rows, self._partial_width), dtype=np.float32)
        plan.tiles, plan.tasks = self._tiles.ctypes.data, self._tasks.ctypes.data
        plan.rounds, plan.partials = self._rounds.ctypes.data, self._partials.ctypes.data
        self._kernels.attention_plan(step, plan)


class CpuAttention:
    """An attention backend on the C++ kernels.

    Raises UnsupportedShapeError for heads, or parts of latent ones, that are not a multiple of 8.
    """

    def __init__(
        self,
        kernels: Kernels,
        kv_cache: KVCache,
        shape: AttentionShape,
        most_partial_bytes: int = MOST_PARTIAL_BYTES,
    ) -> None:
        if shape.head_dim % 8:
            raise UnsupportedShapeError(f"head_dim must be a multiple of 8, got {shape.head_dim}")
        if shape.latent_dim % 8:
            raise UnsupportedShapeError(f"a latent must be a multiple of 8, got {shape.latent_dim}")
        assert shape.scale > 0, "the kernels look for the largest score before scaling"
        # Decodes multiply int8 pages as integers, chunks do not (AVX-512 VNNI).
        is_int8 = kv_cache.dtype == torch.int8
        self.query_split = QuerySplit.DRAFTS if is_int8 else QuerySplit.NONE
        self._kernels = kernels
        self._kv_cache = kv_cache
        self._shape = shape
        self._plans = {
            window: AttentionPlan(kernels, shape, most_partial_bytes)
            for window in kv_cache.layout.windows
        }
        self._groups = [self._step(window) for window in kv_cache.layout.windows]
        self._layers = [self._layer(layer) for layer in range(len(kv_cache.layout.layer_slots))]
        calls = [self._describe_layer(layer) for layer in range(len(self._layers))]
        self._calls = (AttentionCall * len(calls))(*calls)

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        # The kernels read these arrays until the next plan.
        self._inputs = with_pages(inputs, self._kv_cache)
        planned = set()
        windows = self._kv_cache.layout.windows
        for window, step, group in zip(windows, self._groups, self._inputs, strict=True):
            step.num_seqs, step.num_tokens = group.num_seqs, group.num_tokens
            step.max_blocks = group.block_table.shape[1]
            step.query_start = group.query_start.ctypes.data
            step.seq_lens = group.seq_lens.ctypes.data
            step.block_table = group.block_table.ctypes.data
            step.slot_mapping = group.slot_mapping.ctypes.data
            attend_end = group.attend_end
            step.attend_end = None if attend_end is None else attend_end.ctypes.data
            if window not in planned:
                planned.add(window)
                self._plans[window].make(step)

    def layer_calls(self, num_tokens: int) -> int:
        """Return the address of an array of `AttentionCall`, one for each layer.

        For a kernel that runs all layers. The calls describe the planned step of `num_tokens`.
        """
        assert num_tokens == self._inputs[0].num_tokens
        return ctypes.addressof(self._calls)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check(query, self._shape.num_heads)
        self._check(key, self._shape.num_kv_heads)
        assert (value is None) == (self._shape.latent_dim > 0)
        if value is not None:
            self._check(value, self._shape.num_kv_heads)
            assert value.dtype == key.dtype, "K and V are of one dtype"
        assert query.dtype == key.dtype, "queries and K are of one dtype"
        assert rotation.dtype == torch.float32
        assert rotation.is_contiguous()
        assert rotation.shape == (query.shape[0], 2, self._shape.rotary_dim // 2)
        if sinks is not None:
            assert (sinks.shape, sinks.dtype) == ((self._shape.num_heads,), torch.float32)
            assert sinks.is_contiguous()
        output = query.new_empty((*query.shape[:2], self._shape.value_dim))
        layout = self._kv_cache.layout
        group = layout.layer_slots[layer].group
        call = self._layers[layer]
        call.dtype = DTYPE_CODES[query.dtype]
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.key, call.key_stride = key.data_ptr(), key.stride(0)
        if value is not None:
            call.value, call.value_stride = value.data_ptr(), value.stride(0)
        call.rotation, call.output = rotation.data_ptr(), output.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        plan = self._plans[layout.windows[group]].structure
        self._kernels.attention_run(self._groups[group], plan, call)
        return output

    def _step(self, window: Window) -> AttentionStep:
        """Return the structure of a group, with the fields that do not change from step to step."""
        tokens = _UNBOUNDED if window is None else window
        ahead = tokens - 1 if self._shape.bidirectional else 0
        return AttentionStep(
            num_heads=self._shape.num_heads,
            num_kv_heads=self._shape.num_kv_heads,
            head_dim=self._shape.head_dim,
            block_size=self._kv_cache.block_size,
            window=tokens + ahead,
            ahead=ahead,
            latent_dim=self._shape.latent_dim,
            scale=self._shape.scale,
            soft_cap=self._shape.soft_cap,
        )

    def _layer(self, layer: int) -> AttentionLayer:
        """Return the structure of a layer, with the fields that do not change from step to step."""
        key, value = (pages.rows for pages in self._kv_cache.layer_pages(layer))
        return AttentionLayer(
            cache_dtype=_CACHE_DTYPE_CODES[self._kv_cache.dtype],
            key_pages=key.data_ptr(),
            value_pages=value.data_ptr(),
            block_stride=key.stride(0),
            head_stride=key.stride(1),
        )

    def _describe_layer(self, layer: int) -> AttentionCall:
        layout = self._kv_cache.layout
        group = layout.layer_slots[layer].group
        plan = self._plans[layout.windows[group]].structure
        return AttentionCall(
            ctypes.cast(self._kernels.attention_run, ctypes.c_void_p),
            *map(ctypes.addressof, (self._groups[group], plan, self._layers[layer])),
        )

    def _check(self, packed: torch.Tensor, num_heads: int) -> None:
        """Assert what the kernels, which take addresses, assume about a tensor."""
        assert packed.shape == (self._groups[0].num_tokens, num_heads, self._shape.head_dim)
        assert packed.stride(2) == 1, "a head must be contiguous"
        assert num_heads == 1 or packed.stride(1) == self._shape.head_dim, "heads must be adjacent"
