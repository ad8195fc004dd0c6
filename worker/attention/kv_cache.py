"""The paged KV cache of one device: which layer uses which memory, and how a page is laid out.

Start at KVCache. kv_layout assigns layers to KV cache groups; DensePages and Int8Pages are how
plain torch reads and writes the pages of a layer. Nothing here knows requests or which block
belongs to which sequence.

Layers that see the same part of a sequence can share a block table, and blocks are all of one
size, so layers are dealt out to groups of equal size:

    layers    w w w w w F w w w w w F …      15 with a window, 3 with full attention
    groups    0: F F F     1: w w w     2: w w w   …   5: w w w
    a block   | slot 0 | slot 1 | slot 2 |       of any group, from one pool

One buffer [block, slot, K/V, kv_head, token, dim], where a slot belongs to one layer of each
group, so that a block is one contiguous range and copying it anywhere is one copy:

    block 5  =  slot 0: K h0 t0..tB | K h1 … | V h0 … | V h1 …   slot 1: …

Latent KV (worker/attention/backend.py) has no V: a block is K alone, of one head.

A layer sees two strided views of it whose strides are equal. In an int8 cache the scales of a
page follow its rows; a head of 256 numbers has a scale for each 128:

    page of one KV head   | t0 | t1 | … | tB |  s0 s1 … sB | s0 … sB |   rows int8, scales float32
                                               of dims 0-127  128-255
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from proto.errors import ConfigError
from proto.messages.lifecycle import NOT_CACHED, RECURRENT_STATE, KVCacheGeometry, KVGroup
from proto.settings.config import KVCacheDType

_ALIGNMENT: Final = 64
"""Bytes of a cache line; rows of a page start on one when head_dim allows."""
_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
SCALE_BYTES: Final = torch.float32.itemsize
_SCALED_DIMS: Final = 128
_MOST_SCALES: Final = 4
_LARGEST: Final = 127.0
_LEAST_LARGEST: Final = 2.0**-100
"""A row whose largest element is below this counts as zeros: its inverse would overflow."""
Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns memory of zeros, of a shape and a dtype."""
Window = int | None
"""Tokens that a query sees, its own included; None for all."""


class LayerSlot(NamedTuple):
    """The KV cache group of a layer, and its slot in the blocks of that group."""

    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The states that a model on one rank keeps of a sequence (worker/attention/state_cache.py).

    layer_sizes: float32 numbers of each layer with a state, its log included.
    max_logged: tokens of a draft that a state has a log of; 0: no drafts are verified.
    """

    layer_sizes: tuple[int, ...]
    max_logged: int = 0

    @property
    def num_floats(self) -> int:
        """Float32 numbers of all layers, and with a log that of its position."""
        return sum(self.layer_sizes) + (self.max_logged > 0)

    @property
    def slot_bytes(self) -> int:
        return self.num_floats * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Which layer uses which memory.

    layer_slots: one for each layer. windows: one for each group. num_slots: slots of a block.
    is_scratch: K and V are read only in the step that computes them, by the same layer, so that all
        layers share a slot (worker/attention/scratch_pages.py).
    states: of layers that keep no K and V and are not counted here; None without such layers.
    """

    layer_slots: tuple[LayerSlot, ...]
    windows: tuple[Window, ...]
    num_slots: int
    is_scratch: bool = False
    states: StateShape | None = None

    @property
    def num_groups(self) -> int:
        """Groups that have block tables of their own in the engine; that of states is the last."""
        return self.num_block_groups + (self.states is not None)

    @property
    def num_block_groups(self) -> int:
        """Groups whose blocks are those of the KV pool."""
        return 1 if self.is_scratch else len(self.windows)


