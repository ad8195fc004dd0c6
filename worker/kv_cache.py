"""Owns the memory of the paged KV cache and how it is laid out.

Knows nothing of requests, of which block is whose, or of attention. One buffer

    [block, slot, K/V, kv_head, token, dim]

where a slot belongs to one layer of each KV cache group (see kv_layout.py), so that

    block 5  =  slot 0: K h0 t0..tB | K h1 … | V h0 … | V h1 …   slot 1: …

is one contiguous range: copying a block anywhere is one copy. A layer sees two
strided views of it whose strides are equal. In a cache of int8 the scales of a head's
rows follow them (see kv_pages.py), so a block is still one range:

    block 5  =  slot 0: K h0 t0..tB s0..sB | K h1 … | V h0 … | V h1 …   slot 1: …
"""

from typing import Final

import numpy as np
import torch

from proto.config import KVCacheDType
from proto.errors import ConfigError
from proto.lifecycle import KVCacheGeometry, KVGroup
from worker.kv_layout import KVLayout
from worker.kv_pages import SCALE_BYTES, DensePages, Int8Pages, Pages, num_scales

_ALIGNMENT: Final = 64
"""Bytes of a cache line; rows of a page start on one when head_dim allows."""
_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_CPU: Final = torch.device("cpu")


def resolve_kv_dtype(setting: KVCacheDType, activations: torch.dtype, head_dim: int) -> torch.dtype:
    """The dtype of K and V for a setting; "auto" is that of the activations.

    Raises ConfigError for int8 with heads whose scales would not be aligned.
    """
    dtype = _DTYPES.get(setting, activations)
    if dtype == torch.int8 and head_dim % SCALE_BYTES:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs heads of a multiple of {SCALE_BYTES}, got {head_dim}",
            "kv_cache_dtype",
        )
    return dtype


def kv_cache_geometry(
    layout: KVLayout, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVCacheGeometry:
    """Return the geometry that a worker reports for layers laid out like this."""
    return KVCacheGeometry(
        num_slots=layout.num_slots,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_token=layout.num_slots * 2 * num_kv_heads * _row_bytes(head_dim, dtype),
        groups=tuple(KVGroup(window) for window in layout.windows),
    )


class KVCache:
    """The KV tensors of one device.

    buffer: [num_blocks, num_slots, 2, num_kv_heads, block_size, head_dim], zeros; the
        last two of int8 are one: block_size rows and their scales.

    On a CPU the memory is an anonymous zero mapping: a page costs memory only once a
    token was written to it.
    """

    def __init__(
        self,
        geometry: KVCacheGeometry,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device = _CPU,
    ) -> None:
        self.geometry = geometry
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        page: tuple[int, ...] = (block_size, geometry.head_dim)
        if self.dtype == torch.int8:
            page = (block_size * _row_bytes(geometry.head_dim, torch.int8),)
        shape = (num_blocks, geometry.num_slots, 2, geometry.num_kv_heads, *page)
        self.buffer = (
            _lazy_zeros(shape, self.dtype)
            if device == _CPU
            else torch.zeros(shape, dtype=self.dtype, device=device)
        )

    def populate(self) -> None:
        """Take all of the memory now: a step that touches it first waits for the system's zeros."""
        self.buffer.zero_()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all slots, K and V."""
        return self.buffer[0].nbytes // self.block_size

    def copy_blocks(self, sources: torch.Tensor, copies: torch.Tensor) -> None:
        """Copy block sources[i] to block copies[i]; no block is in both.

        sources, copies: int64 [n] on the cache's device. Blocks of every dtype are copied as
        32-bit words, because torch's index_copy_ does not support float8.
        """
        words = self.buffer.view(self.num_blocks, -1).view(torch.int32)
        words.index_copy_(0, copies, words.index_select(0, sources))

    def layer_pages(self, layer: int) -> tuple[Pages, Pages]:
        """K and V of one layer.

        Views, not copies; the strides of the two are equal and the last is 1. The
        blocks of other groups hold other layers in the same place.
        """
        pages = self.buffer[:, self.layout.places[layer].slot]
        return self._pages(pages[:, 0]), self._pages(pages[:, 1])

    def _pages(self, part: torch.Tensor) -> Pages:
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


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zero tensor on a cache line boundary whose pages are committed on first write."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
