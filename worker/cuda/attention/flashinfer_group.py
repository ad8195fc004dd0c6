"""FlashInfer's wrappers of one KV cache group: made once, planned each step, run each layer.

A plan fills page-locked memory of its wrapper and queues a copy of it, so the next plan of that
wrapper waits for an event behind the copy; otherwise it would overwrite memory that is yet to be
copied.

Every argument whose default could change results is passed by name, also if the default
would do: the library's own are float16 and not causal.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from worker.attention.backend import AttentionShape
from worker.attention.kv_cache import Window
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer_schedule import DecodeSplits, workspace_bytes
from worker.cuda.attention.paged_batch import GroupParts, Part
from worker.cuda.flashinfer_library import BACKEND

_LAYOUT: Final = "HND"
_LN_2: Final = math.log(2.0)
_CAPTURED_SCHEDULE_BYTES: Final = 512 << 10
"""The library takes 8 MiB for any schedule, on the device and page-locked. One of 4,096 decodes
took its planner 110 KB (132 multiprocessors); where it is too small a plan fails by name."""

PagePair = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, [num_blocks, num_kv_heads, block_size, head_dim] each; a tuple, no list."""
Library = Any
"""The module flashinfer."""
Wrapper = Any
"""A BatchPrefillWithPagedKVCacheWrapper or BatchDecodeWithPagedKVCacheWrapper of the library."""


