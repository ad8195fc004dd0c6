"""A weight [out, in] that stays in blocks of few bits, and products with it.

Owns the packed bytes and the calls of the kernels. One form serves every number of
rows. What is exact: the weight (each number is that of the file's block, no bit is
lost in packing). What is rounded: the activations, per row and 32 numbers to 8 bits and a
float32 scale (see tests/worker/reference/packed.py), then sums in float32. A row's result
does not depend on the other rows, on their number or on the number of threads, bit by bit.
A row that holds a NaN or an infinity comes out as NaN and touches no other.
"""

from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import DTYPE_CODES, Kernels, Weight
from worker.layers.kernel_weight import KernelWeight

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

BLOCK_BYTES: Final = dict(zip(BLOCK_NUMBERS, (18, 20, 22, 24, 34, 144, 176, 210), strict=True))
"""Bytes of such a block in the file."""
_BLOCKS: Final = 0
"""TokendForm of csrc/stack.h."""
_TYPE_CODES: Final = {name: code for code, name in enumerate(BLOCK_NUMBERS)}


def supported(gguf_type: str, in_features: int) -> bool:
    """Whether weights of this type with rows of this length can be packed."""
    return in_features > 0 and in_features % BLOCK_NUMBERS.get(gguf_type, in_features + 1) == 0


class PackedWeight(KernelWeight):
    """A weight [out_features, in_features]; made by from_blocks or from_dense.

    May be made and used by several threads at once; making it opens no OpenMP region.
    """

    def __init__(self, kernels: Kernels, gguf_type: str, shape: tuple[int, int]) -> None:
        """A weight of no numbers yet."""
        assert supported(gguf_type, shape[1]), (gguf_type, shape)
        self.gguf_type = gguf_type
        self._kernels = kernels
        weight = Weight(_TYPE_CODES[gguf_type], *shape)
        super().__init__(
            _BLOCKS, weight, kernels.memory, kernels.packed_bytes, kernels.packed_product
        )

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
        weight = cls(kernels, gguf_type, shape)
        row_bytes = shape[1] // BLOCK_NUMBERS[gguf_type] * BLOCK_BYTES[gguf_type]
        assert raw.dtype == np.uint8
        assert raw.nbytes == shape[0] * row_bytes
        blocks = np.ascontiguousarray(raw)
        order = np.arange(shape[0]) if row_order is None else np.ascontiguousarray(row_order)
        assert order.dtype == np.int64
        assert order.shape == shape[:1]
        assert order.min() >= 0
        assert order.max() < shape[0]
        kernels.pack_blocks(weight._structure, blocks.ctypes.data, order.ctypes.data)
        return weight

    @classmethod
    def from_dense(cls, kernels: Kernels, dense: torch.Tensor) -> Self:
        """Round a float32, bfloat16 or float16 weight [out, in] to 8 bits and a float16
        scale per 32 numbers of a row (see tests/worker/reference/packed.py).

        `in` is a multiple of 32. The scale overflows for magnitudes above 8.3 million:
        such weights, and infinities and NaN, make their outputs NaN.
        """
        weight = cls(kernels, "Q8_0", (dense.shape[0], dense.shape[1]))
        assert dense.stride(1) == 1
        kernels.pack_dense(
            weight._structure, DTYPE_CODES[dense.dtype], dense.stride(0), dense.data_ptr()
        )
        return weight

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [N] row numbers to the numbers of these rows, a new [N, in] of `dtype`.

        Exact in float32, then rounded to dtype. Raises IndexError for an id outside the weight.
        """
        assert ids.dtype == torch.int64
        assert ids.dim() == 1
        ids = ids.contiguous()
        numbers = torch.empty(len(ids), self.in_features, dtype=dtype)
        count = len(ids)
        first_wrong = self._kernels.unpack_rows(
            self._structure, count, ids.data_ptr(), DTYPE_CODES[dtype], numbers.data_ptr()
        )
        if first_wrong < count:
            raise IndexError(f"row {int(ids[first_wrong])} of {self.out_features}")
        return numbers
