"""The experts of mixtures on a GPU against float32: Triton everywhere, FlashInfer on Hopper."""

import pytest
import torch

from worker.cuda.layers.flashinfer_kernels import (
    FlashInferExperts,
    has_prebuilt_experts,
    is_hopper,
    usable_flashinfer,
)
from worker.cuda.layers.triton_experts import TritonExperts
from worker.cuda.layers.triton_kernels import triton_gate
from worker.layers.experts import DenseExperts, ExpertRanks, Experts, StackedWeights
from worker.reference.layers import torch_gate

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def implementations(stacked: StackedWeights) -> dict[str, Experts]:
    found: dict[str, Experts] = {"triton": TritonExperts(stacked, triton_gate("silu"))}
    library = usable_flashinfer()
    if is_hopper(CUDA) and library is not None and has_prebuilt_experts():
        found["flashinfer"] = FlashInferExperts(library, stacked, ExpertRanks(len(stacked.down)))
    return found


@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("sizes", [(8, 2, 256, 512), (64, 8, 512, 96)])
def test_experts(sizes: tuple[int, int, int, int], num_rows: int) -> None:
    num_experts, top_k, hidden, inner = sizes
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    weights = [torch.randn(shape).mul_(0.05).to(BF16) for shape in shapes]
    x = torch.randn(num_rows, hidden).to(BF16)
    best = torch.rand(num_rows, num_experts).topk(top_k)
    wide = StackedWeights(*(each.float() for each in weights))
    expected = DenseExperts(wide, torch_gate("silu"))(x.float(), best.values, best.indices)
    stacked = StackedWeights(*(each.to(CUDA) for each in weights))
    args = [each.to(CUDA) for each in (x, best.values, best.indices)]
    for name, experts in implementations(stacked).items():
        found = experts(*args)
        error = (found.cpu() - expected).norm() / expected.norm()
        assert error < 0.02, name
        assert torch.equal(found, experts(*args)), f"{name} sums in another order"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = experts(*args)
        graph.replay()
        assert torch.equal(found, again), name
