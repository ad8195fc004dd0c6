"""Attention in a vision tower: a patch sees all patches of its tile, or of its window in the tile.

It is computed in two stages, so that an image may be encoded some rows at a time: `write` for all
rows of a tile, then `attend` for any of them, in the same units each time. On a CPU rows without
windows have the same bits in whichever units they are computed.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

import torch
import torch.nn.functional as F


class TileHeads(ABC):
    """Queries, keys and values of the tiles of one image, in one layer at a time."""

    @abstractmethod
    def write(self, tiles: slice, rows: slice, qkv: torch.Tensor) -> None:
        """Keep the rows of some tiles.

        qkv: [tiles * rows, 3 * heads * head_dim]: a query, a key and a value for each row.
        """

    @abstractmethod
    def attend(self, tiles: slice, rows: slice, windows: Sequence[int] = ()) -> torch.Tensor:
        """Return the attention [tiles * rows, heads * head_dim] of rows to their whole tile.

        windows: where the windows of a tile begin, and the number of its tokens: rows see those of
        their own window only. Empty: no windows.
        """


class TowerAttention:
    """Attention of `num_heads` heads of `head_dim` numbers, by torch."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.head_dim = head_dim

    @property
    def numbers_per_token(self) -> int:
        """Numbers that TileHeads keep of each token."""
        return 3 * self.num_heads * self.head_dim

    def tiles(
        self, num_tiles: int, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> TileHeads:
        """Return memory for tiles of `num_tokens` each. dtype: of all numbers."""
        shape = num_tiles, num_tokens, 3, self.num_heads, self.head_dim
        return _DenseTileHeads(torch.empty(shape, dtype=dtype, device=device))


class _DenseTileHeads(TileHeads):
    """qkv: [tiles, tokens, 3, heads, head_dim]."""

    def __init__(self, qkv: torch.Tensor) -> None:
        self._qkv = qkv

    def write(self, tiles: slice, rows: slice, qkv: torch.Tensor) -> None:
        own = self._qkv[tiles, rows]
        own.copy_(qkv.view(own.shape))

    def attend(self, tiles: slice, rows: slice, windows: Sequence[int] = ()) -> torch.Tensor:
        return attend_to_windows(self._qkv[tiles], rows, windows or (0, self._qkv.shape[1]))


def attend_to_windows(qkv: torch.Tensor, rows: slice, windows: Sequence[int]) -> torch.Tensor:
    """Return the attention [tiles * rows, heads * head_dim] of rows to their windows, by torch.

    qkv: [tiles, tokens, 3, heads, head_dim]. windows: as in TileHeads.attend.
    """
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
    parts = []
    for index in range(bisect_right(windows, rows.start) - 1, len(windows) - 1):
        first, end = windows[index], windows[index + 1]
        if first >= rows.stop:
            break
        own = query[:, :, max(first, rows.start) : min(end, rows.stop)]
        seen = key[:, :, first:end], value[:, :, first:end]
        parts.append(F.scaled_dot_product_attention(own, *seen))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
