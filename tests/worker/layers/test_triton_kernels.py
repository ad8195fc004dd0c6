"""Norms and activation by Triton, in its interpreter, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fakes.triton import interpret_kernels
from worker.cuda.layers.triton_kernels import TritonNorm, triton_gate
from worker.layers.norm import NormWeight

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float32: 1e-5}
"""Of a value; the interpreter cuts bfloat16 off where a device rounds."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Equal up to one rounding."""
    limit = exact.abs() * ROUNDING[found.dtype] + 1e-6
    return bool(((found.double() - exact).abs() <= limit).all())


def exact_norm(x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
    wide = x.double()
    if weight.is_layer_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    scale = (wide.square().mean(-1, keepdim=True) + weight.eps).rsqrt()
    normed = wide * scale * weight.weight.double()
    return normed if weight.bias is None else normed + weight.bias.double()


@pytest.mark.parametrize("size", [64, 96, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norm(kind: str, dtype: torch.dtype, size: int) -> None:
    x, factor = random(5, size, dtype=dtype), random(size, dtype=torch.float32)
    bias = random(size, dtype=torch.float32).flip(0) if kind == "layer with bias" else None
    weight = NormWeight(factor, 1e-5, kind != "rms", bias)
    norm, exact = TritonNorm(weight), exact_norm(x, weight)
    assert close(norm(x), exact)
    residual = random(5, size, dtype=dtype) + 1
    wanted = residual.double() + exact
    assert norm.add_to(residual, x) is residual
    assert close(residual, wanted)


def test_norm_of_heads_inside_a_fused_product() -> None:
    fused = random(3, 6 * 64, dtype=torch.bfloat16)
    heads, factor = fused.view(3, 6, 64)[:, 2:4], random(64, dtype=torch.bfloat16)
    weight = NormWeight(factor, 1e-6)
    found = TritonNorm(weight)(heads)
    assert found.is_contiguous()
    assert close(found, exact_norm(heads, weight))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda gate: gate.relu().square(),
}


@pytest.mark.parametrize("size", [48, 1500])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [True, False])
def test_gate(is_gated: bool, dtype: torch.dtype, name: Any, size: int) -> None:
    gate_up = random(4, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    inner = ACTIVATIONS[name](gate)
    if is_gated:
        assert close(triton_gate(name)(gate_up), inner * up)
    else:
        up = gate_up[:, :size].contiguous()
        assert close(triton_gate(name, is_gated=False)(up), inner)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_gate(dtype: torch.dtype) -> None:
    gate_up = 6 * random(4, 96, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    clamped = gate.clamp(max=7)
    wanted = clamped * torch.sigmoid(1.702 * clamped) * (up.clamp(-7, 7) + 1)
    assert close(triton_gate("swiglu_oai")(gate_up), wanted)
