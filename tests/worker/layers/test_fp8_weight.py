"""FP8 weights: every variant of the kernels against float64."""

import numpy as np
import pytest
import torch

from tests.worker.kernel_variants import THREADS, each_variant, load_variant, threads_of_torch
from tests.worker.layers.test_bf16_weight import error_of, numbers, sums
from worker.cpu.weights import Fp8Weight

FP8 = torch.float8_e4m3fn
SHAPES = ((1, 32, 32), (33, 96, 96), (70, 320, 128), (64, 576, 576), (100, 512, 64), (40, 384, 192))
"""Outputs, inputs and columns that share a scale, which may be more than are left."""


def stored(out_features: int, in_features: int, columns: int, wide: bool = False, seed: int = 0):
    """Codes of every finite number, scales of both signs, and their float32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (out_features, in_features), generator=generator).to(torch.uint8)
    raw[raw & 0x7F == 0x7F] = 1
    groups = -(-in_features // columns)
    blocks = -(-out_features // 32) if wide else out_features
    scales = torch.randn(blocks, groups, generator=generator) * 0.01
    scales = scales.repeat_interleave(32, 0)[:out_features] if wide else scales
    codes = raw.view(FP8)
    dense = codes.float() * scales.repeat_interleave(columns, 1)[:, :in_features]
    return codes, scales.contiguous(), dense


def weight_of(variant, shape: tuple[int, int, int], wide: bool = False, seed: int = 0):
    out_features, in_features, columns = shape
    codes, scales, dense = stored(*shape, wide, seed)
    weight = Fp8Weight(load_variant(variant), (out_features, in_features), columns, wide=wide)
    assert weight.put_rows(0, codes, scales) == out_features
    return weight, dense


@each_variant
@pytest.mark.parametrize("wide", [False, True])
def test_products_match_float64(variant, wide: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        weight, dense = weight_of(variant, shape, wide, seed)
        x = numbers(70, shape[1], seed=seed + 50)
        for num_rows in (1, 2, 3, 5, 8, 16, 17, 33, 70):
            assert error_of(sums(weight, x[:num_rows]), dense, x[:num_rows]) < 1, (shape, num_rows)


@each_variant
def test_rows_equal_the_numbers(variant) -> None:
    for wide in (False, True):
        weight, dense = weight_of(variant, (70, 320, 128), wide)
        ids = torch.tensor([69, 0, 31, 32, 5, 5])
        assert torch.equal(weight.rows(ids, torch.float32), dense[ids])
        assert torch.equal(weight.rows(ids, torch.bfloat16), dense[ids].bfloat16())
        with pytest.raises(IndexError, match="row 70 of 70"):
            weight.rows(torch.tensor([70]), torch.float32)


@each_variant
def test_a_row_does_not_depend_on_its_batch_or_on_threads(variant) -> None:
    weight, _ = weight_of(variant, (515, 320, 128))
    x = numbers(97, 320)
    alone = torch.cat([sums(weight, row[None]) for row in x])
    for threads in THREADS:
        with threads_of_torch(threads):
            for num_rows in (2, 3, 7, 16, 31, 33, 97):
                assert torch.equal(sums(weight, x[:num_rows]), alone[:num_rows]), num_rows


@each_variant
def test_float32_rows_bias_and_residual(variant) -> None:
    weight, _ = weight_of(variant, (70, 96, 96))
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(4))
    exact, bias, residual = sums(weight, x.bfloat16()), numbers(70).float(), numbers(21, 70).float()
    assert torch.equal(weight.multiply(x, bias), exact + bias)
    assert torch.equal(weight.multiply_add(residual.clone(), x), exact + residual)


@each_variant
def test_pieces_are_permuted_and_lie_one_below_the_other(variant) -> None:
    """The second piece begins within a pair of panels; its rows are a stride apart."""
    codes, scales, dense = stored(75, 160, 64)
    weight = Fp8Weight(load_variant(variant), (75, 96), 64)
    order = np.random.default_rng(4).permutation(25)
    part, of_part = codes[:, 64:], scales[:, 1:]
    assert weight.put_rows(0, part[:50], of_part[:50]) == 50
    assert weight.put_rows(50, part[50:], of_part[50:], order) == 75
    numbers_of_part = dense[:, 64:].clone()
    numbers_of_part[50:] = numbers_of_part[50:][torch.from_numpy(order)]
    assert torch.equal(weight.rows(torch.arange(75), torch.float32), numbers_of_part)


@each_variant
def test_memory_is_that_of_the_codes_and_scales(variant) -> None:
    assert weight_of(variant, (64, 512, 512))[0].nbytes == 64 * 512 + 64 * 4
    assert weight_of(variant, (64, 2048, 128), wide=True)[0].nbytes == 64 * 2048 + 2 * 64


@each_variant
def test_a_code_that_is_nan_is_refused(variant) -> None:
    codes, scales, _ = stored(40, 64, 64)
    codes.view(torch.uint8)[39, 63] = 0xFF
    with pytest.raises(ValueError, match="a number is NaN"):
        Fp8Weight(load_variant(variant), (40, 64), 64).put_rows(0, codes, scales)
