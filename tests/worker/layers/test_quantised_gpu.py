"""Products on a GPU: quantised weights against float64 (FP8 on Hopper, codes everywhere), and those
of fixed rows, whose bits do not depend on the batch."""

import pytest
import torch

from tests.worker.layers.test_triton_codes import Made, close
from worker.cuda.layers.dense_linear import FixedRowsLinear
from worker.cuda.layers.flashinfer_kernels import is_hopper, usable_flashinfer
from worker.cuda.layers.fp8_linear import Fp8BlockLinear, Fp8RowLinear, RowRounding
from worker.cuda.layers.triton_codes import CodedWeight, TritonCodedLinear

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROUNDED = 0.04
"""Of the norm of a product: what rounding the input to 4 significant bits loses."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(BF16)


def replayed(linear: Fp8RowLinear | Fp8BlockLinear | TritonCodedLinear, x: torch.Tensor) -> None:
    """Check that a graph computes the same bits."""
    expected = linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = linear(x)
    graph.replay()
    assert torch.equal(expected, again)


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1536, 576)])
def test_a_row_has_the_same_bits_in_products_of_fixed_rows(outputs: int, inputs: int) -> None:
    x, linear = random(700, inputs), FixedRowsLinear(random(outputs, inputs), random(outputs))
    whole = linear(x)
    for first, count in ((0, 1), (3, 2), (100, 64), (500, 200), (699, 1)):
        assert torch.equal(linear(x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize("num_rows", [1, 300])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(72, 256, 128), (4096, 4096, 128)])
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int4 sorted", "int8", "nf4", "fp8"])
def test_codes(kind: str, outputs: int, inputs: int, group: int, num_rows: int) -> None:
    made = Made(kind, outputs, inputs, group)
    fields = (getattr(made.weight, name) for name in CodedWeight.__slots__)
    moved = (each.to(CUDA) if isinstance(each, torch.Tensor) else each for each in fields)
    linear, x = TritonCodedLinear([CodedWeight(*moved)]), random(num_rows, inputs)
    assert close(linear(x).cpu(), x.double().cpu() @ made.numbers.t(), x.cpu(), made)
    replayed(linear, x)


def test_rows_are_rounded_to_the_nearest_code() -> None:
    x = random(9, 4096)
    x[2], x[3, 7], x[4, 5] = 0, float("nan"), float("inf")
    codes, scales = RowRounding(None)(x)
    assert codes[3, 7].float().isnan()
    assert codes[4, 5].float().isnan()
    kept = [0, 1, 2, 5, 6, 7, 8]
    wide = x[kept].float()
    wanted = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
    assert torch.allclose(scales[kept], wanted)
    # The last bit of a quotient may differ.
    differ = codes[kept].float() != (wide / scales[kept]).to(E4M3).float()
    assert differ.float().mean() < 1e-3
    codes, scales = RowRounding(1e-3)(x[kept])
    assert codes.float().abs().max() == 448


@pytest.mark.parametrize("num_rows", [1, 17, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (256, 384), (6144, 4096), (4096, 14336)])
def test_fp8(outputs: int, inputs: int, num_rows: int) -> None:
    """By rows, and by blocks where they are whole, with a bias."""
    if not is_hopper(CUDA):
        pytest.skip("weights in FP8 are converted on this GPU")
    codes = (torch.randn(outputs, inputs, device=CUDA) * 50).to(E4M3)
    x, bias = random(num_rows, inputs), random(outputs)
    scales = torch.rand(outputs, device=CUDA) * 0.01 + 0.001
    exact = x.double() @ (codes.double() * scales[:, None].double()).t() + bias.double()
    linear = Fp8RowLinear(codes, scales, bias)
    assert (linear(x).double() - exact).norm() < ROUNDED * exact.norm()
    replayed(linear, x)
    library = usable_flashinfer()
    if outputs % 128 or inputs % 128 or library is None:
        return
    blocks = torch.rand(outputs // 128, inputs // 128, device=CUDA) * 0.01 + 0.001
    wide = blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    exact = x.double() @ (codes.double() * wide).t() + bias.double()
    by_blocks = Fp8BlockLinear(library, codes, blocks, bias)
    assert (by_blocks(x).double() - exact).norm() < ROUNDED * exact.norm()
    replayed(by_blocks, x)
