"""Gated delta-rule layers between their projections (Yang et al., Gated Delta Networks, 2024).

    q, k, v = silu(causal depthwise convolution of q, k, v)      q, k: of length 1 in each head
    S = a S + k (b (v - a S^T k))^T                              a, b: of the token and value head
    output = RMSNorm(S^T q / sqrt(key size)) * silu(z)

In C++ (csrc/layers/delta_rule.cpp) or, on hosts without kernels, in torch. Both compute one token
after the other in float32, so results do not depend on how a sequence is cut into steps.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from worker.kernel_structures import DeltaRuleRun, DeltaRuleStructure
from worker.kernels import DTYPE_CODES, Kernels, row_kernels
from worker.layers.scratch import ByteBuffer
from worker.state_cache import StateCache

_TILE = 32
"""TOKEND_DELTA_TILE of csrc/layers/delta_rule.h."""
_HEAD_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaRuleShape:
    """Heads of a layer on one rank; n value heads read a key head.

    is_tiled: value head h reads key head h modulo num_key_heads, else heads h * n … h * n + n - 1
        read key head h.
    num_taps: tokens that the convolution sees, the current one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int
    is_tiled: bool = False

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def num_inputs(self) -> int:
        """Columns of the projections q ‖ k ‖ v ‖ z; b ‖ a have two for each value head."""
        return self.channels + self.values

    @property
    def matrix_floats(self) -> int:
        """Floats of the matrices in a state: [value heads, column tiles, key_size, 32]."""
        return self.num_value_heads * -(-self.value_size // _TILE) * self.key_size * _TILE

    @property
    def state_floats(self) -> int:
        """Floats of a state: the matrices, and the window [num_taps - 1, channels]."""
        return self.matrix_floats + (self.num_taps - 1) * self.channels

    @property
    def scratch_floats(self) -> int:
        """Floats of memory that a token takes while a layer runs."""
        return self.channels + 3 * self.num_value_heads

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the update of the matrices, and of the two products with them."""
        return 8 * self.num_value_heads * self.key_size * self.value_size


@dataclass(frozen=True, slots=True)
class DeltaRuleWeights:
    """Weights of a layer that are in no product; float32, contiguous.

    taps: [num_taps, channels], the oldest token first. decay: [num_value_heads], negative.
    time_bias: [num_value_heads]. norm: [value_size].
    """

    taps: torch.Tensor
    decay: torch.Tensor
    time_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float


class DeltaRule(Protocol):
    """One implementation, with the weights of a layer."""

    def run(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        states: StateCache,
        layer: int,
        memory: ByteBuffer,
    ) -> torch.Tensor:
        """Return the output [T, values] of q ‖ k ‖ v ‖ z and b ‖ a, of their dtype.

        rows: [T, num_inputs]. gates: [T, 2 * num_value_heads]. layer: its number among those with
        states. Reads and writes the states of the planned step.
        """
        ...


def make_delta_rule(shape: DeltaRuleShape, weights: DeltaRuleWeights) -> DeltaRule:
    """Return the fastest implementation on this CPU."""
    kernels = row_kernels()
    if kernels is None:
        return TorchDeltaRule(shape, weights)
    return KernelDeltaRule(kernels, shape, weights)


class KernelDeltaRule:
    """By the C++ kernel."""

    def __init__(self, kernels: Kernels, shape: DeltaRuleShape, weights: DeltaRuleWeights) -> None:
        self._kernels = kernels
        self._shape = shape
        self._weights = weights  # the kernel has addresses of these
        self._layer = DeltaRuleStructure(
            num_key_heads=shape.num_key_heads,
            num_value_heads=shape.num_value_heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            is_tiled=shape.is_tiled,
            num_taps=shape.num_taps,
            taps=weights.taps.data_ptr(),
            decay=weights.decay.data_ptr(),
            time_bias=weights.time_bias.data_ptr(),
            norm=weights.norm.data_ptr(),
            norm_eps=weights.norm_eps,
        )
        assert kernels.delta_state(self._layer) == shape.state_floats

    def run(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        states: StateCache,
        layer: int,
        memory: ByteBuffer,
    ) -> torch.Tensor:
        plan, num_tokens = states.plan, len(rows)
        assert plan is not None
        assert plan.query_start[-1] == num_tokens
        assert rows.shape[1] == self._shape.num_inputs
        assert gates.shape == (num_tokens, 2 * self._shape.num_value_heads)
        assert gates.dtype == rows.dtype
        assert rows.stride(1) == gates.stride(1) == 1
        of_layer = states.buffer[:, layer]
        assert of_layer.shape[1] == self._shape.state_floats
        out = rows.new_empty(num_tokens, self._shape.values)
        run = DeltaRuleRun(
            dtype=DTYPE_CODES[rows.dtype],
            num_seqs=len(plan.sources),
            num_tokens=num_tokens,
            row_stride=rows.stride(0),
            gate_stride=gates.stride(0),
            rows=rows.data_ptr(),
            gates=gates.data_ptr(),
            query_start=plan.query_start.ctypes.data,
            sources=plan.sources.ctypes.data,
            write_start=plan.write_start.ctypes.data,
            write_ends=plan.write_ends.ctypes.data,
            write_slots=plan.write_slots.ctypes.data,
            states=of_layer.data_ptr(),
            slot_stride=of_layer.stride(0),
            scratch=memory.address(self._kernels.delta_bytes(self._layer, num_tokens)),
            out=out.data_ptr(),
        )
        self._kernels.delta_run(ctypes.byref(self._layer), ctypes.byref(run))
        return out


class TorchDeltaRule:
    """In plain torch; slow."""

    def __init__(self, shape: DeltaRuleShape, weights: DeltaRuleWeights) -> None:
        self._shape = shape
        self._weights = weights

    def run(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        states: StateCache,
        layer: int,
        memory: ByteBuffer,
    ) -> torch.Tensor:
        plan, shape = states.plan, self._shape
        assert plan is not None
        wide, wide_gates = rows.float(), gates.float()
        outputs = wide.new_empty(len(rows), shape.num_value_heads, shape.value_size)
        for sequence, source in enumerate(plan.sources.tolist()):
            start = int(plan.query_start[sequence])
            matrices, window = self._parts(states.buffer[source, layer])
            if source < 0:
                matrices, window = torch.zeros_like(matrices), torch.zeros_like(window)
            matrices, window = matrices.clone(), window.clone()
            first, last = plan.write_start[sequence : sequence + 2].tolist()
            for write in range(first, last):
                end = int(plan.write_ends[write])
                for token in range(start, end):
                    outputs[token] = self._step(wide[token], wide_gates[token], matrices, window)
                start = end
                written = self._parts(states.buffer[int(plan.write_slots[write]), layer])
                for to, part in zip(written, (matrices, window), strict=True):
                    to.copy_(part)
        gate = wide[:, shape.channels :].view(outputs.shape)
        size = [shape.value_size]
        normed = F.rms_norm(outputs, size, self._weights.norm, self._weights.norm_eps)
        return (normed * F.silu(gate)).flatten(1).to(rows.dtype)

    def _parts(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices [value heads, column tiles, key_size, 32] and the window of a state.

        Views.
        """
        shape = self._shape
        matrices, window = state[: shape.matrix_floats], state[shape.matrix_floats :]
        return (
            matrices.view(shape.num_value_heads, -1, shape.key_size, _TILE),
            window.view(shape.num_taps - 1, shape.channels),
        )

    def _step(
        self,
        row: torch.Tensor,
        gates: torch.Tensor,
        matrices: torch.Tensor,
        window: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output [value heads, value_size] of a token; update its state."""
        shape, weights = self._shape, self._weights
        inputs = torch.cat((window, row[None, : shape.channels]))
        window.copy_(inputs[1:])
        mixed = F.silu((inputs * weights.taps).sum(0))
        query, key, value = mixed.tensor_split([shape.keys, 2 * shape.keys])
        num_each = shape.num_value_heads // shape.num_key_heads
        query, key = (part.view(shape.num_key_heads, shape.key_size) for part in (query, key))
        query, key = (
            part.repeat(num_each, 1) if shape.is_tiled else part.repeat_interleave(num_each, 0)
            for part in (query, key)
        )
        query = query * torch.rsqrt(query.square().sum(1, keepdim=True) + _HEAD_EPS)
        query = query * shape.key_size**-0.5
        key = key * torch.rsqrt(key.square().sum(1, keepdim=True) + _HEAD_EPS)
        strength, time = gates.view(2, -1)
        decay = (weights.decay * F.softplus(time + weights.time_bias)).exp()
        matrices *= decay[:, None, None, None]
        seen = self._product(matrices, key)
        correction = (value.view(seen.shape) - seen) * strength.sigmoid()[:, None]
        padding = matrices.shape[1] * _TILE - shape.value_size
        columns = F.pad(correction, (0, padding)).view(shape.num_value_heads, -1, 1, _TILE)
        matrices += key[:, None, :, None] * columns
        return self._product(matrices, query)

    def _product(self, matrices: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Return S^T h [value heads, value_size] of heads [value heads, key_size]."""
        products = (matrices * heads[:, None, :, None]).sum(2)
        return products.flatten(1)[:, : self._shape.value_size]
