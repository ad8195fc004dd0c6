"""bfloat16 weights: every variant of the kernels against float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.worker.kernel_variants import THREADS, each_variant, load_variant, threads_of_torch
from worker.cpu.linear import KernelLinear
from worker.cpu.weights import Bf16Weight
from worker.layers.embedding import Embedding

SHAPES = ((1, 1), (7, 33), (33, 64), (70, 97), (100, 576), (31, 1536), (130, 31))
SUM = 2.0**-24
"""What each step of a sum in float32 may be off by, beside the terms without their signs."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers with a few outliers, as in activations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    outliers = torch.rand(shape, generator=generator) < 0.01
    return torch.where(outliers, x * 20, x).bfloat16()


def error_of(found: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Largest error in units of the rounding of a sum."""
    wide, rows = weight.double(), x.double()
    size = rows.abs() @ wide.abs().t() * (x.shape[1] + 2) * SUM
    return float(((found.double() - rows @ wide.t()).abs() / size.clamp(min=1e-30)).max())


def sums(weight: Bf16Weight, x: torch.Tensor) -> torch.Tensor:
    """The product in float64, before rounding."""
    return weight.multiply(x, out=torch.empty(len(x), weight.out_features))


@each_variant
def test_products_match_float64(variant) -> None:
    kernels = load_variant(variant)
    for seed, (out_features, in_features) in enumerate(SHAPES):
        dense = numbers(out_features, in_features + 7, seed=seed)[:, 7:]
        weight = Bf16Weight.from_dense(kernels, dense)
        x = numbers(70, in_features, seed=seed + 50)
        for num_rows in (1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 70):
            assert error_of(sums(weight, x[:num_rows]), dense, x[:num_rows]) < 1, num_rows


@each_variant
def test_results_are_rounded_once_like_those_of_torch(variant) -> None:
    dense, x = numbers(100, 576, seed=1), numbers(40, 576, seed=2)
    weight = Bf16Weight.from_dense(load_variant(variant), dense)
    found = weight.multiply(x)
    assert torch.equal(found, sums(weight, x).bfloat16())
    expected = F.linear(x, dense)
    assert found.dtype == expected.dtype
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)


@each_variant
def test_a_row_does_not_depend_on_its_batch_or_on_threads(variant) -> None:
    for in_features in (576, 90):
        weight = Bf16Weight.from_dense(load_variant(variant), numbers(515, in_features, seed=1))
        x = numbers(130, in_features)
        alone = torch.cat([sums(weight, row[None]) for row in x])
        for threads in THREADS:
            with threads_of_torch(threads):
                for num_rows in (2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 97, 130):
                    assert torch.equal(sums(weight, x[:num_rows]), alone[:num_rows]), num_rows
                    assert torch.equal(sums(weight, x[-num_rows:]), alone[-num_rows:]), num_rows


@each_variant
def test_float32_rows_are_rounded_before_the_product(variant) -> None:
    """So are rows that are copied because their length is not a multiple of the kernel's step."""
    weight = Bf16Weight.from_dense(load_variant(variant), numbers(70, 96, seed=1))
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(4))
    assert torch.equal(sums(weight, x), sums(weight, x.bfloat16()))


@each_variant
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_infinity_affects_only_its_output(variant, value: float) -> None:
    weight = Bf16Weight.from_dense(load_variant(variant), numbers(40, 96, seed=1))
    for num_rows in (1, 3, 20, 40):
        x = numbers(num_rows, 96)
        clean = weight.multiply(x)
        x[num_rows // 2, 37] = value
        output = weight.multiply(x)
        assert not output[num_rows // 2].isfinite().any()
        others = torch.arange(num_rows) != num_rows // 2
        assert torch.equal(output[others], clean[others])


@each_variant
def test_a_nan_in_a_weight_reaches_only_its_output(variant) -> None:
    dense = numbers(33, 64)
    dense[7, 40] = math.nan
    output = Bf16Weight.from_dense(load_variant(variant), dense).multiply(numbers(6, 64, seed=1))
    assert output[:, 7].isnan().all()
    assert output.isnan().sum() == 6


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_features", [96, 90])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_bias_residual_and_strided_outputs(
    variant, dtype: torch.dtype, in_features: int, num_rows: int
) -> None:
    """The sum is rounded once to the output's type; memory beside the output is untouched."""
    weight = Bf16Weight.from_dense(load_variant(variant), numbers(70, in_features, seed=1))
    x = numbers(num_rows, 200)[:, 50 : 50 + in_features]
    bias, residual = numbers(70, seed=2).to(dtype), numbers(num_rows, 70, seed=5).to(dtype)
    exact = sums(weight, x)
    place = torch.full((num_rows, 90), 7.0).to(dtype)
    result = weight.multiply(x, bias, out=place[:, 10:80])
    assert torch.equal(result, (exact + bias.float()).to(dtype))
    assert torch.equal(place[:, 10:80], result)
    assert (place[:, :10] == 7).all()
    assert (place[:, 80:] == 7).all()
    expected = (exact + bias.float() + residual.float()).to(dtype)
    assert weight.multiply_add(residual, x, bias) is residual
    assert torch.equal(residual, expected)


@each_variant
def test_rows_of_a_packed_weight_serve_as_an_embedding(variant) -> None:
    for shape in SHAPES:
        dense = numbers(*shape)
        weight = Bf16Weight.from_dense(load_variant(variant), dense)
        assert torch.equal(weight.rows(torch.arange(shape[0]), torch.bfloat16), dense)
        embedding = Embedding(weight.embedding_table(torch.bfloat16), 2.0)
        ids = torch.tensor([shape[0] - 1, 0] * 2)
        assert torch.equal(embedding(ids), dense[ids] * 2)
        for wrong in (-1, shape[0]):
            with pytest.raises(IndexError):
                embedding(torch.tensor([0, wrong]))


@each_variant
def test_a_product_of_no_rows_is_empty(variant) -> None:
    linear = KernelLinear([Bf16Weight.from_dense(load_variant(variant), numbers(40, 96))], None)
    assert linear(numbers(0, 96)).shape == (0, 40)


@each_variant
def test_nbytes_counts_the_weights_only(variant) -> None:
    kernels = load_variant(variant)
    assert Bf16Weight.from_dense(kernels, numbers(64, 576)).nbytes == 64 * 576 * 2
    assert Bf16Weight.from_dense(kernels, numbers(33, 33)).nbytes == 64 * 64 * 2


@each_variant
@pytest.mark.parametrize("in_features", [64, 33])
def test_pieces_are_permuted_and_lie_one_below_the_other(variant, in_features: int) -> None:
    """The pieces begin and end within a panel of 16 outputs; the rows are a stride apart."""
    dense = numbers(75, in_features, seed=2)
    order = np.random.default_rng(1).permutation(25)
    weight = Bf16Weight(load_variant(variant), (75, in_features))
    above = numbers(5, 2 * in_features)[:, :in_features]
    first = weight.put_rows(0, above)
    assert weight.put_rows(weight.put_rows(first, dense[5:50]), dense[50:], order) == 75
    expected = torch.cat((above, dense[5:50], dense[50:][order]))
    assert torch.equal(weight.rows(torch.arange(75), torch.bfloat16), expected)
