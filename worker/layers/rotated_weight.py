"""A weight [out, in] of 8 bits with one scale an output, and products with it.

Owns the bytes and the calls of the kernels (csrc/rotated.h says how they multiply). What is
rounded: the weight, once, and each row of activations, both after a rotation that spreads
numbers which stand out (`rotated_reference` defines it). Sums are of integers, so a row's
result does not depend on the other rows, on their number or on the number of threads, bit by
bit. A row that holds a NaN or an infinity comes out as NaN and touches no other.
"""

import ctypes
from typing import Final

import torch

from worker.kernels import DTYPE_CODES, Kernels, RotatedShape
from worker.layers.product_call import product_call, weight_part

_UNIT: Final = 32
_ROTATED: Final = 1
"""TokendForm of csrc/stack.h."""


def can_rotate(in_features: int) -> bool:
    """Whether weights with rows of this length can have this form."""
    return in_features > 0 and in_features % _UNIT == 0


class RotatedWeight:
    """Made of a float32, bfloat16 or float16 weight [out, in] with rows that `can_rotate`.

    May be made and used by several threads at once; making it opens no OpenMP region. No
    reference to the dense weight is kept. A weight with a NaN, an infinity or a number above
    1e36 makes its output NaN.
    """

    def __init__(self, kernels: Kernels, dense: torch.Tensor) -> None:
        assert can_rotate(dense.shape[1])
        assert dense.stride(1) == 1
        self.out_features, self.in_features = dense.shape
        self._kernels = kernels
        self._structure = RotatedShape(self.out_features, self.in_features)
        # torch aligns its memory to cache lines, which the kernels rely on.
        self._packed = torch.empty(kernels.rotated_bytes(self._structure), dtype=torch.uint8)
        self._structure.packed = self._packed.data_ptr()
        code = DTYPE_CODES[dense.dtype]
        kernels.rotate_dense(self._structure, code, dense.stride(0), dense.data_ptr())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._packed.nbytes

    def part(self, bias: torch.Tensor | None) -> ctypes.Structure:
        """The weight and its bias [out], as a `worker.kernels.Part`; valid while both live."""
        return weight_part(_ROTATED, self._structure, self.out_features, bias)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [N, in] float32 or bfloat16 to x @ weight.T + bias, [N, out].

        bias: [out], float32 or bfloat16. out: where the result goes, float32 or bfloat16
        whatever x is; its rows may be a stride apart. Without it a new contiguous one of
        x's dtype.
        """
        result = x.new_empty(x.shape[0], self.out_features) if out is None else out
        self._run(x, bias, result, adds=False)
        return result

    def multiply_add(
        self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add x @ weight.T + bias to residual [N, out] in place, rounded once; returns residual."""
        self._run(x, bias, residual, adds=True)
        return residual

    def _run(
        self, x: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, adds: bool
    ) -> None:
        call = product_call((self.out_features, self.in_features), x, bias, output, adds)
        self._kernels.rotated_product(self._structure, call)
