"""Rotated weights: every variant of the kernels against integers and float64.

Exact tests make rows from codes: x = H c / block is quantised to the codes c again, with the scale
1 if the largest code is 127, and no intermediate float is rounded.
"""

import math

import numpy as np
import pytest
import torch

from tests.worker.kernel_variants import THREADS, each_variant, load_variant, threads_of_torch
from tests.worker.reference import rotated as rotated_reference
from worker.cpu.kernel_structures import Product
from worker.cpu.kernels import DTYPE_CODES
from worker.cpu.weights import RotatedWeight, can_rotate

SHAPES = ((1, 32), (33, 64), (70, 96), (100, 576), (31, 1536))
CODED = 0.02
"""Of the length of a result: what rounding row and weight to 8 bits may come to."""


def rows_of(num_rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Random rows with a few outliers, as in activations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features, generator=generator)
    outliers = torch.rand(num_rows, in_features, generator=generator) < 0.01
    return torch.where(outliers, x * 20, x)


def codes_of(num_rows: int, in_features: int, seed: int, size: int = 127) -> torch.Tensor:
    """Random int64 codes; the first of each row is the largest possible."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-size, size + 1, (num_rows, in_features), generator=generator)
    codes[:, 0] = 127
    return codes


def with_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 rows that are quantised to these codes with the scale 1."""
    return rotated_reference.rotated(codes) / rotated_reference.block_of(codes.shape[1])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@each_variant
def test_products_are_exact_integer_sums(variant) -> None:
    kernels = load_variant(variant)
    for seed, (out_features, in_features) in enumerate(SHAPES):
        weight_codes = codes_of(out_features, in_features, seed)
        weight = RotatedWeight.from_dense(kernels, with_codes(weight_codes))
        x_codes = codes_of(70, in_features, seed + 100)
        sums = torch.from_numpy(x_codes.numpy() @ weight_codes.numpy().T)
        expected = sums.float() / rotated_reference.block_of(in_features)
        x = with_codes(x_codes)
        for num_rows in range(1, 71):
            assert torch.equal(weight.multiply(x[:num_rows]), expected[:num_rows]), num_rows


@each_variant
def test_sums_of_the_largest_codes_do_not_overflow(variant) -> None:
    signs = torch.tensor([1, -1]).repeat(16)[:, None]
    weight_codes = 127 * signs * torch.ones(32, 2048, dtype=torch.int64)
    weight_codes[:, 1::3] *= -1
    weight = RotatedWeight.from_dense(load_variant(variant), with_codes(weight_codes))
    x_codes = torch.cat((weight_codes[:2], torch.full((1, 2048), 127), torch.full((1, 2048), -127)))
    expected = (x_codes @ weight_codes.T).float() / 64
    assert torch.equal(weight.multiply(with_codes(x_codes)), expected)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_match_float64(variant, dtype: torch.dtype) -> None:
    kernels = load_variant(variant)
    for seed, (out_features, in_features) in enumerate(SHAPES):
        wide = rows_of(out_features, in_features + 7, seed).to(dtype)
        dense = wide[:, 7:]
        weight = RotatedWeight.from_dense(kernels, dense)
        x = rows_of(19, in_features, seed + 50)
        found = weight.multiply(x)
        # Another order of float32 sums may change a code by one.
        assert relative_error(found, rotated_reference.product(dense, x)) < 2e-3
        assert relative_error(found, x.double() @ dense.double().t()) < CODED


