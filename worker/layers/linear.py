"""Matrix products with dense weights, in the form that the device multiplies fastest.

    float32, bfloat16 on a CPU   oneDNN's blocked layout: reordered once at load,
                                 instead of within every product
    anything else                rows of the weight as they are

Owns these two forms, and what a product is to the rest of the worker. Weights that kernels of ours
multiply, bfloat16 among them, are in block_linear.py. Knows nothing of what is multiplied.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """x @ weight.T + bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] to a new contiguous [N, out]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [N, out] plus the product of x [N, in]; may reuse residual's memory."""
        ...


class DenseLinear:
    """The weight [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._transposed)
        return residual if self._bias is None else residual.add_(self._bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout, made from a dense weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return result

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._product_plus(x, residual, self._weight, self._bias, "add")
        return result


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PackedLinear works for weights of this type on this device and build of torch."""
    operators = torch.ops.mkldnn
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest form for weight [out, in] and bias [out] on the device where they lie."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)
