"""Dense products with packed and plain weights."""

import pytest
import torch
import torch.nn.functional as F

from tests.fakes.devices import CPU
from worker.cpu.linear import OneDnnLinear, is_reordered_by_onednn
from worker.cuda.layers.dense_linear import FIXED_ROWS, FixedRowsLinear
from worker.layers.linear import DenseLinear, Linear

FORMS = [
    (DenseLinear, torch.float32),
    (DenseLinear, torch.bfloat16),
    (FixedRowsLinear, torch.float32),
    (FixedRowsLinear, torch.bfloat16),
    (OneDnnLinear, torch.float32),
    (OneDnnLinear, torch.bfloat16),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def operands(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random input, weight, bias and residual with odd sizes."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 97), (51, 97), (51,), (rows, 51))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def make(form: type, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    if form is OneDnnLinear and not is_reordered_by_onednn(weight.dtype):
        pytest.skip(f"this build of torch packs no {weight.dtype} weights")
    linear: Linear = form(weight, bias)
    return linear


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_products_with_and_without_residual(
    form: type, dtype: torch.dtype, biased: bool, rows: int
) -> None:
    x, weight, bias, residual = operands(rows, dtype)
    linear = make(form, weight.clone(), bias if biased else None)
    wide = [each.double() for each in (x, weight, bias)]
    expected = F.linear(wide[0], wide[1], wide[2] if biased else None)
    for result, exact in (
        (linear(x), expected),
        (linear.add_to(residual.clone(), x), expected + residual.double()),
    ):
        assert (result.dtype, result.shape) == (dtype, exact.shape)
        assert result.is_contiguous()
        torch.testing.assert_close(
            result.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_products_of_fixed_rows_give_a_row_the_same_bits_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    product = F.linear

    def note_rows(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return product(x, *others)

    monkeypatch.setattr(F, "linear", note_rows)
    x, weight, bias, _ = operands(FIXED_ROWS + 40, torch.float32)
    linear = FixedRowsLinear(weight, bias)
    whole = linear(x)
    for first, count in ((0, 1), (FIXED_ROWS - 3, 9), (FIXED_ROWS + 39, 1)):
        assert torch.equal(linear(x[first : first + count]), whole[first : first + count])
    assert set(rows) == {FIXED_ROWS}


def test_the_format_follows_the_dtype() -> None:
    weight = torch.ones(8, 8)
    assert isinstance(CPU.linear(weight.half()), DenseLinear)
    packed = isinstance(CPU.linear(weight), OneDnnLinear)
    assert packed == torch.backends.mkldnn.is_available()
