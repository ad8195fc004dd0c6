"""A weight [out, in] of bfloat16, and products with it.

Owns the bytes and the calls of the kernels (csrc/bf16.h says how they lie and are multiplied).
Nothing is rounded but the result, and activations of float32, to bfloat16. A row's result does
not depend on the other rows, on their number or on the number of threads, bit by bit. A row that
holds a NaN or an infinity comes out without a number and touches no other.
"""

from typing import Final

import torch

from worker.kernels import Bf16Shape, Kernels
from worker.layers.kernel_weight import KernelWeight

_BF16: Final = 2
"""TokendForm of csrc/stack.h."""


class Bf16Weight(KernelWeight):
    """Made of a bfloat16 weight [out, in], to which no reference is kept.

    May be made and used by several threads at once; making it takes the threads that torch has
    in the one that calls.
    """

    def __init__(self, kernels: Kernels, dense: torch.Tensor) -> None:
        assert dense.dtype == torch.bfloat16
        assert dense.stride(1) == 1
        shape = Bf16Shape(*dense.shape)
        super().__init__(_BF16, shape, kernels.memory, kernels.bf16_bytes, kernels.bf16_product)
        self._kernels = kernels
        kernels.bf16_pack(self._structure, dense.stride(0), dense.data_ptr())

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] row numbers to these rows, a new bfloat16 [N, in].

        Raises IndexError for an id outside the weight.
        """
        assert ids.dtype == torch.int64
        assert ids.dim() == 1
        ids = ids.contiguous()
        count = len(ids)
        numbers = torch.empty(count, self.in_features, dtype=torch.bfloat16)
        first_wrong = self._kernels.bf16_rows(
            self._structure, count, ids.data_ptr(), numbers.data_ptr()
        )
        if first_wrong < count:
            raise IndexError(f"row {int(ids[first_wrong])} of {self.out_features}")
        return numbers
