"""RMSNorm and LayerNorm by the kernels and by torch against float64, on random shapes."""

import random

import pytest
import torch

from tests.worker.kernel_variants import THREADS, each_variant, load_variant, threads_of_torch
from worker.cpu.layers import KernelNorm
from worker.layers.norm import Norm, NormWeight
from worker.reference.layers import TorchNorm

# Largest error relative to the value: float32 sums, then one rounding to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
EPS = 1e-5


def arithmetic(variant, weight: torch.Tensor) -> Norm:
    return KernelNorm(load_variant(variant), NormWeight(weight, EPS))


def expected(
    x: torch.Tensor,
    weight: torch.Tensor,
    is_layer_norm: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = x.double()
    if is_layer_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def cases() -> list[tuple[torch.dtype, torch.Generator, int, int]]:
    rng = random.Random(3)
    return [
        (dtype, torch.Generator().manual_seed(rng.randrange(99)), rows, size)
        for dtype in TOLERANCE
        for rows, size in [
            (1, 1),
            (2, 7),
            (70, 576),
            *[(rng.randint(1, 9), rng.randint(1, 700))] * 6,
        ]
    ]


def assert_matches_float64(norm: Norm, weight: NormWeight, case) -> None:
    dtype, generator, rows, size = case
    x = (torch.randn(rows, size, generator=generator) * 9 + 1).to(dtype)
    exact = expected(x, weight.weight, weight.is_layer_norm, weight.bias)
    check(norm(x), exact)
    residual = torch.randn(rows, size, generator=generator).to(dtype)
    wanted = residual.double() + exact
    added = norm.add_to(residual, x)
    assert added.data_ptr() == residual.data_ptr()
    # Torch rounds the norm before it is added.
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(added.double(), wanted, rtol=tolerance, atol=4 * tolerance)


def weights_of(case) -> list[NormWeight]:
    """The weights of an RMSNorm and of LayerNorms, one of them with a bias."""
    dtype, generator, _, size = case
    weight, bias = torch.randn(2, size, generator=generator).to(dtype).unbind()
    return [
        NormWeight(weight, EPS),
        NormWeight(weight, EPS, is_layer_norm=True),
        NormWeight(weight, EPS, is_layer_norm=True, bias=bias),
    ]


@each_variant
def test_kernels_match_float64(variant) -> None:
    for case in cases():
        for weight in weights_of(case):
            assert_matches_float64(KernelNorm(load_variant(variant), weight), weight, case)


def test_torch_matches_float64() -> None:
    for case in cases():
        for weight in weights_of(case):
            assert_matches_float64(TorchNorm(weight), weight, case)


@each_variant
def test_heads_may_be_slices_of_wider_rows(variant) -> None:
    weight = torch.rand(24) + 0.5
    norm = arithmetic(variant, weight)
    wide = torch.randn(5, 9, 24, generator=torch.Generator().manual_seed(1))
    for x in (wide[:, :4], wide[:, 4:7], wide[2:3, :1], wide.transpose(0, 1), wide[..., :24:1]):
        found = norm(x)
        assert found.is_contiguous()
        check(found, expected(x, weight))
    assert norm(wide[:0]).shape == (0, 9, 24)


@each_variant
def test_a_float32_weight_is_applied_before_rounding(variant) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = 1 + torch.arange(48) * 1e-5
    norm = arithmetic(variant, weight)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


@each_variant
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_affect_only_their_row(variant, value: float) -> None:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(0))
    norm = arithmetic(variant, torch.ones(33))
    sound = norm(x)
    x[2, 32] = value
    found = norm(x)
    assert torch.equal(found[[0, 1, 3]], sound[[0, 1, 3]])
    assert found[2].isnan().any()


@each_variant
def test_results_do_not_depend_on_the_number_of_threads(variant) -> None:
    x = torch.randn(100, 577, generator=torch.Generator().manual_seed(0))
    norm = arithmetic(variant, torch.rand(577))
    found = []
    for threads in THREADS:
        with threads_of_torch(threads):
            found.append(norm(x))
    assert all(torch.equal(rows, found[0]) for rows in found)
