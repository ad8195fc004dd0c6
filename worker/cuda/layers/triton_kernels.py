"""Norm and gate by Triton kernels, for weights on a GPU.

Each is one launch where torch needs several; sums are float32 and are rounded once, as in the
kernels for CPUs.
"""

import torch

from worker.layers.activation import Activation, Gate
from worker.layers.norm import Norm, NormWeight

_GATE_BLOCK = 1024


class TritonNorm(Norm):
    """A norm as a Triton kernel; rows of up to 65,536 elements."""

    def __init__(self, weight: NormWeight) -> None:
        super().__init__(weight)
        self._weight = weight.weight.contiguous()
        self._bias = weight.bias
        self._eps = weight.eps
        self._is_centered = weight.is_layer_norm
        self._block = 1 << (len(self._weight) - 1).bit_length()
        from worker.cuda.kernels.rows import norm_row

        self._kernel = norm_row

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., size]; rows of x may be a stride apart."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, out, out, False)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
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
        self._kernel[(x.numel() // size,)](
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


def triton_gate(name: Activation, is_gated: bool = True) -> Gate:
    """Return the activation of an MLP as a Triton kernel."""
    from worker.cuda.kernels.rows import gate_row

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, size = len(gate_up), gate_up.shape[1] // (2 if is_gated else 1)
        out = gate_up.new_empty(num_rows, size)
        gate_row[(num_rows, -(-size // _GATE_BLOCK))](
            gate_up,
            out,
            size,
            activation=name,
            gated=is_gated,
            block=_GATE_BLOCK,
        )
        return out

    return activate
