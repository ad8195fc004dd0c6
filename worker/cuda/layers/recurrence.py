"""Recurrent layers on a GPU, by the kernels of kernels/recurrence.py.

A layer is a convolution of all tokens, a scan with a program for each sequence and part of a state,
gate and norm of each token, and the windows and logs that its slots get. Short convolutions have no
scan. The number of launches does not depend on the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

from worker.attention.state_cache import StateCache
from worker.cuda.states import CudaStates, StateStep
from worker.layers.delta_rule import DeltaRuleShape, DeltaRuleWeights
from worker.layers.mamba2 import Mamba2Shape, Mamba2Weights
from worker.layers.recurrence import TILE, Recurrences, RecurrenceShape
from worker.layers.scratch import ByteBuffer
from worker.layers.short_conv import ShortConvShape, ShortConvWeights

_CHANNELS: Final = 256
"""Channels of a convolution that a program computes."""
_COLUMNS: Final = 16
"""Columns of a state that a program of a scan has: of 128 rows they fit the registers of a warp."""
_SCAN_WARPS: Final = 1
"""Of a program of a scan: sums over the rows of a state then need no shared memory."""


def _block(size: int) -> int:
    """Return the power of two that is `size`, or the next one above."""
    return 1 << (size - 1).bit_length()


class TritonRecurrence(ABC):
    """What the kinds have in common: the convolution, and what slots keep of it.

    taps, bias: of the convolution. column: of its first input in the first projection of the input.
    factor_column: of what multiplies the inputs, or -1. matrix_floats, numbers: of a state's
    matrices, and of a token's gates in a log.
    """

    def __init__(
        self,
        shape: RecurrenceShape,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        column: int,
        factor_column: int = -1,
        matrix_floats: int,
        numbers: int,
    ) -> None:
        self.shape = shape
        self._taps = taps
        self._bias = bias
        self._column = column
        self._factor_column = factor_column
        self._inputs_at = matrix_floats
        self._numbers = numbers
        self._num_taps, self._channels = taps.shape

    def run(
        self, inputs: Sequence[torch.Tensor], states: StateCache, layer: int, memory: ByteBuffer
    ) -> torch.Tensor:
        assert isinstance(states, CudaStates)
        step, own = states.step, states.of_layer(layer)
        assert step is not None
        assert step.num_tokens == len(inputs[0])
        assert all(each.stride(1) == 1 for each in inputs)
        max_logged = states.shape.max_logged
        assert own.shape[1] == self.shape.state_floats + max_logged * self.shape.logged_floats
        out = inputs[0].new_empty(len(inputs[0]), self.shape.num_outputs, dtype=self._dtype(inputs))
        self._launch(inputs, step, own, max_logged, out)
        return out

    def _dtype(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        """Return the dtype of the output."""
        return inputs[0].dtype

    @abstractmethod
    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        out: torch.Tensor,
    ) -> None:
        """Queue the kernels of a step, which write `out` and the slots.

        states: of the layer in all slots, float32 [num_slots, its size].
        """

    def _gates_at(self, max_logged: int) -> int:
        """Return where the log of the gates begins in a slot."""
        return self._inputs_at + (self._num_taps - 1 + max_logged) * self._channels

    def _convolve(
        self,
        rows: torch.Tensor,
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        mixed: torch.Tensor,
        gate_column: int = -1,
    ) -> None:
        """Queue the convolution of all tokens, with those computed again if `mixed` has room.

        gate_column: of what multiplies it; -1 for silu.
        """
        from worker.cuda.kernels.recurrence import convolve

        has_again = len(mixed) > step.num_tokens
        programs = step.num_tokens + (step.num_seqs if has_again else 0)
        convolve[(programs, -(-self._channels // _CHANNELS))](
            rows,
            states,
            self._taps,
            self._taps if self._bias is None else self._bias,
            mixed,
            step.query_start,
            step.sources,
            step.again,
            step.owners,
            rows.stride(0),
            states.stride(0),
            self._inputs_at,
            self._column,
            self._factor_column,
            gate_column,
            self._channels,
            step.num_tokens,
            max_logged,
            taps=self._num_taps,
            biased=self._bias is not None,
            activated=gate_column < 0,
            multiplied=self._factor_column >= 0,
            block=_CHANNELS,
        )

    def _mixed(self, rows: torch.Tensor, step: StateStep, max_logged: int) -> torch.Tensor:
        """Return memory for the convolution of a step's tokens and of logged ones."""
        num_rows = step.num_tokens + step.num_seqs * max_logged
        return rows.new_empty(num_rows, self._channels, dtype=torch.float32)

    def _keep_inputs(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
    ) -> None:
        """Queue the windows and logs of slots. gates: [T, numbers], those that a log has."""
        from worker.cuda.kernels.recurrence import keep_inputs

        most = max(self._channels, self._numbers)
        keep_inputs[(step.num_seqs, -(-most // _CHANNELS))](
            rows,
            gates,
            states,
            step.query_start,
            step.sources,
            step.again,
            step.write_start,
            step.write_bases,
            step.write_ends,
            step.write_slots,
            rows.stride(0),
            gates.stride(0),
            states.stride(0),
            self._inputs_at,
            self._gates_at(max_logged),
            self._column,
            self._factor_column,
            self._channels,
            self._numbers,
            taps=self._num_taps,
            multiplied=self._factor_column >= 0,
            block=_CHANNELS,
        )


def _gate_and_norm(
    output: torch.Tensor,
    rows: torch.Tensor,
    step: StateStep,
    out: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    eps: float,
    num_groups: int,
    gate_column: int,
    gate_factor: float = 1.0,
    norm_first: bool,
    is_shared: bool = False,
) -> None:
    """Queue gate and norm of a scan's output. weight: None for no norm. is_shared: by groups."""
    from worker.cuda.kernels.recurrence import gate_and_norm

    width = output.shape[1] // num_groups
    gate_and_norm[(len(output), num_groups)](
        output,
        rows,
        output if weight is None else weight,
        step.owners,
        out,
        rows.stride(0),
        gate_column,
        gate_factor,
        width,
        0 if is_shared else width,
        eps,
        norm_first=norm_first,
        normed=weight is not None,
        block=_block(width),
    )


class TritonDeltaRule(TritonRecurrence):
    """Gated delta-rule layers."""

    def __init__(self, shape: DeltaRuleShape, weights: DeltaRuleWeights) -> None:
        super().__init__(
            shape,
            weights.taps,
            None,
            column=0,
            matrix_floats=shape.matrix_floats,
            numbers=2 * shape.num_value_heads,
        )
        self._sizes = shape
        self._weights = weights

    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        out: torch.Tensor,
    ) -> None:
        from worker.cuda.kernels.recurrence import scan_delta_rule

        (rows, gates), shape, weights = inputs, self._sizes, self._weights
        mixed = self._mixed(rows, step, max_logged)
        self._convolve(rows, step, states, max_logged, mixed)
        output = mixed.new_empty(len(rows), shape.values)
        parts = -(-shape.value_size // TILE) * (TILE // _COLUMNS)
        scan_delta_rule[(step.num_seqs, shape.num_value_heads * parts)](
            mixed,
            gates,
            states,
            weights.decay,
            weights.time_bias,
            output,
            step.query_start,
            step.sources,
            step.again,
            step.write_start,
            step.write_bases,
            step.write_slots,
            gates.stride(0),
            states.stride(0),
            self._gates_at(max_logged),
            shape.num_value_heads,
            shape.value_size,
            parts,
            shape.num_key_heads,
            shape.channels,
            shape.key_size**-0.5,
            step.num_tokens,
            max_logged,
            tiled=shape.is_tiled,
            key_size=shape.key_size,
            block_rows=_block(shape.key_size),
            block_columns=_COLUMNS,
            tile_columns=TILE,
            num_warps=_SCAN_WARPS,
        )
        _gate_and_norm(
            output,
            rows,
            step,
            out,
            weight=weights.norm,
            eps=weights.norm_eps,
            num_groups=shape.num_value_heads,
            gate_column=shape.channels,
            norm_first=True,
            is_shared=True,
        )
        self._keep_inputs(rows, gates, step, states, max_logged)


class TritonMamba2(TritonRecurrence):
    """Mamba-2 layers."""

    def __init__(self, shape: Mamba2Shape, weights: Mamba2Weights) -> None:
        super().__init__(
            shape,
            weights.taps,
            weights.conv_bias,
            column=shape.inner,
            matrix_floats=shape.matrix_floats,
            numbers=shape.num_heads,
        )
        self._sizes = shape
        self._weights = weights

    def _dtype(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        return torch.float32 if self._sizes.has_wide_output else inputs[0].dtype

    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        out: torch.Tensor,
    ) -> None:
        from worker.cuda.kernels.recurrence import scan_mamba2

        (rows,), shape, weights = inputs, self._sizes, self._weights
        times = rows[:, shape.inner + shape.channels :]
        mixed = self._mixed(rows, step, max_logged)
        self._convolve(rows, step, states, max_logged, mixed)
        output = mixed.new_empty(len(rows), shape.inner)
        parts = -(-shape.head_size // TILE) * (TILE // _COLUMNS)
        scan_mamba2[(step.num_seqs, shape.num_heads * parts)](
            mixed,
            times,
            states,
            weights.decay,
            weights.time_bias,
            weights.skip,
            output,
            step.query_start,
            step.sources,
            step.again,
            step.write_start,
            step.write_bases,
            step.write_slots,
            times.stride(0),
            states.stride(0),
            self._gates_at(max_logged),
            shape.num_heads,
            shape.head_size,
            parts,
            shape.num_heads // shape.num_groups,
            shape.num_groups,
            shape.channels,
            weights.time_factor,
            step.num_tokens,
            max_logged,
            state_size=shape.state_size,
            block_rows=_block(shape.state_size),
            block_columns=_COLUMNS,
            tile_columns=TILE,
            num_warps=_SCAN_WARPS,
        )
        _gate_and_norm(
            output,
            rows,
            step,
            out,
            weight=None if shape.gate_norm == "none" else weights.norm,
            eps=weights.norm_eps,
            num_groups=shape.num_groups,
            gate_column=0,
            gate_factor=weights.gate_factor,
            norm_first=shape.gate_norm == "gated norm",
        )
        self._keep_inputs(rows, times, step, states, max_logged)


class TritonShortConv(TritonRecurrence):
    """Gated short convolutions, of which a state has only the window."""

    def __init__(self, shape: ShortConvShape, weights: ShortConvWeights) -> None:
        super().__init__(
            shape,
            weights.taps,
            weights.bias,
            column=2 * shape.channels,
            factor_column=0,
            matrix_floats=0,
            numbers=0,
        )

    def _launch(
        self,
        inputs: Sequence[torch.Tensor],
        step: StateStep,
        states: torch.Tensor,
        max_logged: int,
        out: torch.Tensor,
    ) -> None:
        (rows,) = inputs
        self._convolve(rows, step, states, max_logged, out, gate_column=self._channels)
        self._keep_inputs(rows, rows, step, states, max_logged)


TRITON_RECURRENCES: Final[Recurrences] = {
    DeltaRuleShape: TritonDeltaRule,
    Mamba2Shape: TritonMamba2,
    ShortConvShape: TritonShortConv,
}
