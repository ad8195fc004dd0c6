"""Writes K and V of a step's tokens to the pages of a layer on a GPU, each at its slot.

The two parts of latent KV (worker/attention/base.py) are written as if they were K and V.

    slots      [ 35 ][ 36 ][ -1 ][ 81 ]            slot = block * block_size + offset
    tokens     [ k0 ][ k1 ][ .. ][ k3 ]            -1: a row of padding
    pages      block 2: … k0 k1 …       block 5: … k3 …

Values are rounded to the dtype of the pages; float8_e4m3fn saturates at its largest number.
"""

from typing import Any, Final

import torch

from worker.kv_cache import Pages

PADDING_SLOT: Final = -1
"""The slot of a padding token, whose K and V are not written."""


class TritonStore:
    """Writes K and V in one Triton launch, to pages whose elements are the values.

    Their dims and block_size are powers of two.
    """

    def __init__(self) -> None:
        self.kernel = _kernel()

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
        self.kernel[(num_tokens, num_heads)](
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


def _kernel() -> Any:
    """Return the kernel, a program per head and token; `most` clamps values unless it is 0."""
    import triton
    import triton.language as tl

    # Triton reads the annotations too, and knows none but its own.
    def store_head(  # type: ignore[no-untyped-def]
        slots,
        key,
        value,
        key_pages,
        value_pages,
        key_stride,
        value_stride,
        block_stride,
        head_stride,
        row_stride,
        block_size: tl.constexpr,
        key_dim: tl.constexpr,
        value_dim: tl.constexpr,
        most: tl.constexpr,
    ):
        token, head = tl.program_id(0), tl.program_id(1)
        slot = tl.load(slots + token)
        if slot >= 0:
            key_dims, value_dims = tl.arange(0, key_dim), tl.arange(0, value_dim)
            k = tl.load(key + token * key_stride + head * key_dim + key_dims)
            v = tl.load(value + token * value_stride + head * value_dim + value_dims)
            block, offset = slot // block_size, slot % block_size
            to = block * block_stride + head * head_stride + offset * row_stride
            if most != 0.0:
                k = tl.clamp(k.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
                v = tl.clamp(v.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
            tl.store(key_pages + to + key_dims, k.to(key_pages.dtype.element_ty))
            tl.store(value_pages + to + value_dims, v.to(value_pages.dtype.element_ty))

    return triton.jit(store_head)


def _largest(dtype: torch.dtype) -> float:
    """Return the bound that values are clamped to before they are rounded; 0 for no bound."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0
