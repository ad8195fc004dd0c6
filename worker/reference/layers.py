"""Norm and gate in plain torch."""

import torch
import torch.nn.functional as F

from worker.layers.activation import ALPHA, LIMIT, Activation, Gate
from worker.layers.norm import Norm, NormWeight


class TorchNorm(Norm):
    """A norm in plain torch."""

    def __init__(self, weight: NormWeight) -> None:
        super().__init__(weight)
        self._size = list(weight.weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = self.weight
        wide = x.to(own.weight.dtype)
        if own.is_layer_norm:
            normed = F.layer_norm(wide, self._size, own.weight, own.bias, own.eps)
        else:
            normed = F.rms_norm(wide, self._size, own.weight, own.eps)
        return normed.to(x.dtype).contiguous()

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))


def torch_gate(name: Activation, is_gated: bool = True) -> Gate:
    """Return the activation of an MLP in plain torch."""

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, *up = gate_up.float().chunk(2 if is_gated else 1, dim=-1)
        if name == "swiglu_oai":
            gate = gate.clamp(max=LIMIT)
            factor = up[0].clamp(-LIMIT, LIMIT) + 1
            return (gate * torch.sigmoid(ALPHA * gate) * factor).to(gate_up.dtype)
        if name in ("silu", "sigmoid"):
            inner = F.silu(gate) if name == "silu" else gate.sigmoid()
        elif name == "relu2":
            inner = gate.relu().square()
        else:
            inner = F.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")
        return (inner * up[0] if up else inner).to(gate_up.dtype)

    return activate
