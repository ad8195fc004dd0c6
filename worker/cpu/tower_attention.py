"""Attention in a vision tower by the kernels of paged attention: a tile is a page of its own."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from worker.attention.backend import AttentionInputs, AttentionShape
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cpu.attention import CpuAttention
from worker.cpu.kernels import Kernels
from worker.layers.tower_attention import TileHeads, TowerAttention, attend_to_windows

_GROUP: Final = 16
"""Tokens that the kernels read together; a page has whole groups."""
_LEAST_MULTIPLE: Final = 8
_PAIRS_MULTIPLE: Final = 32
"""Of what the size of a head must be a multiple: for any kernels, and for pairs of bfloat16."""


class CpuTowerAttention(TowerAttention):
    """Attention by the C++ kernels. Heads of other sizes than they take are padded with zeros."""

    def __init__(self, kernels: Kernels, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(num_heads, head_dim)
        self._kernels = kernels
        multiple = _PAIRS_MULTIPLE if dtype == torch.bfloat16 else _LEAST_MULTIPLE
        padded = -(-head_dim // multiple) * multiple
        self._shape = AttentionShape(num_heads, num_heads, padded, scale=head_dim**-0.5)

    @property
    def numbers_per_token(self) -> int:
        return 5 * self.num_heads * self._shape.head_dim

    def tiles(
        self, num_tiles: int, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> TileHeads:
        return _PagedTileHeads(
            self._kernels, self._shape, self.head_dim, num_tiles, num_tokens, dtype
        )


class _PagedTileHeads(TileHeads):
    """Rows with padded heads, and pages with the keys and values of the same rows.

    head_dim: without the padding.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        head_dim: int,
        num_tiles: int,
        num_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._num_tokens, self._head_dim = num_tokens, head_dim
        self._page_size = -(-num_tokens // _GROUP) * _GROUP
        layout = kv_layout([None])
        geometry = kv_cache_geometry(layout, shape.num_heads, shape.head_dim, dtype)
        pages = KVCache(geometry, layout, num_tiles, self._page_size)
        self._keys, self._values = (each.rows for each in pages.layer_pages(0))
        self._attention = CpuAttention(kernels, pages, shape)
        heads = shape.num_heads, shape.head_dim
        self._qkv = torch.zeros(num_tiles, num_tokens, 3, *heads, dtype=dtype)

    def write(self, tiles: slice, rows: slice, qkv: torch.Tensor) -> None:
        own = self._qkv[tiles, rows, :, :, : self._head_dim]
        own.copy_(qkv.view(own.shape))
        for number, pages in enumerate((self._keys, self._values), 1):
            pages[tiles, :, rows, : self._head_dim] = own[:, :, number].transpose(1, 2)

    def attend(self, tiles: slice, rows: slice, windows: Sequence[int] = ()) -> torch.Tensor:
        if windows:  # of few tokens, which take torch no time to pack
            return attend_to_windows(self._qkv[tiles, ..., : self._head_dim], rows, windows)
        own = self._qkv[tiles, rows].flatten(0, 1)
        numbers = np.arange(tiles.start, tiles.stop, dtype=np.int32)
        count = rows.stop - rows.start
        slots = numbers[:, None] * np.int64(self._page_size) + np.arange(rows.start, rows.stop)
        inputs = AttentionInputs(
            query_start=np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(count),
            seq_lens=np.full(len(numbers), self._num_tokens, dtype=np.int32),
            block_table=numbers[:, None],
            slot_mapping=slots.reshape(-1),
            attend_end=np.full(len(own), self._num_tokens, dtype=np.int32),
        )
        self._attention.plan([inputs])
        rotation = torch.zeros(len(own), 2, own.shape[-1] // 2)
        rotation[:, 0] = 1.0  # by no angle
        # The kernel writes keys and values to the pages, where they are already: the same numbers.
        mixed = self._attention.run(0, own[:, 0], own[:, 1], own[:, 2], rotation)
        return mixed[:, :, : self._head_dim].flatten(1)
