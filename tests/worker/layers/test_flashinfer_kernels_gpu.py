"""FlashInfer's norms, gates and rotary embedding on a GPU against float64."""

import pytest
import torch
import torch.nn.functional as F

from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.flashinfer import load_library
from worker.cuda.layers.flashinfer_kernels import FlashInferNorm, FlashInferRotary, flashinfer_gate
from worker.cuda.layers.triton_kernels import TritonNorm, triton_gate
from worker.layers.norm import NormWeight
from worker.models.rotary import rotate

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(found.double(), exact, rtol=2.0**-7, atol=1e-5)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(BF16)


@pytest.mark.parametrize("size", [64, 576, 4096])
def test_norms(size: int) -> None:
    weight, x = random(size) * 0.1 + 1, random(7, size)
    norm = FlashInferNorm(load_library(), TritonNorm(NormWeight(weight, 1e-5)))
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert near(norm(x), exact)
    heads = x.view(7, 1, size).expand(7, 2, size).contiguous()[:, :1]
    assert near(norm(heads)[:, 0], exact)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gates(name: str) -> None:
    gate_up = random(5, 2 * 1536)
    gate = flashinfer_gate(load_library(), name, triton_gate(name))  # type: ignore[arg-type]
    first, second = gate_up.double().chunk(2, dim=1)
    inner = F.silu(first) if name == "silu" else F.gelu(first, approximate="tanh")
    assert near(gate(gate_up), inner * second)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotations(head_dim: int) -> None:
    fused = random(6, 7 * head_dim).view(6, 7, head_dim)
    before = fused.clone()
    angles = torch.randn(6, head_dim // 2, device=CUDA)
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    FlashInferRotary(load_library(), Accelerator(CUDA))(fused[:, :4], fused[:, 4:6], rotation)
    assert near(fused[:, :6], rotate(before.double(), rotation.double())[:, :6])
    assert torch.equal(fused[:, 6], before[:, 6])
