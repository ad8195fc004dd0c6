"""K or V of one layer in the pages of a KV cache, as plain torch reads and writes it.

Owns what a value becomes in a page: the cache's dtype, or int8 with a scale for each
token and head (symmetric; largest magnitude / 127), which stands behind the page's rows. A
head of 256 numbers has a scale for each 128:

    page of one KV head   | t0 | t1 | … | tB |  s0 s1 … sB | s0 … sB |   rows int8, scales float32
                                               of dims 0-127  128-255

The kernels write the same bits. A row with anything in it that is not finite gets only
scales that are NaN, so that whoever reads it is found broken.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

SCALE_BYTES: Final = torch.float32.itemsize
_SCALED_DIMS: Final = 128
_MOST_SCALES: Final = 4
_LARGEST: Final = 127.0
_LEAST_LARGEST: Final = 2.0**-100
"""A row whose largest element is below this counts as zeros: its inverse would overflow."""


def num_scales(head_dim: int) -> int:
    """Of a row of int8: one for each 128 numbers, or one where there are no whole 128."""
    parts, rest = divmod(head_dim, _SCALED_DIMS)
    return parts if rest == 0 and parts <= _MOST_SCALES else 1


class Pages(Protocol):
    """The pages of K or of V of one layer."""

    @property
    def rows(self) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim], a view of the cache's dtype."""
        ...

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """tokens [T, num_kv_heads, head_dim] to slots int64 [T] (block * block_size + offset)."""
        ...

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """float32 [N, num_kv_heads, block_size, head_dim] of blocks int64 [N]."""
        ...


@dataclass(frozen=True, slots=True)
class DensePages:
    """Pages whose elements are the values."""

    rows: torch.Tensor

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """As the Protocol says; values are rounded to the cache's dtype."""
        block_size = self.rows.shape[2]
        self.rows[slots // block_size, :, slots % block_size] = tokens.to(self.rows.dtype)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        return self.rows[blocks].float()


@dataclass(frozen=True, slots=True)
class Int8Pages:
    """Pages of int8 and scales: float32 [num_blocks, num_kv_heads, num_scales, block_size]."""

    rows: torch.Tensor
    scales: torch.Tensor

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """As the Protocol says; off by at most half a scale."""
        block_size = self.rows.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        rows, scales = quantise(tokens, self.scales.shape[2])
        self.rows[blocks, :, offsets] = rows
        self.scales[blocks, :, :, offsets] = scales

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        scales = self.scales[blocks].transpose(-1, -2)
        rows = self.rows[blocks].float()
        return (_in_parts(rows, scales.shape[-1]) * scales[..., None]).flatten(-2)


def quantise(rows: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., D] to int8 [..., D] and float32 scales [..., parts] of neighbouring numbers."""
    wide = _in_parts(rows.float(), parts)
    largest = wide.abs().amax(dim=-1)
    broken = ~wide.isfinite().all(dim=-1).all(dim=-1, keepdim=True)
    zero = broken | (largest < _LEAST_LARGEST)
    inverse = torch.where(zero, 0.0, _LARGEST / largest)
    whole = (wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]).round()
    scales = torch.where(zero, 0.0, largest / _LARGEST).masked_fill(broken, float("nan"))
    return whole.to(torch.int8).flatten(-2), scales


def _in_parts(rows: torch.Tensor, parts: int) -> torch.Tensor:
    """[..., D] to [..., parts, D / parts]."""
    return rows.reshape(*rows.shape[:-1], parts, rows.shape[-1] // parts)
