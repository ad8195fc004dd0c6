"""Recurrent layers by the C++ kernels (csrc/layers/recurrence.h).

KernelRecurrence computes one layer; KernelStack passes its structure to the kernel of all layers,
with the same bits.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

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
from worker.layers.recurrence import Recurrence, RecurrenceShape
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights

if TYPE_CHECKING:
    from ctypes import _NamedFuncPointer


def describe_step(states: StateCache) -> RecurrenceRun:
    """Return what the layers of the planned step share: sequences, and the states of slot 0.

    The result has addresses of arrays of the plan.
    """
    plan = states.plan
    assert plan is not None
    return RecurrenceRun(
        num_seqs=len(plan.sources),
        query_start=plan.query_start.ctypes.data,
        token_start=plan.token_start.ctypes.data,
        sources=plan.sources.ctypes.data,
        write_start=plan.write_start.ctypes.data,
        write_bases=plan.write_bases.ctypes.data,
        write_ends=plan.write_ends.ctypes.data,
        write_slots=plan.write_slots.ctypes.data,
        states=states.buffer.data_ptr(),
        slot_stride=states.buffer.stride(0),
        max_logged=states.shape.max_logged,
    )


class KernelRecurrence:
    """One recurrent layer by the C++ kernel of its kind.

    structure: the layer as the kernel takes it, which has addresses of `weights`.
    num_bytes, kernel: of the kind, a TokendRecurrenceBytes and a TokendRecurrenceKernel.
    """

    def __init__(
        self,
        shape: RecurrenceShape,
        weights: object,
        structure: ctypes.Structure,
        num_bytes: "_NamedFuncPointer",
        kernel: "_NamedFuncPointer",
    ) -> None:
        self.structure = structure
        self.num_bytes = num_bytes
        self.kernel = kernel
        self._shape = shape
        self._weights = weights
        self._is_wide = isinstance(shape, Mamba2Shape) and shape.has_wide_output

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        rows, gates = inputs[0], inputs[-1]
        num_rows, shape = len(rows), self._shape
        assert states.plan is not None
        assert states.plan.query_start[-1] == num_rows == len(gates)
        assert [each.shape[1] for each in inputs] == list(shape.input_sizes)
        assert gates.dtype == rows.dtype
        assert rows.stride(1) == gates.stride(1) == 1
        own = states.of_layer(layer)
        max_logged = states.shape.max_logged
        assert own.shape[1] == shape.state_floats + max_logged * shape.logged_floats
        dtype = torch.float32 if self._is_wide else rows.dtype
        out = rows.new_empty((num_rows, shape.num_outputs), dtype=dtype)
        run, layer_address = describe_step(states), ctypes.addressof(self.structure)
        run.dtype, run.num_tokens = DTYPE_CODES[rows.dtype], num_rows
        run.rows, run.row_stride = rows.data_ptr(), rows.stride(0)
        run.gates, run.gate_stride = gates.data_ptr(), gates.stride(0)
        run.states, run.out = own.data_ptr(), out.data_ptr()
        num_tokens = int(states.plan.token_start[-1])
        run.scratch = memory.address(self.num_bytes(layer_address, num_tokens))
        self.kernel(layer_address, run)
        return out


def _delta_rule(
    kernels: Kernels, shape: DeltaRuleShape, weights: DeltaRuleWeights
) -> KernelRecurrence:
    structure = DeltaRuleStructure(
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
    assert kernels.delta_state(structure, 1) == shape.state_floats + shape.logged_floats
    return KernelRecurrence(shape, weights, structure, kernels.delta_bytes, kernels.delta_run)


_GATE_NORM_CODES: Final = {"norm of gated": 0, "gated norm": 1, "none": 2}
"""TokendGateNorm of csrc/layers/mamba2.h."""


def _mamba2(kernels: Kernels, shape: Mamba2Shape, weights: Mamba2Weights) -> KernelRecurrence:
    structure = Mamba2Structure(
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
    assert kernels.mamba2_state(structure, 1) == shape.state_floats + shape.logged_floats
    return KernelRecurrence(shape, weights, structure, kernels.mamba2_bytes, kernels.mamba2_run)


def _short_conv(
    kernels: Kernels, shape: ShortConvShape, weights: ShortConvWeights
) -> KernelRecurrence:
    structure = ShortConvStructure(
        channels=shape.channels,
        num_taps=shape.num_taps,
        taps=weights.taps.data_ptr(),
        bias=weights.bias.data_ptr(),
    )
    functions = kernels.short_conv_bytes, kernels.short_conv_run
    return KernelRecurrence(shape, weights, structure, *functions)


KERNEL_RECURRENCES: Final[Mapping[type[Any], Callable[[Kernels, Any, Any], Recurrence]]] = {
    DeltaRuleShape: _delta_rule,
    Mamba2Shape: _mamba2,
    ShortConvShape: _short_conv,
}
"""What makes the implementation of a kind."""
