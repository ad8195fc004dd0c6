"""Norms over the last dimension, in torch, in C++ (csrc/layers/norm.cpp) or on a GPU.

    RMSNorm     x / sqrt(mean(x²) + eps) * weight                 (Zhang and Sennrich, 2019)
    LayerNorm   the same of x - mean(x), plus a bias if there is one          (Ba et al., 2016)

Computed in float32 and rounded once.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker.kernel_structures import NormCall, RowNorm
from worker.kernels import DTYPE_CODES, Kernels, row_kernels
from worker.layers.flashinfer_kernels import FlashInferNorm, usable_flashinfer
from worker.layers.scratch import Scratch
from worker.layers.triton_kernels import TritonNorm


class NormArithmetic(Protocol):
    """One implementation of a norm, with its weight."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x as a new contiguous tensor of its shape and dtype."""
        ...

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        """Write the norm of contiguous x [N, size] to the memory of out, which has x's dtype."""
        ...

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [N, size] plus the norm of x, both contiguous, in residual's memory."""
        ...


@dataclass(frozen=True, slots=True)
class NormWeight:
    """What a norm multiplies by and adds: weight [size], bias [size] or None.

    The weight may be wider than the rows: its precision then counts until the result is rounded.
    is_centered: LayerNorm instead of RMSNorm. Only a LayerNorm has a bias.
    """

    weight: torch.Tensor
    eps: float
    is_centered: bool = False
    bias: torch.Tensor | None = None


class Norm:
    """An RMSNorm or LayerNorm; into and add_to are norm_into and add_norm of NormArithmetic."""

    def __init__(self, weight: NormWeight) -> None:
        device = weight.weight.device
        kernels = row_kernels() if device.type == "cpu" else None
        arithmetic: NormArithmetic
        if device.type == "cuda":
            library = usable_flashinfer()
            arithmetic = TritonNorm(weight)
            if library is not None and not weight.is_centered:
                arithmetic = FlashInferNorm(library, weight.weight, weight.eps, arithmetic)
        elif kernels is None:
            arithmetic = TorchNorm(weight)
        else:
            arithmetic = KernelNorm(kernels, weight)
        self.arithmetic = arithmetic
        self.into = arithmetic.norm_into
        self.add_to = arithmetic.add_norm
        self._norm = arithmetic.norm
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)

    def with_mean_square(self, x: torch.Tensor, mean_square: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of x [..., size], a part of wider rows of which the mean is given."""
        scale = torch.rsqrt(mean_square + self._weight.eps)
        return (x.float() * scale * self._weight.weight).to(x.dtype)


class TorchNorm:
    """A norm in plain torch."""

    def __init__(self, weight: NormWeight) -> None:
        self._weight = weight
        self._size = list(weight.weight.shape)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        own = self._weight
        wide = x.to(own.weight.dtype)
        if own.is_centered:
            normed = F.layer_norm(wide, self._size, own.weight, own.bias, own.eps)
        else:
            normed = F.rms_norm(wide, self._size, own.weight, own.eps)
        return normed.to(x.dtype).contiguous()

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        return out.tensor.copy_(self.norm(x))

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.norm(x))


class KernelNorm:
    """A norm by the C++ kernels; float32, rounded once at the end."""

    def __init__(self, kernels: Kernels, weight: NormWeight) -> None:
        self._weight = weight.weight.float().contiguous()
        self._bias = None if weight.bias is None else weight.bias.float().contiguous()
        self._size = len(self._weight)
        self.row_norm = RowNorm(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            eps=weight.eps,
            is_centered=weight.is_centered,
        )
        """The norm as a structure for C; valid as long as this object lives."""
        self._into, self._other = (NormCall(size=self._size, norm=self.row_norm) for _ in range(2))
        self._into_reference, self._other_reference = map(ctypes.byref, (self._into, self._other))
        self._norm, self._add_norm = kernels.norm, kernels.add_norm
        self._known: Scratch | None = None

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        x = self._describe(x, out)
        self._norm(self._other_reference)
        return out

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        call = self._into
        if out is not self._known:
            self._known = out
            call.dtype = DTYPE_CODES[out.tensor.dtype]
            call.num_groups, call.group_size = out.num_rows, 1
            call.group_stride, call.out = self._size, out.address
        call.x = x.data_ptr()
        self._norm(self._into_reference)
        return out.tensor

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert residual.is_contiguous()
        assert (residual.shape, residual.dtype) == (x.shape, x.dtype)
        x = self._describe(x, residual)
        self._add_norm(self._other_reference)
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
