"""Coded weights of 4 and 8 bits: the Triton kernel in its interpreter against float64."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.fakes.devices import dense_experts
from tests.fakes.quantised_checkpoints import NF4
from tests.fakes.triton import interpret_kernels
from worker.cuda.layers.triton_codes import CodedExperts, CodedWeight, TritonCodedLinear
from worker.cuda.layers.triton_experts import TritonExperts
from worker.cuda.layers.triton_kernels import triton_gate
from worker.layers.experts import StackedWeights

pytestmark = [
    pytest.mark.suite("devices"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

F16, F32 = torch.float16, torch.float32
SIZES = [(72, 160, 32), (40, 256, 128), (64, 96, 96), (1, 64, 64)]
"""Outputs, inputs and columns of a group; the first ones are no whole tiles."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


class Made:
    """A random weight, and the numbers it stands for: float64 [out, in]."""

    def __init__(self, kind: str, outputs: int, inputs: int, group: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        bits, groups = 8 if kind.startswith(("int8", "fp8")) else 4, inputs // group
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
        scales = torch.rand(groups, outputs, generator=generator).to(F16) * 0.1
        zeros = table = order = None
        if kind.endswith("zeros"):
            zeros = torch.randint(0, 1 << bits, (groups, outputs), generator=generator)
        middle = torch.full((groups, outputs), 1 << bits - 1) if zeros is None else zeros
        shape = outputs, groups, group
        numbers = codes.view(shape) - middle.t()[:, :, None]
        if kind == "nf4":
            table = NF4
            numbers = table[codes].view(shape)
        if kind == "fp8":  # the least numbers, too, and no NaN
            codes[codes & 127 == 127] = 0
            numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double().view(shape)
            scales *= 0.02
        self.numbers = (numbers * scales.t().double()[:, :, None]).view(outputs, inputs)
        if kind == "int4 sorted":
            order = torch.randperm(inputs, generator=generator)
            self.numbers[:, order] = self.numbers.clone()
        packed = codes
        if bits == 4:
            halves = codes.view(outputs, -1, 2, 16)
            packed = (halves[:, :, 0] | halves[:, :, 1] << 4).view(outputs, -1)
        self.weight = CodedWeight(
            packed.to(torch.uint8),
            scales,
            None if zeros is None else zeros.to(torch.uint8),
            table,
            group,
            order,
            is_float=kind == "fp8",
        )


def close(found: torch.Tensor, exact: torch.Tensor, x: torch.Tensor, made: Made) -> bool:
    """Equal but for the rounding of numbers and results to the dtype of x."""
    unit = torch.finfo(x.dtype).eps
    limit = unit * (x.double().abs() @ made.numbers.abs().t() + exact.abs()) + 1e-6
    return bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("num_rows", [1, 17, 70])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int8", "int8 zeros", "nf4", "fp8"])
def test_a_product(kind: str, outputs: int, inputs: int, group: int, num_rows: int) -> None:
    made = Made(kind, outputs, inputs, group)
    dtype = F32 if num_rows == 17 else F16
    x = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = TritonCodedLinear([made.weight])(x)
    assert found.dtype == dtype
    assert close(found, x.double() @ made.numbers.t(), x, made)
    assert made.weight.bits == {"int4": 4, "int8": 8, "nf4": 4, "fp8": 8}[kind.split()[0]]
    assert made.weight.in_features == inputs


@pytest.mark.parametrize("kind", ["int4 sorted", "int4 zeros", "int8", "nf4", "fp8"])
def test_rows_of_a_table(kind: str) -> None:
    made = Made(kind, 40, 128, 64)
    ids = torch.tensor([3, 39, 0, 3])
    assert torch.equal(made.weight.rows(ids, F32), made.numbers[ids].float())


@pytest.mark.parametrize("kind", ["int4 zeros", "int8", "nf4", "fp8"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts(kind: str, biased: bool) -> None:
    """Against dense experts of the same numbers; the sizes are no whole tiles."""
    experts, hidden, inner, top_k = 5, 96, 32, 2
    draw = torch.Generator().manual_seed(1)
    made = [
        [Made(kind, outputs, inputs, 32, seed) for seed in range(experts)]
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    ]

    def stacked(of: list[Made]) -> CodedWeight:
        zeros = [each.weight.zeros for each in of if each.weight.zeros is not None]
        return replace(
            of[0].weight,
            codes=torch.stack([each.weight.codes for each in of]),
            scales=torch.stack([each.weight.scales for each in of]),
            zeros=torch.stack(zeros) if zeros else None,
        )

    biases = [torch.randn(experts, size, generator=draw) for size in (2 * inner, hidden)]
    given = biases if biased else [None, None]
    dense = (torch.stack([each.numbers.float() for each in of]) for of in made)
    expected = dense_experts(StackedWeights(*dense, *given), 3)
    found = TritonExperts(CodedExperts(*map(stacked, made), *given), triton_gate("silu"), 3)
    for rows in (1, 90):
        x = torch.randn(rows, hidden, generator=draw)
        best = torch.rand(rows, 8, generator=draw).topk(top_k)  # some are of other ranks
        result = expected(x, best.values, best.indices)
        limit = 1e-5 * result.abs().max() + 1e-6
        assert (found(x, best.values, best.indices) - result).abs().max() < limit


def test_weights_below_each_other_with_a_bias_and_sorted_columns() -> None:
    """Rows of the input and of the result are a stride apart; the residual is added to."""
    parts = [Made("int4 sorted", 48, 128, 64), Made("int8", 20, 128, 128, seed=3)]
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(68, generator=generator)
    x = torch.randn(5, 2 * 128, generator=generator)[:, 64:192]
    linear = TritonCodedLinear([part.weight for part in parts], bias)
    exact = torch.cat([x.double() @ part.numbers.t() for part in parts], 1) + bias
    assert torch.allclose(linear(x).double(), exact, atol=1e-4)
    residual = torch.randn(5, 68, generator=generator)
    expected = residual.double() + exact
    assert linear.add_to(residual, x) is residual
    assert torch.allclose(residual.double(), expected, atol=1e-4)


def test_a_row_with_a_nan_leaves_the_others_alone() -> None:
    made = Made("int4 zeros", 32, 64, 32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    clean = TritonCodedLinear([made.weight])(x)
    x[1, 5] = float("nan")
    found = TritonCodedLinear([made.weight])(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
