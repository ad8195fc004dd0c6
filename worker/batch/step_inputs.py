"""The arrays of one step, and its sampled positions.

    sequence       0          1     2
    tokens       | 0 1 2 3 4 | 5 | 6 7 8 |     query_start = [0 5 6 9]
    positions      0 1 2 3 4   17  32 33 34    num_computed = [0 17 32]
    seq_lens       5           18  35
    sampled              (4)  (5)   -          sample_start = [0 1 2 2], sample_tokens = [4 5]

input_batch.py builds them. `sample_last_tokens` turns a number of sampled positions for each
sequence into these arrays.

A sequence with a draft is sampled at its last known token x and at each token of the draft:

    tokens       | x | d | e |                 the draft is d e
    sampled        a   b   c                   if a = d, b counts too; if also b = e, so does c

An attention whose sums differ between a chunk and a decode sees the tokens of a draft as sequences
of one query each: same block table, lengths n, n + 1, n + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proto.messages.scheduler_output import SchedulerOutput
from worker.attention.backend import AttentionInputs, start_offsets


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """The adapters of some tokens.

    ids: int64 [T], 0 for none. scales: float32 [T], factors of their effect.
    """

    ids: NDArray[np.int64]
    scales: NDArray[np.float32]

    def at(self, tokens: NDArray[np.int64] | slice) -> TokenAdapters:
        """Return those of some of the tokens."""
        return TokenAdapters(self.ids[tokens], self.scales[tokens])


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of the encoder output of an image that neighbouring tokens of a step take.

    first_token: the first of these, among the tokens of the sequence, or of all sequences.
    """

    first_token: int
    mm_hash: bytes
    rows: slice


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step, for model and sampler; T tokens, S sequences, N sampled positions.

    A sampled position is a token whose logits give the next token. A sequence has none while its
    prompt is incomplete, then one, and one more for each token of a draft, in order.

    token_ids, positions: int64 [T].
    rows: int64 [S], rows of the sequences.
    query_start: int32 [S + 1], where each sequence's tokens begin.
    seq_lens: int32 [S], tokens of each sequence once the step is computed.
    num_computed: int32 [S], tokens computed before the step.
    sample_start: int32 [S + 1], where each sequence's sampled positions begin.
    sample_tokens: int64 [N], index on the token axis of each sampled position.
    attention: of each KV cache group; they differ in their block tables and slots. Their sequences
        are those of the step, or for drafts one for each token.
    embeddings: (first token, float32 [n, hidden]) of each run of tokens that have given embeddings.
    adapters: of the tokens; None if none has one.
    images: rows of encoder outputs in place of embeddings.
    rotary_positions: int64 [T], or [3, T] where tokens have several, of M-RoPE; None: `positions`.
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
    embeddings: tuple[tuple[int, NDArray[np.float32]], ...] = ()
    adapters: TokenAdapters | None = None
    images: tuple[ImageRows, ...] = ()
    rotary_positions: NDArray[np.int64] | None = None

    @property
    def samples_every_token(self) -> bool:
        """Whether the logits of all tokens are needed."""
        return len(self.sample_tokens) == len(self.token_ids)

    @property
    def num_sampled(self) -> NDArray[np.int32]:
        """Number of sampled positions of each sequence, int32 [S]."""
        return np.diff(self.sample_start)

    def sampled_sequences(self) -> NDArray[np.int64]:
        """Return the index of the sequence of each sampled position, int64 [N]."""
        num_sampled = self.num_sampled
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

    def first_of_rows(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the positions among `chosen`, bool [N], that precede the draft of their row."""
        if self.drafts:
            chosen = chosen.copy()
            chosen[list(self.drafts)] = False
        return chosen

    def accepted(
        self, token_ids: NDArray[np.int64], finite: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | None:
        """Return the positions whose tokens count, bool [N]; None for all of them.

        A token after a draft counts if the sampled tokens before it are those of the draft, and if
        all logits up to it are finite. token_ids: int64 [N], sampled. finite: bool [N].
        """
        if not self.drafts:
            return None
        accepted = np.ones(len(token_ids), dtype=np.bool_)
        for index, draft in self.drafts.items():
            before = index - 1
            agrees = accepted[before] and token_ids[before] == draft[-1]
            accepted[index] = agrees and finite[before] and finite[index]
        return accepted

    def select(self, chosen: NDArray[np.bool_]) -> SampledPositions:
        """Return the positions where `chosen`, bool [N], is True.

        Of a row's positions the first ones, all of them or none.
        """
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
    """Return an order of the step's sequences, int64 [S]: first those that decode."""
    counts = [request.num_scheduled_tokens for request in step.new_requests]
    counts += step.cached_requests.num_scheduled_tokens
    if step.spec_decode_seq_ids:
        place = {seq_id: index for index, seq_id in enumerate(step.cached_requests.seq_ids)}
        for seq_id, draft in step.drafts.items():
            counts[len(step.new_requests) + place[seq_id]] -= len(draft)
    return np.argsort(np.array(counts) > 1, kind="stable")


def sample_last_tokens(
    query_start: NDArray[np.int32], num_sampled: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return sample_start int32 [S + 1] and sample_tokens int64 [N] of `StepInputs`.

    num_sampled: int32 [S], how many of the last tokens of each sequence are sampled.
    """
    sample_start = start_offsets(num_sampled)
    # Sampled position j of a sequence that ends at token e and at sample f is token e - f + j.
    shift = (query_start[1:] - sample_start[1:]).repeat(num_sampled)
    return sample_start, shift + np.arange(sample_start[-1], dtype=np.int64)
