"""Recurrent layers in plain torch, token after token."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F

from worker.attention.state_cache import StateCache
from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.layers.recurrence import TILE, Recurrences, RecurrenceShape
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights

_HEAD_EPS: Final = 1e-6


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def scan(
    states: StateCache,
    layer: int,
    inputs: torch.Tensor,
    gates: torch.Tensor,
    shape: RecurrenceShape,
    step: Step,
) -> torch.Tensor:
    """Return the outputs [T, ...] of all tokens of the planned step, in order.

    inputs: float32 [T, channels], of the convolution; gates: float32 [T, numbers]: what a log has
    of a token. step: takes both of a token and the state before it, float32 [state_floats], which
    it updates; returns the token's output. The states that the plan writes are copied to the cache.
    """
    plan, slots = states.plan, states.of_layer(layer)
    assert plan is not None
    size, max_logged = shape.state_floats, states.shape.max_logged
    sizes = [max_logged * inputs.shape[1], max_logged * gates.shape[1]]
    logs = slots[:, size:].split_with_sizes(sizes, 1)
    outputs = []
    for sequence, source in enumerate(plan.sources.tolist()):
        state = torch.zeros_like(slots[0, :size]) if source < 0 else slots[source, :size].clone()
        first, end = plan.query_start[sequence : sequence + 2].tolist()
        num_again = int(np.diff(plan.token_start)[sequence]) - (end - first)
        for index in range(num_again):
            logged, logged_gates = (log[source].view(max_logged, -1)[index] for log in logs)
            step(logged, logged_gates, state)
        before = {}
        for token in range(first, end):
            outputs.append(step(inputs[token], gates[token], state))
            before[token + 1] = state.clone()
        for write in range(*plan.write_start[sequence : sequence + 2].tolist()):
            slot, base = int(plan.write_slots[write]), int(plan.write_bases[write])
            slots[slot, :size] = before[base]
            for log, rows in zip(logs, (inputs, gates), strict=True):
                draft = rows[base : int(plan.write_ends[write])]
                log[slot, : draft.numel()] = draft.flatten()
    return torch.stack(outputs)


def convolve(
    window: torch.Tensor,
    row: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution [channels] of the inputs in the window and this token's, `row`.

    window: [num_taps - 1, channels], moves on by a token.
    """
    inputs = torch.cat((window, row[None]))
    window.copy_(inputs[1:])
    total = (inputs * taps).sum(0)
    return total if bias is None else total + bias


def product_with(matrices: torch.Tensor, heads: torch.Tensor, columns: int) -> torch.Tensor:
    """Return S^T h [heads, columns] of matrices [heads, tiles, rows, 32] and heads [heads, rows].

    columns: those of a matrix, which zeros pad to whole tiles.
    """
    return (matrices * heads[:, None, :, None]).sum(2).flatten(1)[:, :columns]


def in_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [heads, columns] as [heads, tiles, 1, 32], padded with zeros."""
    padded = F.pad(rows, (0, -rows.shape[1] % TILE))
    return padded.view(len(rows), -1, 1, TILE)


class TorchDeltaRule:
    """Gated delta-rule layers in plain torch; slow."""

    def __init__(self, shape: DeltaRuleShape, weights: DeltaRuleWeights) -> None:
        self._shape = shape
        self._weights = weights

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        shape = self._shape
        rows, gates = (each.float() for each in inputs)
        outputs = scan(states, layer, rows[:, : shape.channels], gates, shape, self._step)
        gate = rows[:, shape.channels :].view(outputs.shape)
        size = [shape.value_size]
        normed = F.rms_norm(outputs, size, self._weights.norm, self._weights.norm_eps)
        return (normed * F.silu(gate)).flatten(1).to(inputs[0].dtype)

    def _step(self, row: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the output [value heads, value_size] of a token; update its state.

        row: [channels]. gates: b ‖ a.
        """
        shape, weights = self._shape, self._weights
        matrices = state[: shape.matrix_floats]
        matrices = matrices.view(shape.num_value_heads, -1, shape.key_size, TILE)
        window = state[shape.matrix_floats :].view(shape.num_taps - 1, shape.channels)
        mixed = F.silu(convolve(window, row, weights.taps))
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
        seen = product_with(matrices, key, shape.value_size)
        correction = (value.view(seen.shape) - seen) * strength.sigmoid()[:, None]
        matrices += key[:, None, :, None] * in_tiles(correction)
        return product_with(matrices, query, shape.value_size)


