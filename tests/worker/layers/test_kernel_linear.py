"""Products with packed weights: fused weights, a head, an embedding table, and two formats."""

import pytest
import torch

from tests.fakes.gguf_files import numbers, random_rows
from tests.worker.reference.packed import rounded_rows
from worker.cpu.kernels import Kernels
from worker.cpu.linear import KernelLinear, MixedLinear
from worker.cpu.weights import PackedWeight
from worker.layers.embedding import Embedding
from worker.layers.linear import DenseLinear

COLUMNS = 256
PARTS = (("Q4_0", 24), ("Q8_0", 8), ("Q6_K", 17))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def stored(kernels: Kernels, kind: str, rows: int) -> tuple[PackedWeight, torch.Tensor]:
    """A random packed weight and its dequantised values."""
    data = random_rows(kind, rows, COLUMNS, seed=rows)
    weight = PackedWeight(kernels, kind, (rows, COLUMNS))
    weight.put_blocks(0, data.reshape(-1))
    return weight, torch.from_numpy(numbers(kind, data))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_weights_of_several_types_are_fused_into_one_product(
    rows: int, num_parts: int, biased: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    weights, dense = zip(*(stored(kernels, *each) for each in PARTS[:num_parts]), strict=True)
    whole = torch.cat(dense).double()
    bias = random(len(whole), dtype=dtype) if biased else None
    linear = KernelLinear(weights, bias)
    x, residual = random(rows, COLUMNS, dtype=dtype), random(rows, len(whole), dtype=dtype)
    expected = rounded_rows(x) @ whole.t() + (0.0 if bias is None else bias.double())
    for result, exact in (
        (linear(x), expected),
        (linear.add_to(residual.clone(), x), expected + residual.double()),
    ):
        assert (result.dtype, result.shape) == (dtype, exact.shape)
        assert result.is_contiguous()
        torch.testing.assert_close(
            result.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_a_head_returns_logits_in_float32(kernels: Kernels) -> None:
    weight, dense = stored(kernels, "Q8_0", 40)
    x = random(3, COLUMNS, dtype=torch.bfloat16)
    logits = KernelLinear([weight], None, torch.float32)(x)
    assert logits.dtype == torch.float32
    expected = rounded_rows(x) @ dense.double().t()
    # An activation half way between two of its 255 codes may round to either.
    torch.testing.assert_close(logits.double(), expected, atol=5e-3, rtol=5e-3)
    assert (logits.bfloat16().float() != logits).float().mean() > 0.9


def test_rows_of_a_packed_weight_serve_as_an_embedding(kernels: Kernels) -> None:
    weight, dense = stored(kernels, "Q8_0", 40)
    embedding = Embedding(weight.embedding_table(torch.bfloat16), 2.0)
    rows = embedding(torch.tensor([39, 0, 39]))
    assert torch.equal(rows, dense[[39, 0, 39]].bfloat16() * 2)
    with pytest.raises(IndexError):
        embedding(torch.tensor([40]))


def test_the_number_of_rows_selects_the_format() -> None:
    few = DenseLinear(torch.full((2, 3), 1.0), None)
    many = DenseLinear(torch.full((2, 3), 10.0), None)
    mixed = MixedLinear(few, many, 4)

    def found(rows: int) -> tuple[float, float]:
        x = torch.ones(rows, 3)
        return float(mixed(x)[0, 0]), float(mixed.add_to(torch.ones(rows, 2), x)[0, 0])

    assert found(3) == (3.0, 4.0)
    assert found(4) == (30.0, 31.0)
