"""A weight in memory that a kernel of products laid out, whatever its form.

Owns that memory and what the kernels are told about tensors: they take addresses, so what
they assume is checked here. How numbers lie there is the business of each form.
"""

import ctypes
from collections.abc import Callable
from typing import Final

import torch

from worker.kernels import DTYPE_CODES, Part, Product
from worker.weight_memory import WeightMemory

PRODUCT_DTYPES: Final = (torch.float32, torch.bfloat16)


Structure = ctypes.Structure


class KernelWeight:
    """A weight [out_features, in_features] of no numbers yet.

    form: a TokendForm of csrc/stack.h, which says what `structure` is; it has fields
    out_features, in_features and packed. num_bytes: how much of `memory` such a weight needs.
    run: the kernel that multiplies, of a structure and a `worker.kernels.Product`.
    """

    def __init__(
        self,
        form: int,
        structure: Structure,
        memory: WeightMemory,
        num_bytes: Callable[[Structure], int],
        run: Callable[[Structure, Structure], None],
    ) -> None:
        self.out_features: int = structure.out_features
        self.in_features: int = structure.in_features
        self._form = form
        self._structure = structure
        self._kernel = run
        self._packed = memory.take(num_bytes(structure))
        structure.packed = self._packed.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._packed.nbytes

    def part(self, bias: torch.Tensor | None) -> Structure:
        """The weight and its bias [out], as a `worker.kernels.Part`; valid while both live."""
        part = Part(self._form, ctypes.addressof(self._structure), self.out_features)
        _describe_bias(part, self.out_features, bias)
        return part

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
        call = _product_call((self.out_features, self.in_features), x, bias, output, adds)
        self._kernel(self._structure, call)


def _product_call(
    shape: tuple[int, int],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    adds: bool,
) -> Structure:
    """The call for a weight of `shape` = [out, in], good as long as the tensors live.

    x [N, in] and output [N, out]: float32 or bfloat16 each, rows a stride apart. bias: [out],
    contiguous, of either type. adds: whether the output is added to.
    """
    out_features, in_features = shape
    assert x.dtype in PRODUCT_DTYPES
    assert output.dtype in PRODUCT_DTYPES
    assert x.shape[1] == in_features
    assert x.stride(1) == 1
    assert output.shape == (x.shape[0], out_features)
    assert output.stride(1) == 1
    product = Product(
        x.shape[0],
        DTYPE_CODES[x.dtype],
        x.stride(0),
        x.data_ptr(),
        0,
        None,
        DTYPE_CODES[output.dtype],
        output.stride(0),
        output.data_ptr(),
        adds,
    )
    _describe_bias(product, out_features, bias)
    return product


def _describe_bias(call: Structure, out_features: int, bias: torch.Tensor | None) -> None:
    if bias is not None:
        assert bias.dtype in PRODUCT_DTYPES
        assert bias.is_contiguous()
        assert bias.shape == (out_features,)
        call.bias_dtype, call.bias = DTYPE_CODES[bias.dtype], bias.data_ptr()
