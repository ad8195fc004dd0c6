"""Packed weights: every type and every variant of the kernels against float64."""

import math

import numpy as np
import pytest
import torch

from tests.fakes.gguf_files import put_iq1_m_scales
from tests.worker.kernel_variants import (
    THREADS,
    each_variant,
    load_variant,
    threads_of_torch,
)
from tests.worker.layers.packed_cases import HALVES, TYPES, error_of, numbers_of, random_blocks
from tests.worker.reference import packed as packed_reference
from worker.cpu.weights import PackedWeight, is_packable
from worker.loader.block_types import BLOCK_TYPES

EXACT = 2e-6
"""Float32 sums beside the size of their terms."""
ROUNDED = 4e-3
"""bfloat16 keeps 8 bits."""

IN_FILE_BLOCKS = TYPES[TYPES.index("IQ1_S") : TYPES.index("TQ2_0")]
"""Types that products unpack, and multiply by the same code."""

each_type = pytest.mark.parametrize("block_type", TYPES)


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def weight_of(variant, block_type: str, shape: tuple[int, int], raw: np.ndarray) -> PackedWeight:
    weight = PackedWeight(load_variant(variant), block_type, shape)
    assert weight.put_blocks(0, raw) == shape[0]
    return weight


def packed_of(variant, block_type: str, shape: tuple[int, int], seed: int = 0):
    """A random packed weight and its dequantised values."""
    raw = random_blocks(block_type, shape, rng_of(seed))
    weight = weight_of(variant, block_type, shape, raw)
    return weight, numbers_of(block_type, shape, raw)


def rows_of(num_rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Random rows with a few outliers, as in activations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features, generator=generator)
    outliers = torch.rand(num_rows, in_features, generator=generator) < 0.01
    return torch.where(outliers, x * 50, x)


def shape_of(block_type: str, out_features: int, units: int) -> tuple[int, int]:
    """`units` of 32 inputs, or of 256 for the types whose blocks are that long."""
    return out_features, BLOCK_TYPES[block_type][0] * units


@each_variant
@each_type
def test_rows_equal_the_dequantised_values(variant, block_type: str) -> None:
    shape = shape_of(block_type, 77, 3)
    weight, numbers = packed_of(variant, block_type, shape)
    ids = torch.tensor([0, 76, 31, 32, 5, 5])
    assert torch.equal(weight.rows(ids, torch.float32), numbers[ids])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weight.rows(ids, dtype), numbers[ids].to(dtype))
    assert weight.rows(ids[:0], torch.float32).shape == (0, shape[1])


@each_variant
@pytest.mark.parametrize("ids", [[0, 40], [-1]])
def test_a_row_outside_the_weight_is_an_error(variant, ids: list[int]) -> None:
    weight, _ = packed_of(variant, "Q8_0", (40, 32))
    with pytest.raises(IndexError, match="of 40"):
        weight.rows(torch.tensor(ids), torch.float32)


@each_variant
@each_type
def test_products_match_float64(variant, block_type: str) -> None:
    for seed, (out_features, units) in enumerate(((1, 1), (33, 2), (100, 5), (64, 3))):
        shape = shape_of(block_type, out_features, units)
        weight, numbers = packed_of(variant, block_type, shape, seed)
        all_rows = (*range(1, 15), 17, 70, 133)
        for num_rows in (1, 6, 133) if block_type in IN_FILE_BLOCKS else all_rows:
            x = rows_of(num_rows, shape[1], num_rows)
            assert error_of(weight.multiply(x), numbers, x) < EXACT, (shape, num_rows)


