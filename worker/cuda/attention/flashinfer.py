"""Attention on CUDA by FlashInfer 0.6.18: decodes and prefills of each group apart.

FlashInferAttention orders a step's sequences and uploads its arrays; paged_batch.py makes the
index arrays, flashinfer_group.py calls the library, and flashinfer_latent.py its kernels for
latent KV. One plan for all would give a decode
the tiles of the longest prompt, so each kind has its own:

    step ──▶ decodes ──▶ plan ──▶ copy of the schedule is queued ──▶ event
         └─▶ prefills ─▶ plan ──▶      "            "            ──▶ event
    layer ─▶ rotate q, k ─▶ write K, V ─▶ run decodes ─▶ run prefills

Nothing waits except a plan, for the copy of the plan before it: what plans need is on the host,
and what kernels need was queued before them.

Cascade attention is an option: a prefix that all sequences of a step share is read once for all
queries, and merged with attention to the tokens behind it (Ye et al., FlashInfer, "composable
formats").
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from proto.errors import ConfigError, install_command
from worker.attention.backend import AttentionInputs, AttentionShape, QuerySplit, Rotation
from worker.attention.kv_cache import KVCache
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer_group import (
    GroupWrappers,
    Library,
    Options,
    PlannedGroup,
    SentOffsets,
    WrapperMaker,
)
from worker.cuda.attention.flashinfer_ragged import padded_dim
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.attention.paged_batch import StepPages, gather_pages, shared_pages, step_pages
from worker.cuda.flashinfer_library import HEAD_DIMS, LATENT_DIMS, VERSION
from worker.cuda.layers.flashinfer_kernels import (
    FlashInferRotary,
    import_flashinfer,
    installed_version,
)
from worker.cuda.transfers import QueuedTransfers

QUERY_DTYPES: Final = (torch.bfloat16, torch.float16)
EIGHT_BITS: Final = torch.float8_e4m3fn
"""Dtype of K and V in 8 bits, without scales; else they have the dtype of the query."""
DEFAULTS: Final = Options()


def load_library() -> Library:
    """Return the module flashinfer; raises ConfigError if it is missing or another version."""
    found = installed_version()
    if found is None:
        raise _refusal(f"needs FlashInfer: {install_command('gpu')}")
    if found != VERSION:
        raise _refusal(f"needs flashinfer-python {VERSION}, found {found}")
    library: Library = import_flashinfer()
    return library


def refuse_unsupported(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ConfigError for heads and dtypes that the kernels do not support."""
    if dtype not in QUERY_DTYPES:
        raise _refusal(f"computes in bfloat16 or float16, not {_name(dtype)}")
    if shape.latent_dim:
        if kv_dtype != dtype:
            raise ConfigError(
                f"--attention-backend flashinfer needs latents of {_name(dtype)}, as the "
                f"activations are, not {_name(kv_dtype)}",
                "kv_cache_dtype",
            )
        if (shape.latent_dim, shape.rotary_dim) != LATENT_DIMS:
            raise _refusal(
                "has kernels for latents of {} with {} numbers that rotate, not {} with {}".format(
                    *LATENT_DIMS, shape.latent_dim, shape.rotary_dim
                )
            )
        return
    if kv_dtype not in (dtype, EIGHT_BITS):
        raise ConfigError(
            f"--attention-backend flashinfer needs K and V of {_name(dtype)}, as the activations "
            f"are, or of {_name(EIGHT_BITS)}, not {_name(kv_dtype)}",
            "kv_cache_dtype",
        )
    if shape.bidirectional and padded_dim(shape.head_dim):
        return
    if shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise _refusal(f"has kernels for heads of {sizes}, not {shape.head_dim}")


