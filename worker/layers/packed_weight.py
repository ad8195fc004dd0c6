"""A weight [out, in] that stays in blocks of few bits, and products with it.

Owns the packed bytes and the calls of the kernels. One form serves every number of
rows. What is exact: the weight (each number is that of the file's block, no bit is
lost in packing). What is rounded: the activations, per row and 32 numbers to 8 bits and a
float32 scale (`packed_reference.quantise_rows`), then sums in float32. A row's result
does not depend on the other rows, on their number or on the number of threads, bit by bit.
A row that holds a NaN or an infinity comes out as NaN and touches no other.
"""

from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import Kernels
from worker.layers import packed_reference

BLOCK_NUMBERS: Final = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
}
"""GGUF types that can stay packed, and how many numbers of a row are one block."""


def supported(gguf_type: str, in_features: int) -> bool:
    """Whether weights of this type with rows of this length can be packed."""
    return in_features > 0 and in_features % BLOCK_NUMBERS.get(gguf_type, in_features + 1) == 0


class PackedWeight:
    """A weight [out_features, in_features]; made by from_blocks or from_dense.

    May be made and used by several threads at once; making it opens no OpenMP region.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.out_features, self.in_features = numbers.shape
        self._numbers = numbers

    @classmethod
    def from_blocks(
        cls,
        kernels: Kernels,
        gguf_type: str,
        shape: tuple[int, int],
        raw: npt.NDArray[np.uint8],
        row_order: npt.NDArray[np.int64] | None = None,
    ) -> Self:
        """Pack the blocks of a file: `raw` holds the rows of `shape` one after the other.

        row_order: int64 [out], row i of the weight is row row_order[i] of the file. No
        reference to `raw` is kept. The type and the length are `supported`.
        """
        assert supported(gguf_type, shape[1]), (gguf_type, shape)
        numbers = packed_reference.dequantise(gguf_type, shape, raw)
        return cls(numbers if row_order is None else numbers[torch.from_numpy(row_order)])

    @classmethod
    def from_dense(cls, kernels: Kernels, weight: torch.Tensor) -> Self:
        """Round a float32, bfloat16 or float16 weight [out, in] to 8 bits and a float16
        scale per 32 numbers of a row (`packed_reference.quantise_dense`).

        `in` is a multiple of 32. The scale overflows for magnitudes above 8.3 million:
        such weights, and infinities and NaN, make their outputs NaN.
        """
        return cls(packed_reference.quantise_dense(weight))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._numbers.nbytes

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [N, in] float32 or bfloat16 to x @ weight.T + bias, [N, out].

        bias: [out] of x's dtype. out: where the result goes, float32 or bfloat16 whatever
        x is; its rows may be a stride apart. Without it a new contiguous one of x's dtype.
        """
        result = packed_reference.product(self._numbers, x)
        if bias is not None:
            result += bias
        if out is None:
            return result.to(x.dtype)
        return out.copy_(result)

    def multiply_add(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add x @ weight.T + bias to residual [N, out] in place, rounded once; returns residual."""
        result = packed_reference.product(self._numbers, x)
        if bias is not None:
            result += bias
        return residual.copy_(residual + result)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [N] row numbers to the numbers of these rows, a new [N, in] of `dtype`.

        Exact, then rounded to dtype. Raises IndexError for an id outside the weight.
        """
        return self._numbers.index_select(0, ids).to(dtype)
