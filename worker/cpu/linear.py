"""Linear layers on a CPU.

    OneDnnLinear   float32 and bfloat16, reordered once into oneDNN's blocked layout
    KernelLinear   weights that kernels of ours lay out (weights.py)
    MixedLinear    one weight in two formats: one for few rows, another for many

ProductDescriptions describes them to a kernel that computes several.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

from worker.cpu.kernel_structures import LinearPart, StackLinear
from worker.cpu.weights import KernelWeight
from worker.layers.adapters import plain, product_number
from worker.layers.linear import HeadLinears, Linear


class OneDnnLinear(Linear):
    """A copy of the weight [out, in] in oneDNN's blocked layout."""

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


def is_reordered_by_onednn(dtype: torch.dtype) -> bool:
    """Return whether OneDnnLinear works for this dtype, with this build of torch."""
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class KernelLinear(Linear):
    """A product with weights that kernels of ours lay out, one below the other.

    The weights may be of different formats; each one gives a range of the result's columns:

        out  [ weight 0 | weight 1 | … ]

    bias: [out] or None. out_dtype: of the result; None for the dtype of x.
    """

    def __init__(
        self,
        weights: Sequence[KernelWeight],
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        ends = list(accumulate(weight.out_features for weight in weights))
        self._out_features = ends[-1]
        self._out_dtype = out_dtype
        self._weight = weights[0] if len(weights) == 1 else None
        self._bias = bias
        self._parts = [
            (
                weight,
                slice(end - weight.out_features, end),
                None if bias is None else bias[end - weight.out_features : end],
            )
            for weight, end in zip(weights, ends, strict=True)
        ]

    @property
    def parts(self) -> tuple[LinearPart, ...]:
        """Each weight as a `LinearPart`; valid as long as this object lives.

        Empty if a weight has its columns in another order, which only `multiply` knows.
        """
        if any(weight.column_order is not None for weight, _, _ in self._parts):
            return ()
        return tuple(weight.part(bias) for weight, _, bias in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], self._out_features, dtype=self._out_dtype or x.dtype)
        self.into(x, out)
        return out

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for weight, columns, bias in self._parts:
            weight.multiply(x, bias, out[:, columns])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._weight is not None:
            return self._weight.multiply_add(residual, x, self._bias)
        return residual.add_(self(x))


class MixedLinear(Linear):
    """A weight in two formats: `few` multiplies fewer than `many_from` rows, `many` the others.

    Few rows are bound by the bytes of the weight, many by the arithmetic. The arithmetic of two
    formats differs, so a request's tokens may depend on what else is in its steps.
    """

    def __init__(self, few: Linear, many: Linear, many_from: int) -> None:
        self.many_from = many_from
        self._few = few
        self._many = many

    def for_rows(self, num_rows: int) -> Linear:
        return self._few if num_rows < self.many_from else self._many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.for_rows(x.shape[0])(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.for_rows(x.shape[0]).add_to(residual, x)


def format_thresholds(linear: Linear) -> tuple[int, ...]:
    """Return the numbers of rows from which on another format of the weight multiplies."""
    linear = plain(linear)
    return (linear.many_from,) if isinstance(linear, MixedLinear) else ()


def kernel_parts(linear: Linear, num_rows: int) -> tuple[LinearPart, ...]:
    """Return the weights by which a layer multiplies a step of num_rows rows, as `LinearPart`s.

    They are structures of the kernels, valid as long as `linear` lives. Empty if no kernel of ours
    multiplies them.
    """
    linear = plain(linear)
    if isinstance(linear, MixedLinear):
        linear = linear.for_rows(num_rows)
    return linear.parts if isinstance(linear, KernelLinear) else ()


class ProductDescriptions:
    """Describes linear layers to a kernel that computes several of them, for steps of some rows.

    complete: whether kernels of ours multiply all of them. Descriptions are valid while this object
    and the layers live.
    """

    def __init__(self) -> None:
        self.complete = True
        self._arrays: list[ctypes.Array[LinearPart] | ctypes.Array[StackLinear]] = []

    def describe(
        self, linear: Linear, num_rows: int, in_features: int, out_features: int
    ) -> StackLinear:
        """Return the layer as a `StackLinear` for products of `num_rows` rows."""
        parts = kernel_parts(linear, num_rows)
        array = (LinearPart * len(parts))(*parts)
        self._arrays.append(array)
        self.complete &= (
            sum(part.out_features for part in parts) == out_features
            and len({part.format for part in parts}) == 1
        )
        return StackLinear(
            in_features,
            out_features,
            len(parts),
            ctypes.addressof(array),
            product_number(linear),
        )

    def describe_heads(
        self, linears: HeadLinears, num_rows: int, in_features: int, out_features: int
    ) -> int:
        """Return the address of an array of StackLinear, one for each head, of one part each."""
        heads = [
            self.describe(each, num_rows, in_features, out_features) for each in linears.linears
        ]
        self.complete &= all(each.num_parts == 1 for each in heads)
        array = (StackLinear * len(heads))(*heads)
        self._arrays.append(array)
        return ctypes.addressof(array)