@dataclass(frozen=True, slots=True)
class Options:
    """Attention options of a deployment.

    capture_sizes: numbers of decodes for which graphs are captured.
    capture_pages: most pages of such a batch in one group, since a graph reads their indices
        from fixed memory.
    cascade_from: full pages from which on a prefix shared by all sequences is read once; 0: never.
    batch_invariant: a sequence is never split over multiprocessors, since where it is split, and so
        the order of its sums, depends on the batch. Not with CUDA graphs: FlashInfer 0.6.18 reads
        out of bounds with both.
    """

    capture_sizes: tuple[int, ...] = ()
    capture_pages: int = 0
    cascade_from: int = 0
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class SentOffsets:
    """Offsets of a Part of decodes, copied to the device."""

    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Fixed memory that kernels in graphs read; int32 on the device, shared by all batch sizes."""

    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor

    def fill(self, offsets: SentOffsets, indices: torch.Tensor) -> None:
        """Write the inputs of the next replay."""
        self.kv_indptr[: len(offsets.kv_indptr)].copy_(offsets.kv_indptr)
        self.last_page_len[: len(offsets.last_page_len)].copy_(offsets.last_page_len)
        self.indices[: len(indices)].copy_(indices)


class PlannedWrapper:
    """A wrapper, and the event after which its next plan may be made."""

    def __init__(self, wrapper: Wrapper, accelerator: Accelerator) -> None:
        self._copied = accelerator.event()
        self._wrapper = wrapper
        self.run = wrapper.run

    def plan(self, *args: Any, **settings: Any) -> None:
        """Plan a batch, after the last schedule has been copied."""
        self._copied.synchronize()
        self._wrapper.plan(*args, **settings)
        self._copied.record()

    def plan_decodes(
        self,
        part: Part,
        indices: torch.Tensor,
        offsets: SentOffsets,
        sizes: tuple[int, int, int, int],
        settings: dict[str, Any],
    ) -> None:
        """Plan a batch of decodes.

        indices: int32, the pages of the part, on the device. offsets: of the part. sizes: heads, KV
        heads, head_dim and block size. settings: the other arguments of the library's `plan`.
        """
        self.plan(
            torch.from_numpy(part.kv_indptr),
            indices,
            torch.from_numpy(part.last_page_len),
            *sizes,
            seq_lens=torch.from_numpy(part.kv_lens),
            **settings,
        )


class CapturedWrapper(PlannedWrapper):
    """A wrapper for decodes of one batch size, whose kernels a graph holds.

    The first plan is the library's own. Later ones fill the buffers of graphs and call
    `fast_decode_plan`, which makes none of the library's copies.
    """

    def __init__(
        self, wrapper: Wrapper, accelerator: Accelerator, library: Library, buffers: GraphBuffers
    ) -> None:
        super().__init__(wrapper, accelerator)
        self._plan_again = library.fast_decode_plan
        self._buffers = buffers
        self._is_planned = False

    def plan_decodes(
        self,
        part: Part,
        indices: torch.Tensor,
        offsets: SentOffsets,
        sizes: tuple[int, int, int, int],
        settings: dict[str, Any],
    ) -> None:
        if not self._is_planned:
            super().plan_decodes(part, indices, offsets, sizes, settings)
            self._is_planned = True
            return
        self._buffers.fill(offsets, indices)
        kept = {name: value for name, value in settings.items() if name != "o_data_type"}
        self._copied.synchronize()
        self._plan_again(
            self._wrapper,
            offsets.kv_indptr,
            indices,
            torch.from_numpy(part.last_page_len),
            *sizes,
            global_override_indptr_cpu=torch.from_numpy(part.kv_indptr),
            **kept,
        )
        self._copied.record()


class WrapperMaker:
    """Makes wrappers that share one workspace: on one stream they run one after the other."""

    def __init__(
        self, accelerator: Accelerator, library: Library, shape: AttentionShape, options: Options
    ) -> None:
        self.library = library
        self.cascades = options.cascade_from > 0
        self.splits_sequences = not options.batch_invariant
        self._accelerator = accelerator
        self._shape = shape
        self._options = options
        self._num_multiprocessors = accelerator.num_multiprocessors()
        num_bytes = workspace_bytes(shape, self._num_multiprocessors, options.capture_sizes)
        self._workspace = accelerator.zeros(num_bytes, torch.uint8)

    def splits(self, block_size: int, window: Window) -> DecodeSplits | None:
        """Return the choice of chunks for decodes; None if no sequence may be split."""
        if not self.splits_sequences:
            return None
        return DecodeSplits(
            self._shape, block_size, window, self._num_multiprocessors, self._options.capture_sizes
        )

    def prefill(self) -> PlannedWrapper:
        """Return a wrapper for sequences with any number of queries."""
        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_cuda_graph=False, backend=BACKEND
        )
        return PlannedWrapper(wrapper, self._accelerator)

    def ragged(self) -> PlannedWrapper:
        """Return a wrapper whose keys and values are those of the step's tokens."""
        wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", use_cuda_graph=False, backend=BACKEND
        )
        return PlannedWrapper(wrapper, self._accelerator)

    def decode(self) -> PlannedWrapper:
        """Return a wrapper for sequences with one query each, in batches of any size."""
        wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=False,
            use_tensor_cores=True,
            backend=BACKEND,
        )
        return PlannedWrapper(wrapper, self._accelerator)

    def captured(self) -> dict[int, PlannedWrapper]:
        """Return a wrapper for each batch size that is captured in a graph."""
        sizes = self._options.capture_sizes
        most = max(sizes, default=0)
        indptr = self._accelerator.zeros(most + 1, torch.int32)
        last_page_len = self._accelerator.zeros(most, torch.int32)
        indices = self._accelerator.zeros(self._options.capture_pages, torch.int32)
        buffers = GraphBuffers(indptr, last_page_len, indices)
        found: dict[int, PlannedWrapper] = {}
        for size in sizes:
            wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                _LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr[: size + 1],
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len[:size],
                backend=BACKEND,
            )
            schedule = self._accelerator.zeros(_CAPTURED_SCHEDULE_BYTES, torch.uint8)
            wrapper.reset_workspace_buffer(self._workspace, schedule)
            found[size] = CapturedWrapper(wrapper, self._accelerator, self.library, buffers)
        return found


