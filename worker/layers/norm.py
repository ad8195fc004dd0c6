"""RMSNorm (Zhang and Sennrich, 2019).

Owns the weight and, on a CPU with kernels, what csrc/layers/norm.cpp is told about it.
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
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """A new contiguous tensor of x's shape and dtype."""
        ...

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        """The same of contiguous x [N, size] in the memory of out, of x's dtype."""
        ...

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [N, size] plus the norm of x, both contiguous, in residual's memory."""
        ...


class RMSNorm:
    """A norm with its weight [size].

    The weight may be wider than x: its precision then counts until the result is rounded.
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
        """The norm of x, as a new contiguous tensor of its shape and dtype."""
        return self._norm(x)


class TorchNorm:
    """NormArithmetic without kernels."""

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
    """NormArithmetic on csrc/layers/norm.cpp, one rounding at the end."""

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
        """Prepare the call for one pair of tensors; returns what must live as long as it runs."""
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
