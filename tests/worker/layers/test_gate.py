"""The gate of the MLP, by the kernels and by torch, against float64."""

import pytest
import torch

from tests.fakes.devices import CPU
from tests.worker.kernel_variants import LOADABLE, load_variant, with_each
from worker.cpu.layers import kernel_gate
from worker.layers.activation import Activation, Gate
from worker.reference.layers import torch_gate

# float32 arithmetic, then one rounding to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = ((1, 1), (3, 5), (2, 16), (1, 1536), (7, 531), (40, 600))
NAMES: tuple[Activation, ...] = ("silu", "gelu_tanh", "swiglu_oai", "sigmoid", "relu2")

each_gate = with_each([None, *LOADABLE])  # None: torch
each_name = pytest.mark.parametrize("name", NAMES)


def gate_of(variant, name: Activation) -> Gate:
    return torch_gate(name) if variant is None else kernel_gate(load_variant(variant), name)


def expected(name: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    if name == "silu":
        return gate / (1 + (-gate).exp()) * up
    if name == "sigmoid":
        return gate.sigmoid() * up
    if name == "relu2":
        return gate.relu() ** 2 * up
    if name == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate / (1 + (-1.702 * gate).exp()) * (up.clamp(-7, 7) + 1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + inner.tanh()) * up


@each_gate
@each_name
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_gate_matches_float64(variant, name: Activation, dtype: torch.dtype) -> None:
    gate = gate_of(variant, name)
    generator = torch.Generator().manual_seed(5)
    for rows, size in SHAPES:
        gate_up = (torch.randn(rows, 2 * size, generator=generator) * 6).to(dtype)
        before = gate_up.clone()
        found = gate(gate_up)
        assert found.is_contiguous()
        assert found.dtype == dtype
        tolerance = TOLERANCE[dtype]
        # 1 + tanh of a large negative number has few digits in float32 and is negligible beside up.
        torch.testing.assert_close(
            found.double(), expected(name, gate_up), rtol=tolerance, atol=20 * tolerance
        )
        assert torch.equal(gate_up, before)


@each_gate
@each_name
def test_the_gate_saturates_for_large_values_and_keeps_nan(variant, name) -> None:
    gate = torch.tensor([1e30, 300.0, -300.0, -1e4, 0.0, float("nan"), float("inf")])
    gate_up = torch.cat((gate, torch.full((7,), 2.0)))[None]
    found = gate_of(variant, name)(gate_up)[0]
    if name == "swiglu_oai":
        largest = pytest.approx(3 * 7, rel=1e-4)
        assert found[:5].tolist() == [largest, largest, 0.0, 0.0, 0.0]
        assert found[5].isnan()
        assert found[6].item() == largest
        return
    if name == "sigmoid":
        assert found[:5].tolist() == [2.0, 2.0, 0.0, 0.0, 1.0]
        assert found[5].isnan()
        assert found[6].item() == 2.0
        return
    if name == "relu2":
        assert found[:5].tolist() == [float("inf"), 180_000.0, 0.0, 0.0, 0.0]
        assert found[5].isnan()
        assert found[6].item() == float("inf")
        return
    assert found[:5].tolist() == [pytest.approx(2e30), 600.0, 0.0, 0.0, 0.0]
    assert not found[5:].isfinite().any()


def test_a_gate_is_selected_for_this_machine() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    found = CPU.gate("silu")(gate_up)
    torch.testing.assert_close(found.double(), expected("silu", gate_up), rtol=1e-6, atol=1e-6)