class PlannedGroup(Protocol):
    """The wrappers of one KV cache group."""

    def plan(self, parts: GroupParts, indices: torch.Tensor, offsets: SentOffsets) -> None:
        """Plan each part that has rows.

        indices: the page indices of all parts, int32, on the device. offsets: of the decodes.
        """


class GroupWrappers:
    """The wrappers of one group, and which of them the current step runs."""

    def __init__(
        self,
        make: WrapperMaker,
        shape: AttentionShape,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        window: Window,
    ) -> None:
        self._merge = make.library.merge_state_in_place
        self._decode = make.decode()
        self._prefill = make.prefill()
        # Without cascades no prefix is ever planned.
        self._prefix = make.prefill() if make.cascades and window is None else self._prefill
        self._captured = make.captured()
        self._splits = make.splits(block_size, window)
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)
        self._settings: dict[str, Any] = {
            "pos_encoding_mode": "NONE",
            "sm_scale": shape.scale,
            # The query's own token is one of the window, but not to the left of it.
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": kv_dtype,
            "o_data_type": dtype,
            "disable_split_kv": not make.splits_sequences,
        }

    def plan(self, parts: GroupParts, indices: torch.Tensor, offsets: SentOffsets) -> None:
        pages = indices.split_with_sizes(
            [parts.prefix.num_pages, parts.decodes.num_pages, parts.prefills.num_pages]
        )
        self._has_prefix = parts.prefix.num_rows > 0
        if self._has_prefix:
            self._plan_prefill(self._prefix, parts.prefix, pages[0], causal=False)
        self._runs: list[tuple[PlannedWrapper, slice]] = []
        num_decodes = parts.decodes.num_rows
        if num_decodes:
            alone = not parts.prefills.num_rows and not self._has_prefix
            wrapper = self._captured.get(num_decodes, self._decode) if alone else self._decode
            chunk = self._splits and self._splits.chunk_pages(np.diff(parts.decodes.kv_indptr))
            settings = self._settings | {"fixed_split_size": chunk}
            wrapper.plan_decodes(parts.decodes, pages[1], offsets, self._sizes, settings)
            self._runs.append((wrapper, slice(num_decodes)))
        if parts.prefills.num_rows:
            self._plan_prefill(self._prefill, parts.prefills, pages[2], causal=True)
            self._runs.append((self._prefill, slice(num_decodes, None)))

    def run(
        self,
        query: torch.Tensor,
        pages: PagePair,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend for query [T, num_heads, head_dim], in batch order; write to output.

        sinks: as in AttentionBackend.run. The wrappers ignore sinks that they are given, so the
        output is rescaled by the share of the softmax that the sink leaves.
        """
        if not self._has_prefix and sinks is None:
            for wrapper, tokens in self._runs:
                wrapper.run(query[tokens], pages, out=output[tokens])
            return
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        for wrapper, tokens in self._runs:
            wrapper.run(query[tokens], pages, out=output[tokens], lse=sums[tokens], return_lse=True)
        if self._has_prefix:
            shared, shared_sums = torch.empty_like(output), torch.empty_like(sums)
            self._prefix.run(query, pages, out=shared, lse=shared_sums, return_lse=True)
            self._merge(output, sums, shared, shared_sums)
        if sinks is not None:
            # Log-sums have base 2: exp(sum) / (exp(sum) + exp(sink)).
            output.mul_(torch.sigmoid(sums * _LN_2 - sinks).unsqueeze(-1))

    def _plan_prefill(
        self, wrapper: PlannedWrapper, part: Part, pages: torch.Tensor, causal: bool
    ) -> None:
        wrapper.plan(
            torch.from_numpy(part.qo_indptr),
            torch.from_numpy(part.kv_indptr),
            pages,
            torch.from_numpy(part.last_page_len),
            *self._sizes,
            causal=causal,
            seq_lens=torch.from_numpy(part.kv_lens),
            # Otherwise it looks for the longest query in Python, one after the other.
            max_token_per_sequence=part.longest_query,
            **self._settings,
        )