class TorchMamba2:
    """Mamba-2 layers in plain torch; slow."""

    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights) -> None:
        self._shape = shape
        self._weights = weights

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        (projected,) = inputs
        shape = self._shape
        sizes = [shape.inner, shape.channels, shape.num_heads]
        gates, rows, times = projected.float().split_with_sizes(sizes, 1)
        outputs = scan(states, layer, rows, times, shape, self._step).flatten(1)
        # One by one: vectorised functions round the ends of their vectors otherwise.
        gated = torch.stack([self._gated(*each) for each in zip(outputs, gates, strict=True)])
        return gated if shape.has_wide_output else gated.to(projected.dtype)

    def _gated(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the output [inner] of a token with gate and norm."""
        kind = self._shape.gate_norm
        gate = F.silu(gate * self._weights.gate_factor)
        if kind == "gated norm":
            return self._normed(output) * gate
        return output * gate if kind == "none" else self._normed(output * gate)

    def _step(self, row: torch.Tensor, times: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the output [heads, head_size] of a token; update its state.

        row: [channels]. times: dt, [heads].
        """
        shape, weights = self._shape, self._weights
        matrices = state[: shape.matrix_floats]
        matrices = matrices.view(shape.num_heads, -1, shape.state_size, TILE)
        window = state[shape.matrix_floats :].view(shape.num_taps - 1, shape.channels)
        mixed = F.silu(convolve(window, row, weights.taps, weights.conv_bias))
        x, write, read = mixed.tensor_split([shape.inner, shape.inner + shape.group_states])
        x = x.view(shape.num_heads, shape.head_size)
        num_each = shape.num_heads // shape.num_groups
        write, read = (
            part.view(shape.num_groups, shape.state_size).repeat_interleave(num_each, 0)
            for part in (write, read)
        )
        times = F.softplus(times * weights.time_factor + weights.time_bias)
        matrices *= (weights.decay * times).exp()[:, None, None, None]
        matrices += write[:, None, :, None] * in_tiles(x * times[:, None])
        return product_with(matrices, read, shape.head_size) + weights.skip[:, None] * x

    def _normed(self, row: torch.Tensor) -> torch.Tensor:
        """Return the norm of a row [inner], group by group."""
        weights = self._weights
        assert weights.norm is not None
        groups = row.view(self._shape.num_groups, -1)
        normed = F.rms_norm(groups, [groups.shape[1]], eps=weights.norm_eps)
        return normed.flatten() * weights.norm


class TorchShortConv:
    """Gated short convolutions in plain torch; slow."""

    def __init__(self, shape: ShortConvShape, weights: ShortConvWeights) -> None:
        self._shape = shape
        self._weights = weights

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        (projected,) = inputs
        into, gates, rows = projected.float().chunk(3, 1)
        rows = into * rows

        def step(row: torch.Tensor, nothing: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            window = state.view(self._shape.num_taps - 1, self._shape.channels)
            return convolve(window, row, self._weights.taps, self._weights.bias)

        outputs = scan(states, layer, rows, rows[:, :0], self._shape, step)
        return (gates * outputs).to(projected.dtype)


RECURRENCES: Final[Recurrences] = {
    DeltaRuleShape: TorchDeltaRule,
    Mamba2Shape: TorchMamba2,
    ShortConvShape: TorchShortConv,
}
