"""Latent attention on CUDA by FlashInfer's BatchMLAPagedAttentionWrapper.

Queries arrive absorbed (DeepSeek-V2, section 2.1.3; worker/models/latent_attention.py), so a token
has one key of 576 numbers for all heads, whose first 512 are its value:

    page     [ block_size, 576 ]    | latent 512 | rotated 64 |     two views of it, ckv and kpe
    query    [ T, heads, 576 ]      | latent 512 | rotated 64 |     two views, q_nope and q_pe
    output   [ T, heads, 512 ]

The library has one kind of wrapper for decodes and prefills. Kernels read a plan from the wrapper's
own device memory and page indices from the tensor that was planned, nothing else; and the
grid of a plan of decodes has the same size for any number of them. So one wrapper serves decodes of
every size and graphs of all sizes, whose page indices lie in fixed memory.

The kernels' causal mask assumes that the number of heads divides a tile of 128 rows: with 20
heads the last query of a tile can miss its own key. Prefills therefore run heads in powers of two,
a call each; decodes, which see all keys, need no mask.

    20 heads    decodes  [ 0 … 19 ]      prefills  [ 0 … 15 ][ 16 … 19 ]

The library's other kernels for Hopper ("fa3") have the same mask; "fa2" needs compute capability
8.0 only.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from proto.errors import ConfigError
from proto.settings.config import ServeConfig
from worker.attention.backend import AttentionShape, Rotation
from worker.attention.kv_cache import DensePages, KVCache, Pages
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer import FlashInferAttention, refuse_unsupported
from worker.cuda.attention.flashinfer_group import (
    Library,
    Options,
    PlannedGroup,
    PlannedWrapper,
    SentOffsets,
)
from worker.cuda.attention.flashinfer_ragged import FlashInferRaggedAttention
from worker.cuda.attention.kv_store import TritonStore
from worker.cuda.attention.paged_batch import GroupParts, Part
from worker.cuda.flashinfer_library import BACKEND, LATENT_DIMS

TILE_ROWS: Final = 128
"""Query rows of a tile, one for each token and head; of batches with few rows half of them."""
MOST_TILES: Final = 16384
"""Tiles of a plan, split ones counted for each part; the planner does not detect more of them."""
_MOST_MULTIPROCESSORS: Final = 512
_SLACK_BYTES: Final = 1 << 10
"""The library aligns what it takes."""


def workspace_bytes(num_multiprocessors: int) -> int:
    """Return the bytes that partial results take in any plan (scheduler.cuh, MLAPlan).

    Two half tiles for each multiprocessor; each row takes a 16-bit latent and a float32 log-sum.
    """
    latent, _ = LATENT_DIMS
    return _SLACK_BYTES + num_multiprocessors * TILE_ROWS * (2 * latent + 4)


def head_runs(num_heads: int) -> tuple[slice, ...]:
    """Return runs of heads whose sizes divide TILE_ROWS, the largest first."""
    runs: list[slice] = []
    first = 0
    while first < num_heads:
        size = min(TILE_ROWS, 1 << ((num_heads - first).bit_length() - 1))
        runs.append(slice(first, first + size))
        first += size
    return tuple(runs)


def require_latent_kernels(
    config: ServeConfig,
    architecture: str,
    shape: AttentionShape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_tokens: int,
) -> None:
    """Raise ConfigError for a model or setting that the kernels of latent attention do not support.

    shape: of a rank. num_tokens: the most of a step.
    """
    try:
        refuse_unsupported(shape, dtype, kv_dtype)
    except ConfigError as reason:
        raise ConfigError(
            f"{architecture} has latent KV: {reason}; --device cpu runs it",
            reason.param,
        ) from None
    if config.device.cascade_attention_from:
        raise ConfigError(
            f"--cascade-attention-from is not supported with latent KV, as {architecture} has it"
        )
    # The last tile of a sequence may be short, and every multiprocessor may end with a part.
    spare = MOST_TILES - _MOST_MULTIPROCESSORS - 2 * config.scheduler.max_num_seqs
    most = spare * TILE_ROWS // shape.num_heads
    if num_tokens > most:
        raise ConfigError(
            f"--max-num-batched-tokens {num_tokens}: with {shape.num_heads} heads of latent "
            f"attention and --max-num-seqs {config.scheduler.max_num_seqs} the kernels take at "
            f"most {max(most, 0)}"
        )


class LatentWrappers:
    """The wrappers of latent attention, and which of them the current step runs."""

    def __init__(
        self,
        accelerator: Accelerator,
        library: Library,
        shape: AttentionShape,
        dtype: torch.dtype,
        block_size: int,
        options: Options,
    ) -> None:
        self._accelerator = accelerator
        self._library = library
        num_bytes = workspace_bytes(accelerator.num_multiprocessors())
        # Wrappers share it: on one stream they run one after the other.
        self._workspace = accelerator.zeros(num_bytes, torch.uint8)
        self._num_heads = shape.num_heads
        self._decode = self._wrapper()
        self._head_runs = head_runs(shape.num_heads)
        sizes = dict.fromkeys(run.stop - run.start for run in self._head_runs)
        self._prefills = {size: self._wrapper() for size in sizes}
        self._capture_sizes = frozenset(options.capture_sizes)
        self._indices = accelerator.zeros(options.capture_pages, torch.int32)
        self._settings: dict[str, Any] = {
            "head_dim_ckv": shape.latent_dim,
            "head_dim_kpe": shape.rotary_dim,
            "page_size": block_size,
            "sm_scale": shape.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def plan(self, parts: GroupParts, indices: torch.Tensor, offsets: SentOffsets) -> None:
        assert not parts.prefix.num_rows, "cascade attention is refused"
        sizes = [parts.decodes.num_pages, parts.prefills.num_pages]
        decode_pages, prefill_pages = indices.split_with_sizes(sizes)
        self._runs: list[tuple[PlannedWrapper, slice, slice]] = []
        num_decodes, num_prefills = parts.decodes.num_rows, parts.prefills.num_rows
        if num_decodes:
            if num_decodes in self._capture_sizes and not num_prefills:
                # Graphs read page indices from fixed memory.
                self._indices[: len(decode_pages)].copy_(decode_pages)
                decode_pages = self._indices
            self._plan(self._decode, parts.decodes, decode_pages, self._num_heads, causal=False)
            self._runs.append((self._decode, slice(num_decodes), slice(None)))
        if num_prefills:
            for size, wrapper in self._prefills.items():
                self._plan(wrapper, parts.prefills, prefill_pages, size, causal=True)
            for heads in self._head_runs:
                wrapper = self._prefills[heads.stop - heads.start]
                self._runs.append((wrapper, slice(num_decodes, None), heads))

    def run(
        self,
        query: tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        """Attend for the two parts of queries, [T, num_heads, 512] and [T, num_heads, 64].

        In batch order. pages: the two parts of keys, [num_blocks, block_size, 512] and
        [num_blocks, block_size, 64]. output: [T, num_heads, 512].
        """
        for wrapper, tokens, heads in self._runs:
            latent, rotated = (part[tokens, heads] for part in query)
            wrapper.run(latent, rotated, *pages, out=output[tokens, heads])

    def _wrapper(self) -> PlannedWrapper:
        wrapper = self._library.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=False, backend=BACKEND
        )
        return PlannedWrapper(wrapper, self._accelerator)

    def _plan(
        self,
        wrapper: PlannedWrapper,
        part: Part,
        indices: torch.Tensor,
        num_heads: int,
        *,
        causal: bool,
    ) -> None:
        wrapper.plan(
            torch.from_numpy(part.qo_indptr),
            torch.from_numpy(part.kv_indptr),
            indices,
            torch.from_numpy(part.kv_lens),
            num_heads=num_heads,
            causal=causal,
            **self._settings,
        )


class FlashInferLatentAttention(FlashInferAttention):
    """An attention backend on FlashInfer's wrapper for latent KV; else as FlashInferAttention."""

    def _create_groups(
        self,
        accelerator: Accelerator,
        library: Library,
        shape: AttentionShape,
        dtype: torch.dtype,
        options: Options,
    ) -> Sequence[PlannedGroup]:
        cache, layout = self._kv_cache, self._kv_cache.layout
        assert shape.soft_cap == 0.0, "the kernels have no soft cap"
        assert layout.windows == (None,), "latent attention has no window"
        self._latent_dim = shape.latent_dim
        self._page_parts = [
            self._page_views(cache.layer_pages(layer)[0])
            for layer in range(len(layout.layer_slots))
        ]
        self._latent_wrappers = LatentWrappers(
            accelerator=accelerator,
            library=library,
            shape=shape,
            dtype=dtype,
            block_size=cache.block_size,
            options=options,
        )
        return [self._latent_wrappers]

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
        assert value is None, "latents are their own values"
        assert sinks is None, "the kernels have no sinks"
        latent, rotated = self._split_dims(query)
        latent_key, rotated_key = self._split_dims(key)
        self._rotate(rotated, rotated_key, rotation)
        pages = self._page_parts[layer]
        self._store(self._slots[0], latent_key, rotated_key, pages)
        if self._moves:
            latent, rotated = (each.index_select(0, self._moves[0]) for each in (latent, rotated))
        output = query.new_empty(latent.shape)
        # Pages have one head.
        rows = (pages[0].rows[:, 0], pages[1].rows[:, 0])
        self._latent_wrappers.run((latent, rotated), rows, output)
        return output.index_select(0, self._moves[1]) if self._moves else output

    def _split_dims(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a view of the latents, and a copy of the dims that rotate in place."""
        rank = self._latent_dim
        rotated = heads[..., rank:].clone(memory_format=torch.contiguous_format)
        return heads[..., :rank], rotated

    def _page_views(self, pages: Pages) -> tuple[Pages, Pages]:
        """Return views of the latents in pages, and of the dims that rotate."""
        rank = self._latent_dim
        return DensePages(pages.rows[..., :rank]), DensePages(pages.rows[..., rank:])


def create_flashinfer(
    kv_cache: KVCache,
    shape: AttentionShape,
    dtype: torch.dtype,
    accelerator: Accelerator,
    library: Library,
    store: TritonStore,
    options: Options,
) -> FlashInferAttention | FlashInferRaggedAttention:
    """Return the backend on FlashInfer for layers of this shape; arguments as the backends'."""
    if shape.bidirectional:
        return FlashInferRaggedAttention(kv_cache, shape, dtype, accelerator, library)
    backend = FlashInferLatentAttention if shape.latent_dim else FlashInferAttention
    return backend(kv_cache, shape, dtype, accelerator, library, store, options)
