"""From the logits of a step to its tokens, on the host: which rows need what.

Start with `StepSampler.sample_step`. worker/sampling/sampler.py has the stages of a row that needs
more than its best token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.logit_edits import LogitEdits
from proto.messages.model_runner_output import RowLogprobs
from proto.messages.scheduler_output import GrammarOutput
from worker.batch.input_batch import InputBatch
from worker.batch.step_inputs import SampledPositions, StepInputs
from worker.sampling.backend import RowChange
from worker.sampling.logit_edits import RowEdits, grammar_masks
from worker.sampling.logprobs import NO_LOGPROBS, best_continuations, logprobs_of_sequences
from worker.sampling.sampler import Sampler, SamplingBatch


@dataclass(slots=True)
class StepSamplerOutput:
    """The sampled tokens of each of S sequences, and results of sequences that request more.

    logprobs, candidates: one entry a sequence.
    """

    tokens: list[list[int]]
    logprobs: list[RowLogprobs] = field(default_factory=list)
    candidates: list[RowLogprobs] = field(default_factory=list)


class StepSampler:
    """Samples a step of the sequences in an InputBatch, and appends the tokens to their rows."""

    def __init__(self, batch: InputBatch, sampler: Sampler) -> None:
        self._batch = batch
        self._sampler = sampler
        self._empty_edits: list[RowEdits] = []
        """For greedy rows that only have suppressed tokens; each row of a step needs its own."""

    def sample_step(
        self,
        inputs: StepInputs,
        seq_ids: Sequence[int],
        logits: torch.Tensor,
        nonfinite: npt.NDArray[np.bool_],
        get_grammars: Callable[[], GrammarOutput],
    ) -> StepSamplerOutput:
        """Sample each sampled position of the step; append the tokens to their rows.

        Beams report candidates instead.
        seq_ids: [S]. logits: [N, V] of the N sampled positions, of any floating dtype, on the
        host. get_grammars: waits for the grammar masks of the step.
        nonfinite: bool [S], set here for sequences with nonfinite logits. They have no tokens in
        the output, but their rows get some, because a later step may be planned on them.

        The tokens after a draft count as far as those before them agree with it. Logits that are
        not finite end them, too: the sequence fails in the next step, which begins there.
        """
        positions = self._batch.sampled_positions(inputs, seq_ids)
        best = self._sampler.backend.best(logits, self._greedy_changes(positions))
        broken = best.nonfinite
        nonfinite[positions.sequences[positions.first_of_rows(broken)]] = True
        broken |= nonfinite[positions.sequences]
        grammars = get_grammars()
        greedy = self._batch.greedy[positions.rows] & ~_has_mask(grammars, positions)
        output = StepSamplerOutput([[] for _ in seq_ids])
        if greedy.all():
            self._append_tokens(positions, best.token_ids, broken, output)
        elif not greedy.any():
            self._sample_positions(positions, logits.float(), broken, grammars, output)
        else:
            self._append_tokens(
                positions.select(greedy), best.token_ids[greedy], broken[greedy], output
            )
            others = logits[torch.from_numpy(~greedy)].float()
            self._sample_positions(
                positions.select(~greedy), others, broken[~greedy], grammars, output
            )
        return output

    def _greedy_changes(self, positions: SampledPositions) -> list[RowChange]:
        """Return the logit edits of the greedy ones among the positions."""
        batch = self._batch
        early = batch.before_min_tokens(positions)
        if not batch.edits and not early.any():
            return []
        edits = dict(batch.edits_of(positions))
        changes: list[RowChange] = []
        for index, (greedy, is_early) in enumerate(
            zip(batch.greedy[positions.rows].tolist(), early.tolist(), strict=True)
        ):
            if greedy and (is_early or index in edits):
                stop_ids = batch.params(positions.seq_ids[index]).stop_ids if is_early else ()
                row_edits = edits.get(index) or self._empty(len(changes))
                changes.append(RowChange(index, row_edits, tuple(stop_ids)))
        return changes

    def _empty(self, number: int) -> RowEdits:
        while len(self._empty_edits) <= number:
            self._empty_edits.append(RowEdits(LogitEdits(), (), ()))
        return self._empty_edits[number]

    def _append_tokens(
        self,
        positions: SampledPositions,
        token_ids: npt.NDArray[np.int64],
        broken: npt.NDArray[np.bool_],
        output: StepSamplerOutput,
    ) -> npt.NDArray[np.bool_]:
        """Append tokens [N] to their rows, and to the output unless their logits are nonfinite.

        Returns the positions that are in the output, bool [N].
        """
        accepted = positions.accepted(token_ids, ~broken)
        if accepted is None:
            self._batch.append_sampled(positions.rows, token_ids)
            in_output = ~broken
        else:
            self._batch.append_sampled(positions.rows[accepted], token_ids[accepted])
            in_output = accepted & ~broken
        for sequence, token_id in zip(
            positions.sequences[in_output].tolist(), token_ids[in_output].tolist(), strict=True
        ):
            output.tokens[sequence].append(token_id)
        return in_output

    def _sample_positions(
        self,
        positions: SampledPositions,
        logits: torch.Tensor,
        broken: npt.NDArray[np.bool_],
        grammars: GrammarOutput,
        output: StepSamplerOutput,
    ) -> None:
        """Sample positions that need more than their best token; overwrites logits [N, V]."""
        if broken.any():
            logits[torch.from_numpy(broken)] = 0.0
        beams = self._batch.num_candidates[positions.rows] > 0
        if beams.any():
            chosen = positions.select(beams)
            candidates = best_continuations(
                logits[torch.from_numpy(beams)],
                self._batch.num_candidates[chosen.rows],
                chosen.output_index.astype(np.uint32),
                self._suppressed(chosen),
            )
            output.candidates += map(RowLogprobs, chosen.seq_ids, candidates)
            positions, logits = positions.select(~beams), logits[torch.from_numpy(~beams)]
            broken = broken[~beams]
        if len(positions) == 0:
            return
        batch = self._sampling_batch(positions, grammars)
        token_ids, logprobs = self._sampler.sample(logits, batch)
        in_output = self._append_tokens(positions, token_ids, broken, output)
        output.logprobs += logprobs_of_sequences(
            (seq_id, arrays)
            for seq_id, counts, arrays in zip(
                positions.seq_ids, in_output.tolist(), logprobs, strict=True
            )
            if arrays is not None and counts
        )

    def _sampling_batch(
        self, positions: SampledPositions, grammars: GrammarOutput
    ) -> SamplingBatch:
        num_logprobs = self._batch.num_logprobs[positions.rows]
        return SamplingBatch(
            self._batch.params_of(positions),
            num_logprobs,
            suppressed=self._suppressed(positions),
            edits=self._batch.edits_of(positions),
            named=[
                (index, np.array(token_ids, dtype=np.int64))
                for index in np.flatnonzero(num_logprobs != NO_LOGPROBS).tolist()
                if (token_ids := self._batch.params(positions.seq_ids[index]).logprob_token_ids)
            ],
            masks=grammar_masks(grammars, positions.seq_ids),
        )

    def _suppressed(self, positions: SampledPositions) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Return (index, stop tokens) of the positions before min_tokens."""
        return [
            (
                index,
                np.array(
                    sorted(self._batch.params(positions.seq_ids[index]).stop_ids), dtype=np.int64
                ),
            )
            for index in np.flatnonzero(self._batch.before_min_tokens(positions)).tolist()
        ]


def _has_mask(grammars: GrammarOutput, positions: SampledPositions) -> npt.NDArray[np.bool_]:
    """Return the positions, bool [N], whose sequences are constrained by a grammar."""
    if not grammars.seq_ids:
        return np.zeros(len(positions), dtype=np.bool_)
    masked = set(grammars.seq_ids)
    has_mask = (seq_id in masked for seq_id in positions.seq_ids)
    return np.fromiter(has_mask, np.bool_, len(positions))
