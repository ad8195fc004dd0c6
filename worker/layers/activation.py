"""The gate of an MLP, f(gate) * up, in torch, in C++ (csrc/layers/gate.cpp) or on a GPU."""

import ctypes
from typing import Final, Literal, Protocol

import torch
import torch.nn.functional as F

from worker.kernels import DTYPE_CODES, GateCall, Kernels, row_kernels
from worker.layers.flashinfer_kernels import FlashInferGate, usable_flashinfer
from worker.layers.scratch import Scratch
from worker.layers.triton_kernels import TritonGate

Activation = Literal["silu", "gelu_tanh"]
"""gelu_tanh: GELU in its tanh approximation (Hendrycks and Gimpel, 2016, section 2)."""
GATE_CODES: Final = {"silu": 0, "gelu_tanh": 1}
"""TokendGateKind of csrc/layers/rows.h."""


class Gate(Protocol):
    """One implementation of f(gate) * up for gate_up [N, 2 * size] = gate ‖ up."""

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        """Return [N, size] in the memory of out, which has the dtype of contiguous gate_up.

        Computed in float32, rounded once.
        """
        ...


class TorchGate:
    """The gated activation of an MLP, act(gate) * up, in plain torch: for hosts without kernels."""

    def __init__(self, name: Activation) -> None:
        self._name = name

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = F.silu(gate) if self._name == "silu" else F.gelu(gate, approximate="tanh")
        return out.tensor.copy_(inner * up)


class KernelGate:
    """The gate by the C++ kernels."""

    def __init__(self, kernels: Kernels, name: Activation) -> None:
        self._gate = kernels.gate
        self._call = GateCall(kind=GATE_CODES[name])
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


def make_gate(name: Activation, device: torch.device) -> Gate:
    """Return the fastest gate with this activation for tensors on this device."""
    if device.type == "cuda":
        library, own = usable_flashinfer(), TritonGate(name)
        return own if library is None else FlashInferGate(library, name, own)
    kernels = row_kernels() if device.type == "cpu" else None
    return TorchGate(name) if kernels is None else KernelGate(kernels, name)
