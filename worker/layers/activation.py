"""The activation of an MLP, f(gate) * up; without a gate it is f(up). `Device.gate` makes one."""

from collections.abc import Callable
from typing import Final, Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "sigmoid", "relu2"]
"""gelu: GELU, by the error function; gelu_tanh: its tanh approximation (Hendrycks and Gimpel, 2016,
section 2).

swiglu_oai: the clamped SwiGLU of gpt-oss, x * sigmoid(1.702 x) * (up + 1), x = min(gate, 7) and up
within -7 and 7; always gated.

sigmoid: of the gate alone, which multiplies the output of an attention.

relu2: the square of max(x, 0) (So et al., Primer, 2021), of MLPs without a gate.
"""
ALPHA: Final = 1.702
"""Factor of the input of the sigmoid of swiglu_oai."""
LIMIT: Final = 7.0
"""Bound of the gate and of up in swiglu_oai."""


def is_gated(name: Activation) -> bool:
    """Return whether experts with this activation have a gate projection."""
    return name != "relu2"


Gate = Callable[[torch.Tensor], torch.Tensor]
"""One implementation of f(gate) * up: takes contiguous gate_up [N, 2 * size] = gate ‖ up and
returns a new [N, size] of its dtype, computed in float32 and rounded once. Without a gate it takes
up [N, size] and returns f(up)."""