class FlashInferAttention:
    """An attention backend on FlashInfer's wrappers; used by one thread on one stream.

    Raises ConfigError as `refuse_unsupported` does.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        shape: AttentionShape,
        dtype: torch.dtype,
        accelerator: Accelerator,
        library: Library,
        store: TritonStore,
        options: Options = DEFAULTS,
    ) -> None:
        refuse_unsupported(shape, dtype, kv_cache.dtype)
        self.query_split = QuerySplit.ALL if options.batch_invariant else QuerySplit.DRAFTS
        self._kv_cache = kv_cache
        self._store = store
        self._rotate = FlashInferRotary(library, accelerator)
        self._cascade_from = options.cascade_from
        self._transfers = QueuedTransfers(accelerator)
        self._groups = self._create_groups(accelerator, library, shape, dtype, options)
        self._capture_sizes = frozenset(options.capture_sizes)
        most = max(options.capture_sizes, default=0)
        self._slots: list[torch.Tensor] = []
        """Where each group writes K and V of the step's tokens, int64 [T]."""
        self._offsets: list[SentOffsets] = []
        """Of the decodes of each group."""
        self._moves: list[torch.Tensor] = []
        """Tokens in the order decodes, prefills, and the way back, int64 [T] each; empty if the
        step has this order."""
        self._fixed_slots = [accelerator.zeros(most, torch.int64) for _ in self._groups]

    def _create_groups(
        self,
        accelerator: Accelerator,
        library: Library,
        shape: AttentionShape,
        dtype: torch.dtype,
        options: Options,
    ) -> Sequence[PlannedGroup]:
        """Create the wrappers of each KV cache group, and find the pages of each layer."""
        make = WrapperMaker(accelerator, library, shape, options)
        cache = self._kv_cache
        self._pages = [cache.layer_pages(layer) for layer in range(len(cache.layout.layer_slots))]
        self._wrappers = [
            GroupWrappers(
                make=make,
                shape=shape,
                dtype=dtype,
                kv_dtype=cache.dtype,
                block_size=cache.block_size,
                window=window,
            )
            for window in cache.layout.windows
        ]
        return self._wrappers

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """Plan all groups of a step; waits only for the copies of the plans before."""
        windows = self._kv_cache.layout.windows
        pages = step_pages(inputs, windows, self._kv_cache.block_size, self._shared(inputs))
        indices = self._upload(inputs, pages)
        page_indices = indices.split_with_sizes([parts.num_pages for parts in pages.groups])
        for group, parts, own, offsets in zip(
            self._groups, pages.groups, page_indices, self._offsets, strict=True
        ):
            group.plan(parts, own, offsets)
        count = inputs[0].num_tokens
        if count in self._capture_sizes and pages.order.num_decodes == count:
            # Graphs read slots from fixed memory.
            for fixed, slots in zip(self._fixed_slots, self._slots, strict=True):
                fixed[:count].copy_(slots)
            self._slots = [fixed[:count] for fixed in self._fixed_slots]

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the kernels of one layer and wait for none. Rotates query and key in place."""
        group = self._kv_cache.layout.layer_slots[layer].group
        pages = self._pages[layer]
        assert value is not None, "latents have another backend"
        self._rotate(query, key, rotation)
        self._store(self._slots[group], key, value, pages)
        ordered = query.index_select(0, self._moves[0]) if self._moves else query
        output = ordered.new_empty(ordered.shape)
        self._wrappers[group].run(ordered, (pages[0].rows, pages[1].rows), output, sinks)
        return output.index_select(0, self._moves[1]) if self._moves else output

    def _shared(self, inputs: Sequence[AttentionInputs]) -> list[int]:
        """Return for each group the pages of the prefix that is attended to once."""
        shared = [0] * len(inputs)
        if self._cascade_from and inputs[0].num_seqs > 1:
            for group, window in enumerate(self._kv_cache.layout.windows):
                if window is None:
                    found = shared_pages(inputs[group], self._kv_cache.block_size)
                    shared[group] = found if found >= self._cascade_from else 0
        return shared

    def _upload(self, inputs: Sequence[AttentionInputs], pages: StepPages) -> torch.Tensor:
        """Copy all arrays of a step to the device at once; return the page indices there.

        Slots, offsets and moves of the step are kept.
        """
        moves = [] if pages.order.as_in_step else [pages.order.tokens, pages.order.back]
        decodes = [group.decodes for group in pages.groups]
        sent = self._transfers.to_device(
            [group.slot_mapping for group in inputs]
            + [part.kv_indptr for part in decodes]
            + [part.last_page_len for part in decodes]
            + [pages.runs, pages.shift]
            + [np.concatenate([group.block_table.reshape(-1) for group in inputs])]
            + moves
        )
        count = len(inputs)
        self._slots, indptr, last_page_len = (
            sent[begin : begin + count] for begin in (0, count, 2 * count)
        )
        self._offsets = list(map(SentOffsets, indptr, last_page_len))
        runs, shift, tables, *self._moves = sent[3 * count :]
        return gather_pages(tables, runs, shift, pages.num_pages)


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"--attention-backend flashinfer {what}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
