"""RMSNorm (Zhang and Sennrich, 2019), in torch, in C++ (csrc/layers/norm.cpp) or on a GPU.

x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32 and rounded once.
"""

import ctypes
from typing import Protocol

import torch
import torch.nn.functional as F

from worker.kernels import DTYPE_CODES, Kernels, NormCall, RowNorm, row_kernels
from worker.layers.flashinfer_kernels import FlashInferNorm, usable_flashinfer
from worker.layers.scratch import Scratch
from worker.layers.triton_kernels import TritonNorm


class NormArithmetic(Protocol):
    """One implementation of RMSNorm, with its weight."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x as a new contiguous tensor of its shape and dtype."""
        ...

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        """Write the norm of contiguous x [N, size] to the memory of out, which has x's dtype."""
        ...

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [N, size] plus the norm of x, both contiguous, in residual's memory."""
        ...


class RMSNorm:
    """An RMSNorm with its weight [size].

    The weight may be wider than x: its precision then counts until the result is rounded.
    into and add_to are norm_into and add_norm of NormArithmetic.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.device = weight.device
        kernels = row_kernels() if self.device.type == "cpu" else None
        arithmetic: NormArithmetic
        if self.device.type == "cuda":
            library = usable_flashinfer()
            arithmetic = TritonNorm(weight, eps)
            if library is not None:
                arithmetic = FlashInferNorm(library, weight, eps, arithmetic)
        elif kernels is None:
            arithmetic = TorchNorm(weight, eps)
        else:
            arithmetic = KernelNorm(kernels, weight, eps)
        self.arithmetic = arithmetic
        self.into = arithmetic.norm_into
        self.add_to = arithmetic.add_norm
        self._norm = arithmetic.norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)


class TorchNorm:
    """RMSNorm in plain torch."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._size = list(weight.shape)
        self._eps = eps

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self._weight.dtype)
        return F.rms_norm(wide, self._size, self._weight, self._eps).to(x.dtype).contiguous()

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        return out.tensor.copy_(self.norm(x))

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.norm(x))


class KernelNorm:
    """RMSNorm by the C++ kernels; float32, rounded once at the end."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float().contiguous()
        self._size = len(weight)
        fixed = {"size": self._size, "weight": self._weight.data_ptr(), "eps": eps}
        self._into, self._other = NormCall(**fixed), NormCall(**fixed)
        self._into_reference, self._other_reference = map(ctypes.byref, (self._into, self._other))
        self._rms_norm, self._add_rms_norm = kernels.rms_norm, kernels.add_rms_norm
        self._known: Scratch | None = None
        self.row_norm = RowNorm(fixed["weight"], eps)
        """As a `worker.kernels.RowNorm`; valid as long as this lives."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        x = self._describe(x, out)
        self._rms_norm(self._other_reference)
        return out

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        call = self._into
        if out is not self._known:
            self._known = out
            call.dtype = DTYPE_CODES[out.tensor.dtype]
            call.num_groups, call.group_size = out.num_rows, 1
            call.group_stride, call.out = self._size, out.address
        call.x = x.data_ptr()
        self._rms_norm(self._into_reference)
        return out.tensor

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert residual.is_contiguous()
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        x = self._describe(x, residual)
        self._add_rms_norm(self._other_reference)
        return residual

    def _describe(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill in the call for two tensors; return the tensor that must outlive the call."""
        call, size = self._other, self._size
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
