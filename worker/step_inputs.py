"""The arrays of one step, and its sampled positions.

    sequence       0          1     2
    tokens       | 0 1 2 3 4 | 5 | 6 7 8 |     query_start = [0 5 6 9]
    positions      0 1 2 3 4   17  32 33 34    num_computed = [0 17 32]
    seq_lens       5           18  35
    sampled              (4)  (5)   -          sample_start = [0 1 2 2], sample_tokens = [4 5]

input_batch.py builds them. `sample_last_tokens` turns a number of sampled positions for each
sequence into these arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proto.scheduler_output import SchedulerOutput
from worker.attention.base import AttentionInputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step, for model and sampler; T tokens, S sequences, N sampled positions.

    A sampled position is a token whose logits give the next token. A sequence has any number of
    them, in order; today 0 or 1.

    token_ids, positions: int64 [T].
    rows: int64 [S], rows of the sequences.
    query_start: int32 [S + 1], where each sequence's tokens begin.
    seq_lens: int32 [S], tokens of each sequence once the step is computed.
    num_computed: int32 [S], tokens computed before the step.
    sample_start: int32 [S + 1], where each sequence's sampled positions begin.
    sample_tokens: int64 [N], index on the token axis of each sampled position.
    attention: of each KV cache group; they differ in their block tables and slots.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    sample_start: NDArray[np.int32]
    sample_tokens: NDArray[np.int64]
    attention: tuple[AttentionInputs, ...]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one token in this step."""
        return len(self.token_ids) == len(self.rows)

    @property
    def samples_every_token(self) -> bool:
        """Whether the logits of all tokens are needed."""
        return len(self.sample_tokens) == len(self.token_ids)

    def sampled_sequences(self) -> NDArray[np.int64]:
        """Return the index of the sequence of each sampled position, int64 [N]."""
        num_sampled = self.sample_start[1:] - self.sample_start[:-1]
        return np.arange(len(num_sampled)).repeat(num_sampled)

    def sampled_hidden(self, hidden: torch.Tensor, sample_tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [N, H] of the sampled positions, out of hidden [T, H].

        sample_tokens: those of the inputs, on the device of the hidden states.
        """
        return hidden if self.samples_every_token else hidden.index_select(0, sample_tokens)


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """The N sampled positions of a step, or a subset, with the facts that sampling needs.

    sequences: int64 [N], index of the sequence in the step. rows: int64 [N]. seq_ids: [N].
    output_index: int32 [N], index of the output token that is sampled there, 0 for the first.
    drafts: index in [0, N) → tokens of the step that precede this position and are not yet among
        the known tokens of the row. Empty while each row has at most one sampled position.
    """

    sequences: NDArray[np.int64]
    rows: NDArray[np.int64]
    seq_ids: list[int]
    output_index: NDArray[np.int32]
    drafts: Mapping[int, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, chosen: NDArray[np.bool_]) -> SampledPositions:
        """Return the positions where `chosen`, bool [N], is True."""
        indices = chosen.nonzero()[0].tolist()
        return SampledPositions(
            self.sequences[chosen],
            self.rows[chosen],
            [self.seq_ids[index] for index in indices],
            self.output_index[chosen],
            {new: self.drafts[old] for new, old in enumerate(indices) if old in self.drafts},
        )

    def last_of_rows(self) -> NDArray[np.int64] | None:
        """Return the index of each row's last position; None if no row has several.

        Positions of a row stand side by side.
        """
        if not self.drafts:
            return None
        is_last = np.append(self.sequences[1:] != self.sequences[:-1], [True])
        return is_last.nonzero()[0]


def decodes_first(step: SchedulerOutput) -> NDArray[np.int64]:
    """Return an order of the step's sequences, int64 [S]: those with one token come first."""
    counts = [request.num_scheduled_tokens for request in step.new_requests]
    counts += step.cached_requests.num_scheduled_tokens
    return np.argsort(np.array(counts) > 1, kind="stable")


def sample_last_tokens(
    query_start: NDArray[np.int32], num_sampled: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return sample_start int32 [S + 1] and sample_tokens int64 [N] of `StepInputs`.

    num_sampled: int32 [S], how many of the last tokens of each sequence are sampled.
    """
    sample_start = np.zeros(len(query_start), dtype=np.int32)
    num_sampled.cumsum(out=sample_start[1:])
    # Sampled position j of a sequence that ends at token e and at sample f is token e - f + j.
    shift = (query_start[1:] - sample_start[1:]).repeat(num_sampled)
    return sample_start, shift + np.arange(sample_start[-1], dtype=np.int64)
