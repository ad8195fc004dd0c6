"""Quantisation of K and V to int8 rows with scales."""

import pytest
import torch

from worker.attention.kv_cache import num_scales, quantise


def test_the_int8_error_is_at_most_half_a_scale() -> None:
    rows = torch.randn(50, 3, 24, generator=torch.Generator().manual_seed(0)) * 10.0
    for parts in (1, 2, 4):
        whole, scales = quantise(rows, parts)
        assert (whole.dtype, whole.shape) == (torch.int8, rows.shape)
        assert (scales.dtype, scales.shape) == (torch.float32, (50, 3, parts))
        cut, wide = (each.double().unflatten(-1, (parts, -1)) for each in (whole, rows))
        torch.testing.assert_close(scales.double(), wide.abs().amax(dim=-1) / 127)
        error = (cut * scales[..., None].double() - wide).abs()
        assert (error <= scales[..., None].double() / 2 * (1 + 1e-5)).all()
        assert cut.abs().amax(dim=-1).eq(127).all()


def test_heads_of_a_multiple_of_128_have_one_scale_per_128_values() -> None:
    counted = {head_dim: num_scales(head_dim) for head_dim in (8, 64, 96, 128, 192, 256, 512, 1024)}
    assert counted == {8: 1, 64: 1, 96: 1, 128: 1, 192: 1, 256: 2, 512: 4, 1024: 1}


def test_every_row_has_its_own_scale() -> None:
    rows = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    alone = [quantise(row, 2) for row in rows]
    rows[2] *= 1e6
    whole, scales = quantise(rows, 2)
    for index in (0, 1, 3, 4, 5):
        assert torch.equal(whole[index], alone[index][0])
        assert torch.equal(scales[index], alone[index][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_row_has_a_nan_scale(value: float) -> None:
    rows = torch.ones(3, 8)
    rows[1, 4] = value
    whole, scales = quantise(rows, 2)
    assert scales.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert (whole[1] == 0).all()


def test_zero_and_tiny_rows_become_zeros() -> None:
    rows = torch.stack((torch.zeros(8), torch.full((8,), 1e-40), torch.full((8,), 1e-31)))
    whole, scales = quantise(rows, 1)
    assert (whole == 0).all()
    assert (scales == 0).all()
