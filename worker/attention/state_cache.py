"""The states of recurrent layers: one slot holds those of a sequence at one position.

    slot 5   | layer 0: matrices, window | layer 1: window | …        float32, one contiguous range

The block table of the state group says where a sequence has its state. Its entry for block i holds
the state after the last computed token of that block, and 0 stands for a state that is not kept. So
a step that computes the tokens [6, 14) with blocks of 4 tokens reads the state after token 5 and
writes those after tokens 7 and 13, but not the one after token 11:

    tokens   | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 … |
    table    |    0    |    9    |     0     |    7    |
                         ^ read, then written   ^ written

A sequence begins with zeros at position 0 and does not read its slot there.

Tokens of a draft may be rejected. So a slot never has the state after one: it has the state after
the last token before the draft, its base, and a log of what the draft's tokens gave the layers. The
next step computes the accepted ones again, without outputs, before its own tokens. Draft d:

    step        | x d d d |                slot: state after x, log d d d
    next step     accepted: d d | y d |    begins with the state after x, computes d d again, then y

The position of the base is in the slot, too: the number of tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from worker.attention.backend import AttentionBackend, AttentionInputs, Rotation, start_offsets
from worker.attention.kv_cache import StateShape, Zeros, lazy_zeros

STATE_DTYPE: Final = torch.float32
"""Dtype of states; those of fewer bits differ with the steps in which a sequence is computed."""
_NO_SOURCE: Final = -1


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Which slots the sequences of a step read and write.

    query_start: int32 [S + 1], where each sequence's tokens begin.
    token_start: int32 [S + 1], the same with the logged tokens that each computes again.
    sources: int32 [S], the slot with which a sequence begins; -1 for zeros.
    write_start: int32 [S + 1], where each sequence's writes begin.
    write_bases: int32 [W], tokens of the step before the base of each write. write_ends: int32 [W],
        before the end of its log. write_slots: int32 [W]. positions: int32 [W], tokens of the
        sequence before the base.
    """

    query_start: NDArray[np.int32]
    token_start: NDArray[np.int32]
    sources: NDArray[np.int32]
    write_start: NDArray[np.int32]
    write_bases: NDArray[np.int32]
    write_ends: NDArray[np.int32]
    write_slots: NDArray[np.int32]
    positions: NDArray[np.int32]


def plan_states(
    inputs: AttentionInputs, block_size: int, positions: NDArray[np.int32] | None = None
) -> StatePlan:
    """Return the plan of a step, given the inputs of the state group.

    positions: int32 [slots], of the base in each slot; None: no slot has a log.
    """
    start, ends, table = inputs.query_start, inputs.seq_lens, inputs.block_table
    rows = np.arange(len(ends))
    computed = ends - np.diff(start)
    sources = np.where(
        computed > 0, table[rows, np.maximum(computed - 1, 0) // block_size], _NO_SOURCE
    ).astype(np.int32)
    assert sources.all(), "a sequence goes on from a state that was not kept"
    token_start = start
    if positions is not None:
        repeated = np.where(sources >= 0, computed - positions[sources], 0)
        assert (repeated >= 0).all(), "a state is after the tokens of its sequence"
        token_start = start.copy()
        token_start[1:] += np.cumsum(repeated, dtype=np.int32)
    # The blocks in which a sequence computes tokens, and the tokens after which these end.
    first, last = computed // block_size, (ends - 1) // block_size
    counts = last - first + 1
    owners = np.repeat(rows, counts)
    begin = np.cumsum(counts) - counts
    blocks = np.arange(counts.sum()) - begin[owners] + first[owners]
    slots = table[owners, blocks]
    is_kept = (slots != 0) | (blocks == last[owners])
    reached = np.minimum((blocks + 1) * block_size, ends[owners])
    num_drafts = 0 if inputs.num_drafts is None else inputs.num_drafts
    bases = np.minimum(reached, (ends - num_drafts)[owners])
    first_tokens = start[owners] - computed[owners]
    write_start = start_offsets(np.add.reduceat(is_kept.astype(np.int32), begin))
    return StatePlan(
        start,
        token_start,
        sources,
        write_start,
        *(
            each[is_kept].astype(np.int32)
            for each in (bases + first_tokens, reached + first_tokens, slots, bases)
        ),
    )


class StateCache:
    """The states of all sequences of one worker.

    buffer: float32 [num_slots, floats of all layers and the position]; slot 0 is written by steps
        without sequences and never read.
    plan: of the current step.
    """

    def __init__(
        self,
        shape: StateShape,
        num_slots: int,
        block_size: int,
        zeros: Zeros = lazy_zeros,
    ) -> None:
        assert num_slots >= 2, "there is no slot beside the null slot"
        self.shape = shape
        self.block_size = block_size
        self.buffer = zeros((num_slots, shape.num_floats), STATE_DTYPE)
        self._layers = self.buffer[:, : sum(shape.layer_sizes)].split_with_sizes(
            shape.layer_sizes, 1
        )
        self.plan: StatePlan | None = None

    def plan_step(self, inputs: AttentionInputs) -> None:
        """Note which slots a step reads and writes; called once before its layers run."""
        positions: NDArray[np.int32] | None = None
        if self.shape.max_logged:
            positions = self.buffer.numpy()[:, -1:].view(np.int32)[:, 0]
        else:
            assert inputs.num_drafts is None or not inputs.num_drafts.any(), "states have no log"
        self.plan = plan = plan_states(inputs, self.block_size, positions)
        if positions is not None:
            positions[plan.write_slots] = plan.positions

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return the states of a layer in all slots, float32 [num_slots, its size]; a view."""
        return self._layers[layer]

    def block_rows(self) -> torch.Tensor:
        """View the states as uint8 [num_slots, slot_bytes]."""
        return self.buffer.view(torch.uint8)

    def copy_slots(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy slot sources[i] to slot copies[i]; no slot is in both."""
        for source, copy in zip(sources, copies, strict=True):
            self.buffer[copy].copy_(self.buffer[source])

    def populate(self) -> None:
        """Commit all memory now."""
        self.buffer.zero_()


class AttentionWithStates:
    """A backend for the layers with attention, and the states of the others.

    The state group is the last of a step's groups.
    """

    def __init__(self, attention: AttentionBackend, states: StateCache) -> None:
        self.attention = attention
        self.states = states
        self.query_split = attention.query_split

    def plan(self, inputs: Sequence[AttentionInputs]) -> None:
        *attention, states = inputs
        self.attention.plan(attention)
        self.states.plan_step(states)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        rotation: Rotation,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.attention.run(layer, query, key, value, rotation, sinks)
