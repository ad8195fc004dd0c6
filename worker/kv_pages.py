"""K or V of one layer in the pages of a KV cache, as plain torch reads and writes it.

Owns what a value becomes in a page: the cache's dtype, or int8 with one scale for each
token and head (symmetric; largest magnitude / 127), which stands behind the page's rows:

    page of one KV head   | t0 | t1 | … | tB |  s0 s1 … sB |      rows int8, scales float32

The kernels write the same bits. A row with anything in it that is not finite gets the
scale NaN, so that whoever reads it is found broken.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch

SCALE_BYTES: Final = torch.float32.itemsize
"""What a row of int8 takes beside its elements."""
_LARGEST: Final = 127.0
_LEAST_LARGEST: Final = 2.0**-100
"""A row whose largest element is below this counts as zeros: its inverse would overflow."""


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
    """Pages of int8 with their scales, float32 [num_blocks, num_kv_heads, block_size]."""

    rows: torch.Tensor
    scales: torch.Tensor

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """As the Protocol says; off by at most half a scale."""
        block_size = self.rows.shape[2]
        place = (slots // block_size, slice(None), slots % block_size)
        self.rows[place], self.scales[place] = quantise(tokens)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """As the Protocol says."""
        return self.rows[blocks].float() * self.scales[blocks][..., None]


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., D] to int8 [..., D] and float32 scales [...]; rows ≈ int8 * scale."""
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    broken = ~wide.isfinite().all(dim=-1)
    zero = broken | (largest < _LEAST_LARGEST)
    inverse = torch.where(zero, 0.0, _LARGEST / largest)
    whole = (wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]).round()
    scales = torch.where(zero, 0.0, largest / _LARGEST).masked_fill(broken, float("nan"))
    return whole.to(torch.int8), scales
