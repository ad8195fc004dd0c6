"""Chooses a step's tokens from its scores, on the host, and gives them to their rows.

Owns which rows take which way: most want the best token of the scores as they are, which is
found while they are looked through for what is no number. Knows no model and no device.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from proto.engine_io import LogprobsArrays
from proto.logit_edits import LogitEdits
from proto.model_runner_output import RowLogprobs
from proto.scheduler_output import GrammarOutput
from worker.input_batch import NO_LOGPROBS, InputBatch, StepInputs
from worker.sampling.draw import Change
from worker.sampling.grammar_masks import row_masks
from worker.sampling.logit_edits import RowEdits
from worker.sampling.logprobs import best_continuations
from worker.sampling.sampler import Sampler, SamplingBatch


class Chosen(NamedTuple):
    """tokens: of each sequence of the step. The others: only of sequences that ask."""

    tokens: list[list[int]]
    logprobs: list[RowLogprobs]
    candidates: list[RowLogprobs]


class StepSampler:
    """Samples for the sequences that have a row in `rows`."""

    def __init__(self, rows: InputBatch, sampler: Sampler) -> None:
        self._rows = rows
        self._sampler = sampler
        self._unedited: list[RowEdits] = []
        """For rows of a step that change nothing but cannot end yet; each needs its own."""

    def choose(
        self,
        inputs: StepInputs,
        handles: list[int],
        scores: torch.Tensor,
        broken: NDArray[np.bool_],
        grammars: Callable[[], GrammarOutput],
    ) -> Chosen:
        """Draw a token for each sequence that is complete; append it to its row.

        Rows of a beam search have candidates instead.
        handles: of the step's sequences. scores: [N, V] of the N that sample, in any floating
        dtype, on the host. grammars: waits for the masks of the step.
        broken: bool [S], marked further where scores are odd. Such a sequence samples
        nothing, but its row gets a token all the same: a step may be waiting for it.
        """
        sequences = inputs.samples.nonzero()[0]
        at = inputs.rows[sequences]
        best = self._sampler.best(scores, self._changes(at, handles, sequences))
        broken[sequences] |= best.broken
        masks = grammars()
        greedy = self._rows.greedy[at] & ~_has_mask(masks, handles, sequences)
        if greedy.all():
            return Chosen(self._append(inputs, sequences, best.token_ids, broken), [], [])
        if not greedy.any():
            return self._sample_each(inputs, scores.float(), handles, sequences, broken, masks)
        # What the others want is no work for these.
        chosen = self._append(inputs, sequences[greedy], best.token_ids[greedy], broken)
        others = self._sample_each(
            inputs,
            scores[torch.from_numpy(~greedy)].float(),
            handles,
            sequences[~greedy],
            broken,
            masks,
        )
        tokens = [a or b for a, b in zip(chosen, others.tokens, strict=True)]
        return Chosen(tokens, others.logprobs, others.candidates)

    def _changes(
        self, at: NDArray[np.int64], handles: list[int], sequences: NDArray[np.int64]
    ) -> list[Change]:
        """Of the scores of greedy rows; `at` and `sequences` [N], those that sample."""
        rows = self._rows
        late = self._late(at)
        if not rows.edits and not late.any():
            return []
        found: list[Change] = []
        for i, (row, greedy, is_late) in enumerate(
            zip(at.tolist(), rows.greedy[at].tolist(), late.tolist(), strict=True)
        ):
            if greedy and (is_late or row in rows.edits):
                stop_ids = rows.params(handles[sequences[i]]).stop_ids if is_late else ()
                edits = rows.edits.get(row) or self._nothing(len(found))
                found.append(Change(i, edits, tuple(stop_ids)))
        return found

    def _nothing(self, number: int) -> RowEdits:
        """The one of this number that changes nothing."""
        while len(self._unedited) <= number:
            self._unedited.append(RowEdits(LogitEdits(), (), ()))
        return self._unedited[number]

    def _late(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Bool [N]: rows that may not end yet."""
        rows = self._rows
        found: NDArray[np.bool_] = (
            rows.num_tokens[at] - rows.num_prompt_tokens[at] < rows.min_output[at]
        )
        return found

    def _append(
        self,
        inputs: StepInputs,
        sequences: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        broken: NDArray[np.bool_],
    ) -> list[list[int]]:
        """Give the rows of `sequences` their tokens; what each sequence of the step reports."""
        self._rows.append_sampled(inputs.rows[sequences], token_ids)
        tokens: list[list[int]] = [[] for _ in broken]
        sound = ~broken[sequences]
        for sequence, token_id in zip(
            sequences[sound].tolist(), token_ids[sound].tolist(), strict=True
        ):
            tokens[sequence].append(token_id)
        return tokens

    def _sample_each(
        self,
        inputs: StepInputs,
        logits: torch.Tensor,
        handles: list[int],
        sequences: NDArray[np.int64],
        broken: NDArray[np.bool_],
        grammars: GrammarOutput,
    ) -> Chosen:
        """The same where rows want more than their best token; logits float32 [N, V] are spent."""
        if broken.any():
            logits[torch.from_numpy(broken[sequences])] = 0.0
        candidates: list[RowLogprobs] = []
        beams = self._rows.num_candidates[inputs.rows[sequences]] > 0
        if beams.any():
            found = sequences[beams]
            best = self._candidates(
                logits[torch.from_numpy(beams)], inputs.rows[found], [handles[i] for i in found]
            )
            logits, sequences = logits[torch.from_numpy(~beams)], sequences[~beams]
            candidates = list(map(RowLogprobs, [handles[i] for i in found], best))
        if len(sequences) == 0:
            return Chosen([[] for _ in handles], [], candidates)
        request = self._sampling_rows(
            inputs.rows[sequences], [handles[i] for i in sequences], grammars
        )
        result = self._sampler.sample(logits, request)
        tokens = self._append(inputs, sequences, result.token_ids, broken)
        logprobs = [
            RowLogprobs(handles[sequence], arrays)
            for sequence, arrays in zip(sequences, result.logprobs, strict=True)
            if arrays is not None and not broken[sequence]
        ]
        return Chosen(tokens, logprobs, candidates)

    def _candidates(
        self, logits: torch.Tensor, at: NDArray[np.int64], handles: list[int]
    ) -> list[LogprobsArrays]:
        position = self._rows.num_tokens[at] - self._rows.num_prompt_tokens[at]
        return best_continuations(
            logits,
            self._rows.num_candidates[at],
            position.astype(np.uint32),
            self._suppressed(at, position, handles),
        )

    def _suppressed(
        self, at: NDArray[np.int64], position: NDArray[np.int32], handles: list[int]
    ) -> tuple[tuple[int, NDArray[np.int64]], ...]:
        """Stop tokens of the rows that may not end yet, as SamplingBatch has them."""
        rows = self._rows
        return tuple(
            (int(i), np.array(sorted(rows.params(handles[i]).stop_ids), dtype=np.int64))
            for i in np.flatnonzero(position < rows.min_output[at])
        )

    def _sampling_rows(
        self, at: NDArray[np.int64], handles: list[int], grammars: GrammarOutput
    ) -> SamplingBatch:
        rows = self._rows
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        return SamplingBatch(
            temperature=rows.temperature[at],
            top_k=rows.top_k[at],
            top_p=rows.top_p[at],
            min_p=rows.min_p[at],
            seed=rows.seed[at],
            choice=rows.choice[at],
            position=position.astype(np.uint32),
            num_logprobs=rows.num_logprobs[at],
            suppressed=self._suppressed(at, position, handles),
            edits=self._edits(at),
            named=self._named(at, handles),
            masks=row_masks(grammars, handles),
        )

    def _edits(self, at: NDArray[np.int64]) -> tuple[tuple[int, RowEdits], ...]:
        edits = self._rows.edits
        if not edits:
            return ()
        return tuple((i, edits[row]) for i, row in enumerate(at.tolist()) if row in edits)

    def _named(
        self, at: NDArray[np.int64], handles: list[int]
    ) -> tuple[tuple[int, NDArray[np.int64]], ...]:
        """Tokens whose log-probabilities are asked for by name."""
        asking = np.flatnonzero(self._rows.num_logprobs[at] != NO_LOGPROBS).tolist()
        named = [(i, self._rows.params(handles[i]).logprob_token_ids) for i in asking]
        return tuple((i, np.array(ids, dtype=np.int64)) for i, ids in named if ids)


def _has_mask(
    grammars: GrammarOutput, handles: list[int], sequences: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Bool [N], for each of the sequences that sample."""
    masked = set(grammars.handles)
    return np.fromiter((handles[i] in masked for i in sequences), np.bool_, len(sequences))