@each_variant
@each_type
def test_products_of_the_largest_codes_do_not_overflow(variant, block_type: str) -> None:
    """All codes and activations at their largest magnitude, in all combinations of signs."""
    shape = shape_of(block_type, 32, 2)
    raw = random_blocks(block_type, shape, rng_of(1)).reshape(-1, 1)
    for code in (0x00, 0x7F, 0x80, 0xFF):
        filled = np.full_like(raw, code)
        blocks = filled.reshape(shape[0] * shape[1] // BLOCK_TYPES[block_type][0], -1)
        if block_type == "MXFP4":
            blocks[:, 0] = 126
        if block_type == "IQ1_M":
            put_iq1_m_scales(blocks, np.full(len(blocks), 0.5, np.float16))
        for at in HALVES[block_type]:
            blocks[:, at : at + 2] = np.float16(0.5).view(np.uint16).reshape(1).view(np.uint8)
        numbers = numbers_of(block_type, shape, blocks.reshape(-1))
        weight = weight_of(variant, block_type, shape, blocks.reshape(-1))
        for sign in (1.0, -1.0):
            x = torch.full((9, shape[1]), 3.0 * sign)
            assert error_of(weight.multiply(x), numbers, x) < EXACT


@each_variant
@each_type
def test_a_row_does_not_depend_on_its_batch(variant, block_type: str) -> None:
    shape = shape_of(block_type, 75, 3)
    weight, _ = packed_of(variant, block_type, shape)
    x = rows_of(140, shape[1])
    alone = torch.cat([weight.multiply(row[None]) for row in x])
    for num_rows in (*range(2, 20), 31, 32, 33, 64, 128, 129, 132, 133, 140):
        assert torch.equal(weight.multiply(x[:num_rows]), alone[:num_rows]), num_rows
        assert torch.equal(weight.multiply(x[-num_rows:]), alone[-num_rows:]), num_rows


@each_variant
@each_type
def test_results_do_not_depend_on_the_number_of_threads(variant, block_type: str) -> None:
    shape = shape_of(block_type, 515, 2)
    weight, _ = packed_of(variant, block_type, shape)
    for num_rows in (1, 40):
        x = rows_of(num_rows, shape[1])
        outputs = []
        for threads in THREADS:
            with threads_of_torch(threads):
                outputs.append(weight.multiply(x))
        assert all(torch.equal(found, outputs[0]) for found in outputs)


@each_variant
@each_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_nan_or_infinity_affects_only_its_output(
    variant, block_type: str, dtype: torch.dtype, value: float
) -> None:
    shape = shape_of(block_type, 40, 2)
    weight, _ = packed_of(variant, block_type, shape)
    for num_rows in (1, 3, 8, 20):
        x = rows_of(num_rows, shape[1]).to(dtype)
        clean = weight.multiply(x)
        x[num_rows // 2, 37] = value
        output = weight.multiply(x)
        assert output[num_rows // 2].isnan().all()
        others = torch.arange(num_rows) != num_rows // 2
        assert torch.equal(output[others], clean[others])


@each_variant
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_bias_residual_and_strided_outputs(
    variant, x_dtype: torch.dtype, out_dtype: torch.dtype, num_rows: int
) -> None:
    """The sum is rounded once for all types; memory beside the output is untouched."""
    shape = (70, 96)
    weight, numbers = packed_of(variant, "Q5_1", shape)
    wide = rows_of(num_rows, 200).to(x_dtype)
    x, bias = wide[:, 50:146], rows_of(1, 70)[0].to(x_dtype)
    exact = weight.multiply(x.float())
    output = torch.full((num_rows, 90), 7.0).to(out_dtype)
    result = weight.multiply(x, bias, out=output[:, 10:80])
    assert torch.equal(result, (exact + bias.float()).to(out_dtype))
    assert torch.equal(output[:, 10:80], result)
    assert (output[:, :10] == 7).all()
    assert (output[:, 80:] == 7).all()
    residual = rows_of(num_rows, 70, 5).to(out_dtype)
    before = residual.clone()
    assert weight.multiply_add(residual, x, bias) is residual
    assert torch.equal(residual, (exact + bias.float() + before.float()).to(out_dtype))
    plain = before.clone()
    weight.multiply_add(plain, x)
    assert torch.equal(plain, (exact + before.float()).to(out_dtype))
    tolerance = EXACT if out_dtype == torch.float32 else ROUNDED
    assert error_of(weight.multiply(x, out=before), numbers, x) < tolerance


@each_variant
def test_rows_of_nvfp4_are_multiplied_by_factors(variant) -> None:
    """Of 75 rows the factors from the 50th on, which begin within a panel."""
    shape = (75, 128)
    weight, numbers = packed_of(variant, "NVFP4", shape)
    factors = rng_of(5).uniform(-3, 3, 25).astype(np.float32)
    x = rows_of(20, shape[1])
    before = weight.multiply(x)
    weight.put_factors(50, factors)
    expected = torch.cat((torch.ones(50), torch.from_numpy(factors)))
    found = weight.rows(torch.arange(75), torch.float32)
    assert torch.equal(found[:50], numbers[:50])
    assert torch.allclose(found, numbers * expected[:, None], rtol=2**-23, atol=0)
    assert torch.equal(weight.multiply(x), before * expected)
    assert error_of(weight.multiply(x), found, x) < EXACT


@each_variant
def test_pieces_are_permuted_and_lie_one_below_the_other(variant) -> None:
    """The second piece begins within a panel of 32 outputs."""
    shape = (75, 256)
    raw = random_blocks("Q4_K", shape, rng_of(3))
    weight = PackedWeight(load_variant(variant), "Q4_K", shape)
    pieces, order = np.split(raw, [50 * raw.size // 75]), rng_of(4).permutation(25)
    assert weight.put_blocks(0, pieces[0]) == 50
    assert weight.put_blocks(50, pieces[1], order) == 75
    numbers = numbers_of("Q4_K", shape, raw)
    numbers[50:] = numbers[50:][torch.from_numpy(order)]
    assert torch.equal(weight.rows(torch.arange(75), torch.float32), numbers)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dense_weights_are_quantised_like_the_reference(variant, dtype: torch.dtype) -> None:
    dense = rows_of(45, 160).to(dtype)
    dense[3, 32:64] = 0
    dense[4, :32] *= 1e-5
    wide = torch.cat((dense, dense), dim=1)
    weight = PackedWeight.from_dense(load_variant(variant), wide[:, :160])
    expected = packed_reference.quantise_dense(dense)
    assert torch.equal(weight.rows(torch.arange(45), torch.float32), expected)
    x = rows_of(5, 160, 3)
    assert error_of(weight.multiply(x), expected, x) < EXACT
    assert weight.nbytes == 64 * 160 * 34 // 32


@each_variant
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e8])
def test_nonfinite_dense_weights_give_nan(variant, value: float) -> None:
    dense = rows_of(33, 64)
    dense[7, 40] = value
    output = PackedWeight.from_dense(load_variant(variant), dense).multiply(rows_of(6, 64))
    assert output[:, 7].isnan().all()
    assert output.isnan().sum() == 6


@each_variant
def test_rows_are_quantised_like_the_reference(variant) -> None:
    """With the identity as the weight, the product is the quantised row."""
    identity = PackedWeight.from_dense(load_variant(variant), torch.eye(96) * 127)
    x = rows_of(20, 96)
    x[1] *= 1e-35
    x[2] *= 1e30
    x[3, :40] = 0
    x[4, 32:64] = torch.arange(32) + 0.5  # ties, once the largest is 127
    x[4, 63] = 127
    codes, scales = packed_reference.quantise_rows(x)
    expected = codes.float() * 127 * scales.repeat_interleave(32, dim=1)
    assert torch.allclose(identity.multiply(x), expected, rtol=2e-7, atol=0)


def test_supported_block_types_and_lengths() -> None:
    assert is_packable("Q4_1", 576)
    assert is_packable("Q6_K", 512)
    assert not is_packable("Q6_K", 576)
    assert not is_packable("Q4_0", 48)
    assert not is_packable("Q4_0", 0)
    assert not is_packable("Q8_K", 256)


@each_variant
def test_a_packed_weight_is_as_large_as_in_the_file(variant) -> None:
    """Except for the scales of Q4_K and Q5_K, which take 8 bits instead of 6."""
    for block_type in ("IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0"):
        numbers, file_bytes = BLOCK_TYPES[block_type]
        weight, _ = packed_of(variant, block_type, (64, 512))
        assert weight.nbytes == 64 * 512 // numbers * file_bytes
    for block_type, file_bytes in (("Q4_1", 20), ("Q5_0", 22), ("Q8_0", 34)):
        weight, _ = packed_of(variant, block_type, (64, 64))
        assert weight.nbytes == 64 * 2 * file_bytes
    assert packed_of(variant, "Q6_K", (32, 256))[0].nbytes == 32 * 210
    assert packed_of(variant, "Q4_K", (32, 256))[0].nbytes == 32 * 148
    assert packed_of(variant, "Q2_K", (32, 256))[0].nbytes == 32 * 84
    assert packed_of(variant, "IQ4_NL", (32, 64))[0].nbytes == 32 * 36
    assert packed_of(variant, "TQ2_0", (32, 256))[0].nbytes == 32 * 66
    assert packed_of(variant, "NVFP4", (32, 256))[0].nbytes == 32 * (4 * 36 + 4)  # and a factor
    # 4.25 bits a number; of AWQ and GPTQ 4.16
    assert packed_of(variant, "INT4_128", (32, 256))[0].nbytes == 32 * 136
