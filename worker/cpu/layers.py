"""Norm and gate by the C++ kernels (csrc/layers)."""

import ctypes
from typing import Final

import torch

from worker.cpu.kernel_structures import GateCall, NormCall, RowNorm
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.layers.activation import Activation, Gate
from worker.layers.norm import Norm, NormWeight

GATE_CODES: Final = {
    "silu": 0,
    "gelu_tanh": 1,
    "swiglu_oai": 2,
    "gelu": 3,
    "sigmoid": 4,
    "relu2": 5,
}
"""TokendGateKind of csrc/layers/rows.h."""


class KernelNorm(Norm):
    """A norm by the C++ kernels; float32, rounded once at the end."""

    def __init__(self, kernels: Kernels, weight: NormWeight) -> None:
        super().__init__(weight)
        self._wide = weight.weight.float().contiguous()
        self._bias = None if weight.bias is None else weight.bias.float().contiguous()
        self._size = len(self._wide)
        self.row_norm = RowNorm(
            weight=self._wide.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            eps=weight.eps,
            is_layer_norm=weight.is_layer_norm,
        )
        """The norm as a structure for C; valid as long as this object lives."""
        self._call = NormCall(size=self._size, norm=self.row_norm)
        self._reference = ctypes.byref(self._call)
        self._norm, self._add_norm = kernels.norm, kernels.add_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        x = self._describe(x, out)
        self._norm(self._reference)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert residual.is_contiguous()
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        x = self._describe(x, residual)
        self._add_norm(self._reference)
        return residual

    def _describe(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill in the call for two tensors; return the tensor that must outlive the call."""
        call, size = self._call, self._size
        assert x.shape[-1] == size
        if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
            call.num_groups, call.group_size, call.group_stride = (
                x.shape[0],
                x.shape[1],
                x.stride(0),
            )
        else:
            x = x.contiguous()
            call.num_groups, call.group_size, call.group_stride = x.numel() // size, 1, size
        call.dtype, call.x, call.out = DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr()
        return x


def kernel_gate(kernels: Kernels, name: Activation, is_gated: bool = True) -> Gate:
    """Return the activation by the C++ kernels."""
    call = GateCall(kind=GATE_CODES[name], is_gated=is_gated)
    gate, reference = kernels.gate, ctypes.byref(call)
    num_parts = 2 if is_gated else 1

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // num_parts)
        call.dtype = DTYPE_CODES[gate_up.dtype]
        call.num_rows, call.size = out.shape
        call.x, call.out = gate_up.data_ptr(), out.data_ptr()
        gate(reference)
        return out

    return activate