def kv_layout(windows: Sequence[Window]) -> KVLayout:
    """Return the layout for layers with these windows; full attention comes first.

    Groups are as large as the rarest kind of layer has layers. Where the commonest
    kind has less than a quarter more, one group of each kind wastes less than
    cutting that kind in two. The last groups of a kind may be short of layers:
    their blocks have slots that stay empty.
    """
    kinds = {
        window: [layer for layer, other in enumerate(windows) if other == window]
        for window in sorted(set(windows), key=_order)
    }
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) < 1.25 * min(sizes) else min(sizes)
    layer_slots: dict[int, LayerSlot] = {}
    group_windows: list[Window] = []
    for window, layers in kinds.items():
        num_groups = -(-len(layers) // size)
        for first in range(num_groups):
            for slot, layer in enumerate(layers[first::num_groups]):
                layer_slots[layer] = LayerSlot(len(group_windows), slot)
            group_windows.append(window)
    return KVLayout(
        tuple(layer_slots[layer] for layer in range(len(windows))), tuple(group_windows), size
    )


def scratch_layout(windows: Sequence[Window]) -> KVLayout:
    """Return the layout of a bidirectional model with these windows, all groups in one slot."""
    kinds = tuple(sorted(set(windows), key=_order))
    slots = tuple(LayerSlot(kinds.index(window), 0) for window in windows)
    return KVLayout(slots, kinds, 1, is_scratch=True)


def _order(window: Window) -> tuple[bool, int]:
    """Full attention, then wide windows before narrow ones."""
    return (window is not None, -(window or 0))


def resolve_kv_dtype(
    setting: KVCacheDType, activations: torch.dtype, head_dim: int, latent_dim: int = 0
) -> torch.dtype:
    """Return the dtype of K and V for a setting; "auto" is that of the activations.

    Raises ConfigError for int8 with heads whose scales would not be aligned, and for 8 bits with
    latents, whose two parts one scale does not suit.
    """
    dtype = _DTYPES.get(setting, activations)
    if latent_dim and dtype.itemsize == 1:
        raise ConfigError(
            f"--kv-cache-dtype {setting} is not supported with latent KV: bf16, f16, f32 are"
        )
    if dtype == torch.int8 and head_dim % SCALE_BYTES:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs heads of a multiple of {SCALE_BYTES}, got {head_dim}"
        )
    return dtype


def kv_cache_geometry(
    layout: KVLayout, num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_parts: int = 2
) -> KVCacheGeometry:
    """Return the geometry that a worker reports for layers laid out like this."""
    states = layout.states
    row_bytes = num_parts * num_kv_heads * _row_bytes(head_dim, dtype)
    return KVCacheGeometry(
        num_slots=layout.num_slots,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_token=0 if layout.is_scratch else layout.num_slots * row_bytes,
        groups=(
            (KVGroup(kind=NOT_CACHED),)
            if layout.is_scratch
            else (
                *(KVGroup(window) for window in layout.windows),
                *([] if states is None else [KVGroup(kind=RECURRENT_STATE)]),
            )
        ),
        num_parts=num_parts,
        state_bytes=0 if states is None else states.slot_bytes,
    )


class KVCache:
    """The KV tensors of one device.

    buffer: [num_blocks, num_slots, num_parts, num_kv_heads, block_size, head_dim], zeros; the
        last two of int8 are one: block_size rows and their scales.

    zeros: makes the memory of the device; that of the host costs memory only once a token was
        written to a page.
    """

    def __init__(
        self,
        geometry: KVCacheGeometry,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        zeros: "Zeros | None" = None,
    ) -> None:
        self.geometry = geometry
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        page: tuple[int, ...] = (block_size, geometry.head_dim)
        if self.dtype == torch.int8:
            page = (block_size * _row_bytes(geometry.head_dim, torch.int8),)
        heads = (geometry.num_parts, geometry.num_kv_heads)
        shape = (num_blocks, geometry.num_slots, *heads, *page)
        self.buffer = (zeros or lazy_zeros)(shape, self.dtype)

    def populate(self) -> None:
        """Commit all memory now; otherwise the first step to touch a page waits for its zeros."""
        self.buffer.zero_()

    def copy_blocks(self, sources: torch.Tensor, copies: torch.Tensor) -> None:
        """Copy block sources[i] to block copies[i]; no block is in both.

        sources, copies: int64 [n] on the cache's device. Blocks of every dtype are copied as
        32-bit words, because torch's index_copy_ does not support float8.
        """
        words = self.buffer.view(self.num_blocks, -1).view(torch.int32)
        words.index_copy_(0, copies, words.index_select(0, sources))

    def block_rows(self) -> torch.Tensor:
        """View the cache as uint8 [num_blocks, block_bytes], all groups and scales included."""
        return self.buffer.view(self.num_blocks, -1).view(torch.uint8)

    def layer_pages(self, layer: int) -> "tuple[Pages, Pages]":
        """Return the pages of K and of V of one layer: the same twice for latents.

        Views, not copies; the strides of the two are equal and the last is 1. Blocks of other
        groups hold other layers in the same slot.
        """
        pages = self.buffer[:, self.layout.layer_slots[layer].slot]
        return self._pages(pages[:, 0]), self._pages(pages[:, -1])

    def _pages(self, part: torch.Tensor) -> "Pages":
        if self.dtype != torch.int8:
            return DensePages(part)
        size, head_dim = self.block_size, self.geometry.head_dim
        # a head  [ size * head_dim bytes of rows | size floats for each part of a row ]
        rows, scales = part[..., : size * head_dim], part[..., size * head_dim :]
        split = (*part.shape[:-1], size, head_dim)
        by_part = (*part.shape[:-1], num_scales(head_dim), size)
        return Int8Pages(rows.view(split), scales.view(torch.float32).view(by_part))


