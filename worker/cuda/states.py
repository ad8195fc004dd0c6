"""The states of recurrent layers on a GPU: plans of steps at addresses that graphs read.

The device holds the positions in the slots, so it computes itself how many logged tokens a sequence
computes again. Nothing of it is read back: a state that was loaded from a medium, or copied from
another slot, brings its position.

A plan is one array, int32, that is copied to the device in one go. Graphs read it from memory of
their own, as long as that of a step with as many sequences as rows, of one token each:

    sequences   | 1 | 2 + draft of 2 | 3 |            5 tokens of 3 sequences
    graph of 8  [ 1 ][ 2 ][ 3 ][ - ][ - ][ - ][ - ][ - ]   sequences; the last have no tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention.backend import AttentionInputs, QuerySplit, Rotation
from worker.attention.kv_cache import StateShape, Zeros
from worker.attention.state_cache import StateCache, StatePlan, plan_states
from worker.cuda.accelerator import Accelerator
from worker.cuda.transfers import QueuedTransfers


@dataclass(frozen=True, slots=True)
class StateStep:
    """The plan of a step on the device, int32; S sequences, T tokens, at most T writes.

    query_start, sources, write_start, write_bases, write_ends, write_slots, positions: as in
    StatePlan. computed: [S], tokens of each sequence before the step. again: [S], logged tokens
    that it computes again. owners: [T], the sequence of each token, -1 for none.
    """

    query_start: torch.Tensor
    sources: torch.Tensor
    computed: torch.Tensor
    again: torch.Tensor
    owners: torch.Tensor
    write_start: torch.Tensor
    write_bases: torch.Tensor
    write_ends: torch.Tensor
    write_slots: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def sizes(num_seqs: int, num_tokens: int) -> list[int]:
        """Return the numbers of each array, in their order."""
        return [num_seqs + 1, *[num_seqs] * 3, num_tokens, num_seqs + 1, *[num_tokens] * 4]

    @staticmethod
    def view(flat: torch.Tensor, sizes: Sequence[int]) -> "StateStep":
        """Return the arrays of these sizes in the array of `flat_plan`."""
        parts = flat.split_with_sizes(list(map(_aligned, sizes)))
        return StateStep(*(part[:size] for part, size in zip(parts, sizes, strict=True)))

    @property
    def num_seqs(self) -> int:
        return len(self.sources)

    @property
    def num_tokens(self) -> int:
        return len(self.owners)


class CudaStates(StateCache):
    """States whose plans are on the device; see StateCache.

    step: the plan of the current step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        shape: StateShape,
        num_slots: int,
        block_size: int,
        zeros: Zeros,
    ) -> None:
        super().__init__(shape, num_slots, block_size, zeros)
        self._accelerator = accelerator
        self._transfers = QueuedTransfers(accelerator)
        self._fixed = accelerator.zeros(0, torch.int32)
        self.step: StateStep | None = None

    def reserve_graphs(self, num_rows: int) -> None:
        """Take fixed memory for the plans of graphs, of the largest of which these are the rows."""
        size = sum(map(_aligned, StateStep.sizes(num_rows, num_rows)))
        self._fixed = self._accelerator.zeros(size, torch.int32)

    def plan_step(self, inputs: AttentionInputs) -> None:
        self._send(inputs, inputs.num_seqs, inputs.num_tokens, is_fixed=False)

    def plan_graph(self, inputs: AttentionInputs, num_rows: int) -> None:
        """Plan a step for the graph of this size."""
        self._send(inputs, num_rows, num_rows, is_fixed=True)

    def _send(
        self, inputs: AttentionInputs, num_seqs: int, num_tokens: int, *, is_fixed: bool
    ) -> None:
        """Queue the copy of a step's plan, with room for these numbers of sequences and tokens."""
        sizes = StateStep.sizes(num_seqs, num_tokens)
        plan = plan_states(inputs, self.block_size)
        (flat,) = self._transfers.to_device([flat_plan(plan, inputs, sizes)])
        if is_fixed:
            flat = self._fixed[: len(flat)].copy_(flat)
        self.step = StateStep.view(flat, sizes)
        if self.shape.max_logged:
            self._begin(self.step)
        else:
            assert inputs.num_drafts is None or not inputs.num_drafts.any(), "states have no log"

    def _begin(self, step: StateStep) -> None:
        """Queue the kernel that reads the positions of sources and writes those of slots."""
        from worker.cuda.kernels.recurrence import begin_sequence

        positions = self.buffer.view(torch.int32)[:, -1]
        begin_sequence[(step.num_seqs,)](
            positions,
            self.buffer.stride(0),
            step.sources,
            step.computed,
            step.again,
            step.write_start,
            step.write_slots,
            step.positions,
            num_warps=1,
        )


def flat_plan(plan: StatePlan, inputs: AttentionInputs, sizes: Sequence[int]) -> NDArray[np.int32]:
    """Return the arrays of StateStep, of these sizes, one after the other at aligned addresses.

    Kernels are compiled for addresses that are aligned, and for others: those of no array may
    depend on the step. Added sequences have no tokens, no source and no writes; added tokens have
    no sequence.
    """
    counts = np.diff(plan.query_start)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    given: tuple[tuple[NDArray[np.int32], int], ...] = (
        (plan.query_start, plan.query_start[-1]),
        (plan.sources, -1),
        (inputs.seq_lens - counts, 0),
        (np.zeros_like(counts), 0),
        (owners, -1),
        (plan.write_start, plan.write_start[-1]),
        (plan.write_bases, 0),
        (plan.write_ends, 0),
        (plan.write_slots, 0),
        (plan.positions, 0),
    )
    flat = np.empty(sum(map(_aligned, sizes)), dtype=np.int32)
    begin = 0
    for (array, padding), size in zip(given, sizes, strict=True):
        end = begin + _aligned(size)
        flat[begin : begin + len(array)] = array
        flat[begin + len(array) : end] = padding
        begin = end
    return flat


def _aligned(size: int) -> int:
    """Return the next multiple of 16 bytes, in numbers of 4."""
    return -(-size // 4) * 4


class NoAttention:
    """The backend of a model without attention, whose KV blocks no layer reads or writes.

    The tokens of a draft are decodes of its own group, so that graphs take steps that verify it.
    """

    query_split = QuerySplit.DRAFTS

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        """Prepare nothing."""

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise AssertionError("no layer attends")
