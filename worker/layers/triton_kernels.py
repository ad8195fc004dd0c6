"""Norm and gate as Triton kernels, for weights on a GPU.

Each is one launch where torch needs several; sums are float32 and are rounded once, as in the
kernels for CPUs.
"""

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from worker.layers.scratch import Scratch

if TYPE_CHECKING:
    from worker.layers.activation import Activation
    from worker.layers.norm import NormWeight

_GATE_BLOCK = 1024


class TritonNorm:
    """A norm as a Triton kernel; rows of up to 65,536 elements."""

    def __init__(self, weight: "NormWeight") -> None:
        self._weight = weight.weight.contiguous()
        self._bias = weight.bias
        self._eps = weight.eps
        self._is_centered = weight.is_centered
        self._block = 1 << (len(self._weight) - 1).bit_length()
        self.kernel = _norm_kernel(os.environ.get("TRITON_INTERPRET"))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., size]; rows of x may be a stride apart."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, out, out, False)
        return out

    def norm_into(self, x: torch.Tensor, out: Scratch) -> torch.Tensor:
        self._launch(x, out.tensor, out.tensor, False)
        return out.tensor

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._launch(x, residual, residual, True)
        return residual

    def _launch(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, adds: bool
    ) -> None:
        size = len(self._weight)
        # [N, size] or [T, heads, size], heads one after the other
        heads = x.shape[1] if x.dim() == 3 else 1
        assert x.stride(-1) == 1
        assert heads == 1 or x.stride(1) == size
        self.kernel[(x.numel() // size,)](
            x,
            self._weight,
            self._weight if self._bias is None else self._bias,
            residual,
            out,
            x.stride(0),
            heads,
            size,
            self._eps,
            adds=adds,
            centered=self._is_centered,
            biased=self._bias is not None,
            block=self._block,
        )


class TritonGate:
    """The activation of an MLP as a Triton kernel."""

    def __init__(self, name: "Activation", is_gated: bool = True) -> None:
        self._name = name
        self._is_gated = is_gated
        self.kernel = _gate_kernel(os.environ.get("TRITON_INTERPRET"))

    def __call__(self, gate_up: torch.Tensor, out: Scratch) -> torch.Tensor:
        num_rows, size = out.tensor.shape
        self.kernel[(num_rows, -(-size // _GATE_BLOCK))](
            gate_up,
            out.tensor,
            size,
            gelu=self._name == "gelu_tanh",
            clamped=self._name == "swiglu_oai",
            gated=self._is_gated,
            block=_GATE_BLOCK,
        )
        return out.tensor


@functools.cache
def _norm_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel, one for all layers: Triton keeps compiled code with the function.

    interpreted: the value of TRITON_INTERPRET, which Triton reads when the function is made.
    """
    import triton
    import triton.language as tl

    # Triton reads the annotations too, and knows none but its own.
    def norm_row(  # type: ignore[no-untyped-def]
        x,
        weight,
        bias,
        residual,
        out,
        x_stride,
        heads,
        size,
        eps,
        adds: tl.constexpr,
        centered: tl.constexpr,
        biased: tl.constexpr,
        block: tl.constexpr,
    ):
        """Write the norm of a row to `out`, or its sum with the row of `residual` if `adds`.

        Grid: (rows,). x: [T, size], or [T, heads, size] with a row for each head; x_stride: between
        tokens. weight, bias: [size]. residual, out: [rows, size]. centered: the mean of the row is
        subtracted first. block: size or the next power of two above.
        """
        row = tl.program_id(0)
        column = tl.arange(0, block)
        inside = column < size
        begin = (row // heads).to(tl.int64) * x_stride + (row % heads) * size
        value = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if centered:
            value = tl.where(inside, value - tl.sum(value, 0) / size, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
        normed = value * scale * factor
        if biased:
            normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        to = row.to(tl.int64) * size + column
        if adds:
            normed += tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + to, normed.to(out.dtype.element_ty), mask=inside)

    return triton.jit(norm_row)


@functools.cache
def _gate_kernel(interpreted: str | None = None) -> Any:
    """Return the kernel of activations, one for all layers; interpreted: as in `_norm_kernel`."""
    import triton
    import triton.language as tl

    def gate_row(  # type: ignore[no-untyped-def]
        gate_up,
        out,
        size,
        gelu: tl.constexpr,
        clamped: tl.constexpr,
        gated: tl.constexpr,
        block: tl.constexpr,
    ):
        """Write the activation of a block of a row's columns to `out`.

        Grid: (rows, blocks). gate_up: [rows, 2 size], a row's gate and then its up half; [rows,
        size] if not `gated`. out: [rows, size]. The activation is gelu_tanh (`gelu`), swiglu_oai
        (`clamped`) or silu.
        """
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < size
        begin = gate_up + row * (2 if gated else 1) * size + column
        gate = tl.load(begin, mask=inside, other=0.0).to(tl.float32)
        if clamped:
            gate = tl.where(gate > 7.0, 7.0, gate)
            inner = gate * tl.sigmoid(1.702 * gate)
        elif gelu:
            # (1 + tanh z) / 2 is the sigmoid of 2 z
            inner = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            inner = gate * tl.sigmoid(gate)
        if gated:
            up = tl.load(begin + size, mask=inside, other=0.0).to(tl.float32)
            if clamped:
                up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
            inner *= up
        tl.store(out + row * size + column, inner.to(out.dtype.element_ty), mask=inside)

    return triton.jit(gate_row)
