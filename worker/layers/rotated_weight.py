"""A weight [out, in] of 8 bits with one scale an output, and products with it.

Owns the bytes and the calls of the kernels (csrc/rotated.h says how they multiply). What is
rounded: the weight, once, and each row of activations, both after a rotation that spreads
numbers which stand out (defined in tests/worker/reference/rotated.py). Sums are of integers, so a
row's result does not depend on the other rows, on their number or on the number of threads, bit by
bit. A row that holds a NaN or an infinity comes out as NaN and touches no other.
"""

from typing import Final

import torch

from worker.kernels import DTYPE_CODES, Kernels, RotatedShape
from worker.layers.kernel_weight import KernelWeight

_UNIT: Final = 32
_ROTATED: Final = 1
"""TokendForm of csrc/stack.h."""


def can_rotate(in_features: int) -> bool:
    """Whether weights with rows of this length can have this form."""
    return in_features > 0 and in_features % _UNIT == 0


class RotatedWeight(KernelWeight):
    """Made of a float32, bfloat16 or float16 weight [out, in] with rows that `can_rotate`.

    May be made and used by several threads at once; making it opens no OpenMP region. No
    reference to the dense weight is kept. A weight with a NaN, an infinity or a number above
    1e36 makes its output NaN.
    """

    def __init__(self, kernels: Kernels, dense: torch.Tensor) -> None:
        assert can_rotate(dense.shape[1])
        assert dense.stride(1) == 1
        shape = RotatedShape(*dense.shape)
        super().__init__(
            _ROTATED, shape, kernels.memory, kernels.rotated_bytes, kernels.rotated_product
        )
        code = DTYPE_CODES[dense.dtype]
        kernels.rotate_dense(self._structure, code, dense.stride(0), dense.data_ptr())
