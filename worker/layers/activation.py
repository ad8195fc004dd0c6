"""The gate of the MLP."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [N, 2 * size] = gate ‖ up; a new contiguous [N, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with GELU in its tanh approximation (Hendrycks and Gimpel, 2016, section 2)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
"""By their names in a ModelSpec."""
