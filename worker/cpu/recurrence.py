"""Recurrent layers by the C++ kernels (csrc/layers/recurrence.h)."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from worker.attention.state_cache import StateCache
from worker.cpu.kernel_structures import (
    DeltaRuleStructure,
    Mamba2Structure,
    RecurrenceRun,
    ShortConvStructure,
)
from worker.cpu.kernels import DTYPE_CODES, Kernels
from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.layers.recurrence import Recurrence
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights


def describe_run(
    states: StateCache, layer: int, inputs: Sequence[torch.Tensor], out: torch.Tensor
) -> RecurrenceRun:
    """Return the planned step of a layer for a kernel, but for its scratch memory.

    inputs: one or two projections of the same dtype, whose rows may be a stride apart. The result
    has addresses of the arguments.
    """
    plan, of_layer = states.plan, states.of_layer(layer)
    assert plan is not None
    rows, gates = inputs[0], inputs[-1]
    assert plan.query_start[-1] == len(rows) == len(gates)
    assert gates.dtype == rows.dtype
    assert rows.stride(1) == gates.stride(1) == of_layer.stride(1) == 1
    return RecurrenceRun(
        dtype=DTYPE_CODES[rows.dtype],
        num_seqs=len(plan.sources),
        num_tokens=len(rows),
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
        out=out.data_ptr(),
    )


class KernelDeltaRule:
    """Gated delta-rule layers by the C++ kernel."""

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
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        rows, gates = inputs
        shape = self._shape
        assert rows.shape[1] == shape.num_inputs
        assert gates.shape[1] == 2 * shape.num_value_heads
        assert states.of_layer(layer).shape[1] == shape.state_floats
        out = rows.new_empty(len(rows), shape.values)
        run = describe_run(states, layer, inputs, out)
        run.scratch = memory.address(self._kernels.delta_bytes(self._layer, len(rows)))
        self._kernels.delta_run(ctypes.byref(self._layer), ctypes.byref(run))
        return out


_GATE_NORM_CODES: Final = {"norm of gated": 0, "gated norm": 1, "none": 2}
"""TokendGateNorm of csrc/layers/mamba2.h."""


class KernelMamba2:
    """Mamba-2 layers by the C++ kernel."""

    def __init__(self, kernels: Kernels, shape: Mamba2Shape, weights: Mamba2Weights) -> None:
        self._kernels = kernels
        self._shape = shape
        self._weights = weights  # the kernel has addresses of these
        self._layer = Mamba2Structure(
            num_heads=shape.num_heads,
            head_size=shape.head_size,
            num_groups=shape.num_groups,
            state_size=shape.state_size,
            num_taps=shape.num_taps,
            gate_norm=_GATE_NORM_CODES[shape.gate_norm],
            has_wide_output=shape.has_wide_output,
            taps=weights.taps.data_ptr(),
            conv_bias=weights.conv_bias.data_ptr(),
            decay=weights.decay.data_ptr(),
            time_bias=weights.time_bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            norm=None if weights.norm is None else weights.norm.data_ptr(),
            norm_eps=weights.norm_eps,
            gate_factor=weights.gate_factor,
            time_factor=weights.time_factor,
        )
        assert kernels.mamba2_state(self._layer) == shape.state_floats

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        (rows,) = inputs
        shape = self._shape
        assert rows.shape[1] == shape.num_inputs
        assert states.of_layer(layer).shape[1] == shape.state_floats
        dtype = torch.float32 if shape.has_wide_output else rows.dtype
        out = rows.new_empty((len(rows), shape.inner), dtype=dtype)
        run = describe_run(states, layer, inputs, out)
        run.scratch = memory.address(self._kernels.mamba2_bytes(self._layer, len(rows)))
        self._kernels.mamba2_run(ctypes.byref(self._layer), ctypes.byref(run))
        return out


class KernelShortConv:
    """Gated short convolutions by the C++ kernel."""

    def __init__(self, kernels: Kernels, shape: ShortConvShape, weights: ShortConvWeights) -> None:
        self._kernels = kernels
        self._shape = shape
        self._weights = weights  # the kernel has addresses of these
        self._layer = ShortConvStructure(
            channels=shape.channels,
            num_taps=shape.num_taps,
            taps=weights.taps.data_ptr(),
            bias=weights.bias.data_ptr(),
        )

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        (rows,) = inputs
        shape = self._shape
        assert rows.shape[1] == shape.num_inputs
        assert states.of_layer(layer).shape[1] == shape.state_floats
        out = rows.new_empty(len(rows), shape.channels)
        run = describe_run(states, layer, inputs, out)
        run.scratch = memory.address(self._kernels.short_conv_bytes(self._layer, len(rows)))
        self._kernels.short_conv_run(ctypes.byref(self._layer), ctypes.byref(run))
        return out


KERNEL_RECURRENCES: Final[Mapping[type[Any], Callable[[Kernels, Any, Any], Recurrence]]] = {
    DeltaRuleShape: KernelDeltaRule,
    Mamba2Shape: KernelMamba2,
    ShortConvShape: KernelShortConv,
}
"""What makes the implementation of a kind."""
