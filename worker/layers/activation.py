"""The activation of an MLP, f(gate) * up, in torch, in C++ (csrc/layers/gate.cpp) or on a GPU.

Without a gate it is f(up).
"""

import ctypes
from typing import Final, Literal, Protocol

import torch
import torch.nn.functional as F

from worker.kernel_structures import GateCall
from worker.kernels import DTYPE_CODES, Kernels, row_kernels
from worker.layers.flashinfer_kernels import FlashInferGate, usable_flashinfer
from worker.layers.scratch import Scratch
from worker.layers.triton_kernels import TritonGate

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "sigmoid"]
"""gelu: GELU, by the error function; gelu_tanh: its tanh approximation (Hendrycks and Gimpel, 2016,
section 2).

swiglu_oai: the clamped SwiGLU of gpt-oss, x * sigmoid(1.702 x) * (up + 1), x = min(gate, 7) and up
within -7 and 7; always gated.

sigmoid: of the gate alone, which multiplies the output of an attention.
"""
GATE_CODES: Final = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2, "gelu": 3, "sigmoid": 4}
"""TokendGateKind of csrc/layers/rows.h."""
ALPHA: Final = 1.702
"""Factor of the input of the sigmoid of swiglu_oai."""
LIMIT: Final = 7.0
"""Bound of the gate and of up in swiglu_oai."""


class Gate(Protocol):
    """One implementation of f(gate) * up for gate_up [N, 2 * size] = gate ‖ up.

    Without a gate: f(up) for up [N, size].
    """

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        """Return [N, size] in the memory of out, which has the dtype of contiguous gate_up.

        Computed in float32, rounded once.
        """
        ...


class TorchGate:
    """The activation of an MLP in plain torch: for hosts without kernels."""

    def __init__(self, name: Activation, is_gated: bool = True) -> None:
        self._name = name
        self._is_gated = is_gated

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        gate, *up = gate_up.float().chunk(2 if self._is_gated else 1, dim=-1)
        if self._name == "swiglu_oai":
            gate = gate.clamp(max=LIMIT)
            factor = up[0].clamp(-LIMIT, LIMIT) + 1
            return out.tensor.copy_(gate * torch.sigmoid(ALPHA * gate) * factor)
        if self._name in ("silu", "sigmoid"):
            inner = F.silu(gate) if self._name == "silu" else gate.sigmoid()
        else:
            inner = F.gelu(gate, approximate="tanh" if self._name == "gelu_tanh" else "none")
        return out.tensor.copy_(inner * up[0] if up else inner)


class KernelGate:
    """The activation by the C++ kernels."""

    def __init__(self, kernels: Kernels, name: Activation, is_gated: bool = True) -> None:
        self._gate = kernels.gate
        self._call = GateCall(kind=GATE_CODES[name], is_gated=is_gated)
        self._reference = ctypes.byref(self._call)
        self._known: Scratch | None = None

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        call = self._call
        if out is not self._known:
            self._known = out
            call.dtype = DTYPE_CODES[out.tensor.dtype]
            call.num_rows, call.size = out.tensor.shape
            call.out = out.address
        call.x = gate_up.data_ptr()
        self._gate(self._reference)
        return out.tensor


def make_gate(name: Activation, device: torch.device, is_gated: bool = True) -> Gate:
    """Return the fastest gate with this activation for tensors on this device."""
    if device.type == "cuda":
        library, own = usable_flashinfer(), TritonGate(name, is_gated)
        has_kernel = library and is_gated and name in ("silu", "gelu_tanh")
        return FlashInferGate(library, name, own) if has_kernel else own
    kernels = row_kernels() if device.type == "cpu" else None
    if kernels is None:
        return TorchGate(name, is_gated)
    return KernelGate(kernels, name, is_gated)