@each_variant
def test_a_row_does_not_depend_on_its_batch_or_on_threads(variant) -> None:
    weight = RotatedWeight.from_dense(load_variant(variant), rows_of(515, 576, 1))
    x = rows_of(130, 576)
    alone = torch.cat([weight.multiply(row[None]) for row in x])
    for threads in THREADS:
        with threads_of_torch(threads):
            for num_rows in (2, 15, 16, 17, 31, 32, 33, 64, 97, 130):
                assert torch.equal(weight.multiply(x[:num_rows]), alone[:num_rows]), num_rows
                assert torch.equal(weight.multiply(x[-num_rows:]), alone[-num_rows:]), num_rows


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_infinity_affects_only_its_output(
    variant, dtype: torch.dtype, value: float
) -> None:
    weight = RotatedWeight.from_dense(load_variant(variant), rows_of(40, 96, 1))
    for num_rows in (1, 3, 20, 40):
        x = rows_of(num_rows, 96).to(dtype)
        clean = weight.multiply(x)
        x[num_rows // 2, 37] = value
        output = weight.multiply(x)
        assert output[num_rows // 2].isnan().all()
        others = torch.arange(num_rows) != num_rows // 2
        assert torch.equal(output[others], clean[others])


@each_variant
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_infinity_in_a_weight_gives_nan(variant, value: float) -> None:
    dense = rows_of(33, 64)
    dense[7, 40] = value
    output = RotatedWeight.from_dense(load_variant(variant), dense).multiply(rows_of(6, 64))
    assert output[:, 7].isnan().all()
    assert output.isnan().sum() == 6


@each_variant
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_bias_residual_and_strided_outputs(
    variant, x_dtype: torch.dtype, out_dtype: torch.dtype, num_rows: int
) -> None:
    """The sum is rounded once to the output's type; memory beside the output is untouched."""
    weight = RotatedWeight.from_dense(load_variant(variant), rows_of(70, 96, 1))
    wide = rows_of(num_rows, 200).to(x_dtype)
    x, bias = wide[:, 50:146], rows_of(1, 70)[0].to(x_dtype)
    exact = weight.multiply(x.float())
    one_unit = (
        {"rtol": 2**-7, "atol": 1e-5}
        if out_dtype == torch.bfloat16
        else {"rtol": 1e-5, "atol": 1e-5}
    )
    output = torch.full((num_rows, 90), 7.0).to(out_dtype)
    result = weight.multiply(x, bias, out=output[:, 10:80])
    torch.testing.assert_close(result, (exact + bias.float()).to(out_dtype), **one_unit)
    assert torch.equal(output[:, 10:80], result)
    assert (output[:, :10] == 7).all()
    assert (output[:, 80:] == 7).all()
    residual = rows_of(num_rows, 70, 5).to(out_dtype)
    before = residual.clone()
    assert weight.multiply_add(residual, x, bias) is residual
    expected = exact + bias.float() + before.float()
    torch.testing.assert_close(residual, expected.to(out_dtype), **one_unit)
    plain = torch.zeros(num_rows, 70, dtype=out_dtype)
    assert torch.equal(weight.multiply_add(plain, x), exact.to(out_dtype))


@each_variant
def test_rows_near_zero_and_zero_weights_give_zeros(variant) -> None:
    weight = RotatedWeight.from_dense(load_variant(variant), rows_of(40, 64))
    x = torch.stack((torch.zeros(64), torch.full((64,), 1e-38), torch.ones(64)))
    output = weight.multiply(x)
    assert (output[:2] == 0).all()
    assert (output[2] != 0).any()
    assert (
        RotatedWeight.from_dense(load_variant(variant), torch.zeros(40, 64)).multiply(x) == 0
    ).all()


@each_variant
@pytest.mark.parametrize("in_features", [96, 576, 1536])
def test_a_product_of_quantised_rows_equals_that_of_the_rows(variant, in_features: int) -> None:
    kernels = load_variant(variant)
    num_rows = 21
    weight = RotatedWeight.from_dense(kernels, rows_of(65, in_features, 1))
    memory = torch.empty(kernels.code_bytes(num_rows, in_features), dtype=torch.uint8)

    def multiply_codes() -> torch.Tensor:
        output = torch.empty(num_rows, 65)
        call = Product(num_rows, 0, 0, None, 0, None, 0, 65, output.data_ptr(), 0)
        kernels.coded_product(weight._structure, call, memory.data_ptr())
        return output

    for dtype in (torch.float32, torch.bfloat16):
        x = rows_of(num_rows, in_features, 3).to(dtype)
        call = Product(num_rows, DTYPE_CODES[dtype], in_features, x.data_ptr())
        kernels.code_rows(call, in_features, memory.data_ptr())
        assert torch.equal(multiply_codes(), weight.multiply(x.float()))


@each_variant
def test_nbytes_and_supported_lengths(variant) -> None:
    weight = RotatedWeight.from_dense(load_variant(variant), rows_of(64, 576))
    assert weight.nbytes == 64 * 576 + 64 * 4
    assert can_rotate(96)
    assert not can_rotate(48)
    assert not can_rotate(0)


def test_the_rotation_preserves_dot_products() -> None:
    for in_features in (32, 64, 96, 576):
        x, y = rows_of(5, in_features), rows_of(7, in_features, 1)
        rotated = rotated_reference.rotated(x).double() @ rotated_reference.rotated(y).double().t()
        block = rotated_reference.block_of(in_features)
        expected = x.double() @ y.double().t()
        np.testing.assert_allclose(rotated / block, expected, rtol=1e-4, atol=1e-3)
