"""Linear layers, x @ weight.T + bias, for all formats of the weight in memory.

    DenseLinear    rows of the weight as they are
    FixedRowsLinear  the same, by products of a fixed number of rows, for --batch-invariant on a GPU
    OneDnnLinear   float32 and bfloat16 on a CPU: reordered once into oneDNN's blocked layout
    KernelLinear   weights that kernels of ours lay out (kernel_weights.py)
    MixedLinear    one weight in two formats: one for few rows, another for many

ResidualLinear ends an attention or an MLP. VocabParallelHead is the head of a model whose ranks
hold the rows of some tokens each.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Protocol

import torch
import torch.nn.functional as F

from worker.kernel_structures import LinearPart, StackLinear
from worker.layers.kernel_weights import KernelWeight
from worker.layers.norm import Norm
from worker.parallel.group import RankGroup


class Linear(Protocol):
    """x @ weight.T + bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] to a new contiguous [N, out]."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [N, out] plus the product of x [N, in]; may reuse residual's memory."""
        ...


class DenseLinear:
    """The weight [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual.addmm_(x, self._transposed)
        return residual if self._bias is None else residual.add_(self._bias)


FIXED_ROWS: Final = 128
"""Rows of each product of FixedRowsLinear. By the ratio of FLOPs to bytes, 128 rows take little
longer than one; a step of 1,024 rows reads the weight 8 times."""


class FixedRowsLinear:
    """The weight [out, in] as it is; a row has the same bits in a batch of any size.

    A library chooses kernels and the order of their sums by the number of rows. Here each product
    has FIXED_ROWS of them, of which the last ones may be zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = len(x)
        padded = F.pad(x, (0, 0, 0, -num_rows % FIXED_ROWS))
        output = x.new_empty(len(padded), len(self.weight))
        for first in range(0, len(padded), FIXED_ROWS):
            rows = slice(first, first + FIXED_ROWS)
            output[rows] = F.linear(padded[rows], self.weight, self._bias)
        return output[:num_rows]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


class OneDnnLinear:
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


def is_reordered_by_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether OneDnnLinear works for this dtype, on this device and build of torch."""
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
    """Return the fastest layer for a dense weight [out, in] and bias [out] on their device."""
    if is_reordered_by_onednn(weight.device, weight.dtype):
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)


class KernelLinear:
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
        """Write the product to out [N, out], whose rows may be a stride apart."""
        for weight, columns, bias in self._parts:
            weight.multiply(x, bias, out[:, columns])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._weight is not None:
            return self._weight.multiply_add(residual, x, self._bias)
        return residual.add_(self(x))


class HeadLinears:
    """A product for each head: x [T, heads, in] to [T, heads, out], with weights of their own."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        dense = [each.weight for each in linears if isinstance(each, DenseLinear)]
        is_one_product = len(dense) == len(linears) and dense[0].device.type == "cuda"
        # [heads, in, out]; the weights of one product are kept only there.
        self._stacked = torch.stack(dense).transpose(1, 2) if is_one_product else None
        self.linears = () if is_one_product else linears

    def into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write the products to output [T, heads, out], whose heads may be a stride apart."""
        if self._stacked is not None:
            output.copy_(torch.bmm(x.transpose(0, 1), self._stacked).transpose(0, 1))
            return
        for head, linear in enumerate(self.linears):
            if isinstance(linear, KernelLinear):
                linear.into(x[:, head], output[:, head])
            else:
                output[:, head] = linear(x[:, head])


class MixedLinear:
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
    return (linear.many_from,) if isinstance(linear, MixedLinear) else ()


def kernel_parts(linear: Linear, num_rows: int) -> tuple[LinearPart, ...]:
    """Return the weights by which a layer multiplies a step of num_rows rows, as `LinearPart`s.

    They are structures of the kernels, valid as long as `linear` lives. Empty if no kernel of ours
    multiplies them.
    """
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
        return StackLinear(in_features, out_features, len(parts), ctypes.addressof(array))

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


class PartOutput:
    """What happens to the output of an attention or MLP while it is added to the residual.

    group: the ranks, each of which computed a summand. norm: norm of the output, in models normed
    after each part (Gemma 2, section 2), or None.

    Sums over ranks are taken in float32, in rank order on every rank, and rounded once: all ranks
    go on with the same bits, and a row does not depend on the rows beside it (Shoeybi et al.,
    Megatron-LM, section 3).
    """

    def __init__(self, group: RankGroup, norm: Norm | None = None) -> None:
        self.group = group
        self.norm = norm

    @property
    def is_plain(self) -> bool:
        """Whether the output is added as it is."""
        return self.norm is None and self.group.size == 1

    def add_to(self, residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return residual plus output, both [T, hidden]; may reuse residual's memory."""
        if self.norm is not None:
            return self.norm.add_to(residual, self._sum_over_ranks(output))
        if self.group.size == 1:
            return residual.add_(output)
        total = residual.float()  # the residual itself if it is float32
        for summand in self.group.gather(output).unbind():
            total += summand
        return residual.copy_(total) if total is not residual else residual

    def _sum_over_ranks(self, output: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return output
        return sum_in_float32(self.group.gather(output)).to(output.dtype)


class ResidualLinear:
    """The product that ends an attention or MLP. Its bias, if any, is that of one rank only."""

    def __init__(self, linear: Linear, output: PartOutput) -> None:
        self.linear = linear
        self.output = output
        if output.is_plain:
            self.add_to = linear.add_to  # type: ignore[method-assign]  # one fused product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.output.add_to(residual, self.linear(x))


def sum_in_float32(summands: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension, added in order; a new float32 tensor."""
    first, *others = summands.unbind()
    total = first.to(torch.float32, copy=True)
    for summand in others:
        total += summand
    return total


class VocabParallelHead:
    """Logits of all tokens; each rank computes those of its range of `vocab`."""

    def __init__(self, linear: Linear, group: RankGroup, vocab: Sequence[range]) -> None:
        self._linear = linear
        self._group = group
        self._sizes = [len(tokens) for tokens in vocab]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = self._linear(x)
        # ranks  | 0 … 33 | 34 … 66 · | 67 … 99 · |    all as wide as the widest
        padded = own.new_zeros(len(own), max(self._sizes))
        padded[:, : own.shape[1]] = own
        parts = zip(self._group.gather(padded), self._sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))