def _row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head of one token, its scales included."""
    scales = num_scales(head_dim) * SCALE_BYTES if dtype == torch.int8 else 0
    return head_dim * dtype.itemsize + scales


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor on a cache line boundary whose pages are committed on first write."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


def num_scales(head_dim: int) -> int:
    """Return the scales of an int8 row: one per 128 numbers if these divide it, else one."""
    parts, rest = divmod(head_dim, _SCALED_DIMS)
    return parts if rest == 0 and parts <= _MOST_SCALES else 1


class Pages(Protocol):
    """The pages of K or of V of one layer."""

    @property
    def rows(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim], a view of the cache's dtype."""

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens [T, num_kv_heads, head_dim] to their KV slots, int64 [T].

        A KV slot is block * block_size + offset.
        """

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks int64 [N] as float32 [N, num_kv_heads, block_size, head_dim]."""


@dataclass(frozen=True, slots=True)
class DensePages:
    """Pages whose elements are the values."""

    rows: torch.Tensor

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens; values are rounded to the cache's dtype."""
        block_size = self.rows.shape[2]
        self.rows[slots // block_size, :, slots % block_size] = tokens.to(self.rows.dtype)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        return self.rows[blocks].float()


@dataclass(frozen=True, slots=True)
class Int8Pages:
    """Pages of int8 and scales: float32 [num_blocks, num_kv_heads, num_scales, block_size]."""

    rows: torch.Tensor
    scales: torch.Tensor

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens, quantised symmetrically: off by at most half a scale."""
        block_size = self.rows.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        rows, scales = quantise(tokens, self.scales.shape[2])
        self.rows[blocks, :, offsets] = rows
        self.scales[blocks, :, :, offsets] = scales

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        scales = self.scales[blocks].transpose(-1, -2)
        rows = self.rows[blocks].float()
        return (_in_parts(rows, scales.shape[-1]) * scales[..., None]).flatten(-2)


def quantise(rows: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [..., D] to int8 [..., D] and float32 scales [..., parts], symmetrically.

    A scale is the largest magnitude of its part / 127. A row with a NaN or an infinity gets only
    NaN scales, so that reading it is noticed. The kernels write the same bits.
    """
    wide = _in_parts(rows.float(), parts)
    largest = wide.abs().amax(dim=-1)
    nonfinite = ~wide.isfinite().all(dim=-1).all(dim=-1, keepdim=True)
    zero = nonfinite | (largest < _LEAST_LARGEST)
    inverse = torch.where(zero, 0.0, _LARGEST / largest)
    whole = (wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]).round()
    scales = torch.where(zero, 0.0, largest / _LARGEST).masked_fill(nonfinite, float("nan"))
    return whole.to(torch.int8).flatten(-2), scales


def _in_parts(rows: torch.Tensor, parts: int) -> torch.Tensor:
    """[..., D] to [..., parts, D / parts]."""
    return rows.reshape(*rows.shape[:-1], parts, rows.shape[-1] // parts)
