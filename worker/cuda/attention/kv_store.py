"""Writes K and V of a step's tokens to the pages of a layer on a GPU, each at its slot.

The two parts of latent KV (worker/attention/backend.py) are written as if they were K and V.

    slots      [ 35 ][ 36 ][ -1 ][ 81 ]            slot = block * block_size + offset
    tokens     [ k0 ][ k1 ][ .. ][ k3 ]            -1: a row of padding
    pages      block 2: … k0 k1 …       block 5: … k3 …

Values are rounded to the dtype of the pages; float8_e4m3fn saturates at its largest number.
"""

from typing import Final

import torch

from worker.attention.kv_cache import Pages

PADDING_SLOT: Final = -1
"""The slot of a padding token, whose K and V are not written."""


class TritonStore:
    """Writes K and V in one Triton launch, to pages whose elements are the values.

    Their dims and block_size are powers of two.
    """

    def __init__(self) -> None:
        from worker.cuda.kernels.rows import store_head

        self._kernel = store_head

    def __call__(
        self,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: tuple[Pages, Pages],
    ) -> None:
        """Write key [T, num_kv_heads, K] and value [T, num_kv_heads, V] at slots int64 [T].

        Heads and dims are contiguous, rows at any stride; the strides of both pages are equal.
        """
        num_tokens, num_heads, key_dim = key.shape
        key_rows, value_rows = pages[0].rows, pages[1].rows
        self._kernel[(num_tokens, num_heads)](
            slots,
            key,
            value,
            key_rows,
            value_rows,
            key.stride(0),
            value.stride(0),
            key_rows.stride(0),
            key_rows.stride(1),
            key_rows.stride(2),
            block_size=key_rows.shape[2],
            key_dim=key_dim,
            value_dim=value.shape[2],
            most=_largest(key_rows.dtype),
        )


def _largest(dtype: torch.dtype) -> float:
    """Return the bound that values are clamped to before they are rounded; 0 for no bound."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0
