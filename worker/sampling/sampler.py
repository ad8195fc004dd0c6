"""From the logits of a step to its tokens, on the host.

Order of work, and what each stage does:

    raw logprobs   kept of the model's logits, only for rows that ask
    forbidden      −inf for all but allowed_token_ids, for tokens that would complete a bad
                   word, and for stop tokens before min_tokens
    bias           logit_bias is added
    penalties      repetition, then frequency and presence, see logit_edits.py
    grammars       −inf for what a grammar does not allow, only in constrained rows
    greedy rows    argmax, lowest id among equals
    temperature    logits / T
    filters        min-p, then top-k, then top-p, only for rows that have one
    draw           Gumbel-max keyed by (seed, choice, position)

Most rows want the best token and nothing else. It is found in the same pass that looks for NaN.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.logit_edits import LogitEdits
from proto.model_runner_output import RowLogprobs
from proto.sampling_params import GREEDY_TEMPERATURE
from proto.scheduler_output import GrammarOutput
from worker.input_batch import NO_LOGPROBS, InputBatch, StepInputs
from worker.kernels import KernelsUnavailableError, load_kernels
from worker.sampling.cpu_kernels import KernelBackend, RowChange, SamplingBackend
from worker.sampling.grammar_masks import NO_ROW_MASKS, RowMasks, row_masks, rule_out
from worker.sampling.logit_edits import RowEdits
from worker.sampling.logprobs import best_continuations, named_logprobs, row_logprobs
from worker.sampling.row_params import RowParams, needs_filter
from worker.sampling.torch_backend import TorchBackend

logger = logging.getLogger("tokend.sample")


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What N rows ask of the sampler.

    params: records [N]; a temperature below GREEDY_TEMPERATURE makes the row greedy.
    num_logprobs: int32 [N], alternatives beside the chosen token, -1 for no logprobs.
    suppressed: (row, int64 token ids) pairs; those ids cannot be chosen.
    edits: (row, edits of its logits) pairs, of the rows that have some.
    named: (row, int64 token ids) pairs; logprobs of these in place of the best ones.
    masks: of the rows constrained by a grammar.
    """

    params: RowParams
    num_logprobs: npt.NDArray[np.int32]
    suppressed: tuple[tuple[int, npt.NDArray[np.int64]], ...] = ()
    edits: tuple[tuple[int, RowEdits], ...] = ()
    named: tuple[tuple[int, npt.NDArray[np.int64]], ...] = ()
    masks: RowMasks = NO_ROW_MASKS


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids: int64 [N]. logprobs: one entry a row, None for rows that did not ask."""

    token_ids: npt.NDArray[np.int64]
    logprobs: tuple[LogprobsArrays | None, ...]


class Sampler:
    """Draws one token for each row of a batch of logits; keeps nothing between steps."""

    def __init__(self, backend: SamplingBackend) -> None:
        self.backend = backend

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """Return a token for each row of logits, float32 [N, V], which are overwritten."""
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else logits[:0]
        for row, token_ids in batch.suppressed:
            logits[row, torch.from_numpy(token_ids)] = float("-inf")
        if batch.edits:
            self.backend.edit(logits, batch.edits)
        rule_out(logits, batch.masks)
        chosen = self._choose(logits, batch.params)
        return Sampled(chosen, _logprobs(raw, wanted, chosen, batch))

    def _choose(self, logits: torch.Tensor, params: RowParams) -> npt.NDArray[np.int64]:
        random = params["temperature"] >= GREEDY_TEMPERATURE
        if not random.any():
            return self.backend.best(logits).token_ids
        token_ids = np.empty(logits.shape[0], dtype=np.int64)
        if not random.all():
            greedy = np.flatnonzero(~random)
            token_ids[greedy] = self.backend.best(logits[torch.from_numpy(greedy)]).token_ids
        filtered = np.flatnonzero(random & needs_filter(params))
        if len(filtered):
            self.backend.filter(logits, filtered, params[filtered])
        drawn = np.flatnonzero(random)
        token_ids[drawn] = self.backend.draw(logits, drawn, params[drawn])
        return token_ids


def create_sampler() -> Sampler:
    """Return a sampler on the compiled kernels, or on torch where there are none."""
    try:
        return Sampler(KernelBackend(load_kernels()))
    except KernelsUnavailableError as reason:
        logger.warning("sampling runs in torch, which is slow: %s", reason)
        return Sampler(TorchBackend())


def _logprobs(
    raw: torch.Tensor,
    wanted: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    batch: SamplingBatch,
) -> tuple[LogprobsArrays | None, ...]:
    """Spread the log-probabilities of the `wanted` rows, raw [W, V], over all rows."""
    spread: list[LogprobsArrays | None] = [None] * len(token_ids)
    if len(wanted):
        position = batch.params["position"]
        packed = row_logprobs(raw, token_ids[wanted], batch.num_logprobs[wanted], position[wanted])
        for row, arrays in zip(wanted.tolist(), packed, strict=True):
            spread[row] = arrays
        index_of = {row: index for index, row in enumerate(wanted.tolist())}
        for row, named in batch.named:
            spread[row] = named_logprobs(
                raw[index_of[row]], int(token_ids[row]), named, int(position[row])
            )
    return tuple(spread)


class Chosen(NamedTuple):
    """tokens: of each sequence of the step. The others: only of sequences that ask."""

    tokens: list[list[int]]
    logprobs: list[RowLogprobs]
    candidates: list[RowLogprobs]


class StepSampler:
    """Samples a step of the sequences in an InputBatch, and appends the tokens to their rows."""

    def __init__(self, batch: InputBatch, sampler: Sampler) -> None:
        self._batch = batch
        self._sampler = sampler
        self._empty_edits: list[RowEdits] = []
        """For greedy rows that only have suppressed tokens; each row of a step needs its own."""

    def choose(
        self,
        inputs: StepInputs,
        seq_ids: list[int],
        logits: torch.Tensor,
        nonfinite: npt.NDArray[np.bool_],
        grammars: Callable[[], GrammarOutput],
    ) -> Chosen:
        """Draw a token for each sequence that is complete; append it to its row.

        Rows of a beam search have candidates instead.
        seq_ids: of the step's sequences. logits: [N, V] of the N that sample, in any floating
        dtype, on the host. grammars: waits for the masks of the step.
        nonfinite: bool [S], set here for sequences whose logits are. Such a sequence samples
        nothing, but its row gets a token all the same: a step may be waiting for it.
        """
        sequences = inputs.samples.nonzero()[0]
        rows = inputs.rows[sequences]
        best = self._sampler.backend.best(logits, self._greedy_changes(rows, seq_ids, sequences))
        nonfinite[sequences] |= best.nonfinite
        masks = grammars()
        greedy = self._batch.greedy[rows] & ~_has_mask(masks, seq_ids, sequences)
        if greedy.all():
            return Chosen(self._append(inputs, sequences, best.token_ids, nonfinite), [], [])
        if not greedy.any():
            return self._sample(inputs, logits.float(), seq_ids, sequences, nonfinite, masks)
        chosen = self._append(inputs, sequences[greedy], best.token_ids[greedy], nonfinite)
        others = self._sample(
            inputs,
            logits[torch.from_numpy(~greedy)].float(),
            seq_ids,
            sequences[~greedy],
            nonfinite,
            masks,
        )
        tokens = [a or b for a, b in zip(chosen, others.tokens, strict=True)]
        return Chosen(tokens, others.logprobs, others.candidates)

    def _greedy_changes(
        self, rows: npt.NDArray[np.int64], seq_ids: list[int], sequences: npt.NDArray[np.int64]
    ) -> list[RowChange]:
        """Edits of the greedy ones among the rows [N] of `sequences` [N]."""
        batch = self._batch
        early = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] < batch.min_output[rows]
        if not batch.edits and not early.any():
            return []
        found: list[RowChange] = []
        for index, (row, greedy, is_early) in enumerate(
            zip(rows.tolist(), batch.greedy[rows].tolist(), early.tolist(), strict=True)
        ):
            if greedy and (is_early or row in batch.edits):
                stop_ids = batch.params(seq_ids[sequences[index]]).stop_ids if is_early else ()
                edits = batch.edits.get(row) or self._empty(len(found))
                found.append(RowChange(index, edits, tuple(stop_ids)))
        return found

    def _empty(self, number: int) -> RowEdits:
        while len(self._empty_edits) <= number:
            self._empty_edits.append(RowEdits(LogitEdits(), (), ()))
        return self._empty_edits[number]

    def _append(
        self,
        inputs: StepInputs,
        sequences: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        nonfinite: npt.NDArray[np.bool_],
    ) -> list[list[int]]:
        """Append tokens to the rows of `sequences`; return the tokens of all the step's."""
        self._batch.append_sampled(inputs.rows[sequences], token_ids)
        tokens: list[list[int]] = [[] for _ in nonfinite]
        sound = ~nonfinite[sequences]
        for sequence, token_id in zip(
            sequences[sound].tolist(), token_ids[sound].tolist(), strict=True
        ):
            tokens[sequence].append(token_id)
        return tokens

    def _sample(
        self,
        inputs: StepInputs,
        logits: torch.Tensor,
        seq_ids: list[int],
        sequences: npt.NDArray[np.int64],
        nonfinite: npt.NDArray[np.bool_],
        grammars: GrammarOutput,
    ) -> Chosen:
        """Sample rows that want more than their best token; overwrites logits float32 [N, V]."""
        if nonfinite.any():
            logits[torch.from_numpy(nonfinite[sequences])] = 0.0
        candidates: list[RowLogprobs] = []
        beams = self._batch.num_candidates[inputs.rows[sequences]] > 0
        if beams.any():
            found = sequences[beams]
            best = self._candidates(
                logits[torch.from_numpy(beams)], inputs.rows[found], [seq_ids[i] for i in found]
            )
            logits, sequences = logits[torch.from_numpy(~beams)], sequences[~beams]
            candidates = list(map(RowLogprobs, [seq_ids[i] for i in found], best))
        if len(sequences) == 0:
            return Chosen([[] for _ in seq_ids], [], candidates)
        result = self._sampler.sample(
            logits,
            self._sampling_batch(inputs.rows[sequences], [seq_ids[i] for i in sequences], grammars),
        )
        tokens = self._append(inputs, sequences, result.token_ids, nonfinite)
        logprobs = [
            RowLogprobs(seq_ids[sequence], arrays)
            for sequence, arrays in zip(sequences, result.logprobs, strict=True)
            if arrays is not None and not nonfinite[sequence]
        ]
        return Chosen(tokens, logprobs, candidates)

    def _candidates(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], seq_ids: list[int]
    ) -> list[LogprobsArrays]:
        """Best next tokens of rows of a beam search."""
        position = self._batch.num_outputs(rows)
        return best_continuations(
            logits,
            self._batch.num_candidates[rows],
            position.astype(np.uint32),
            self._suppressed(rows, position, seq_ids),
        )

    def _sampling_batch(
        self, rows: npt.NDArray[np.int64], seq_ids: list[int], grammars: GrammarOutput
    ) -> SamplingBatch:
        params = self._batch.params_of_step(rows)
        return SamplingBatch(
            params,
            num_logprobs=self._batch.num_logprobs[rows],
            suppressed=self._suppressed(rows, self._batch.num_outputs(rows), seq_ids),
            edits=self._edits(rows),
            named=self._named(rows, seq_ids),
            masks=row_masks(grammars, seq_ids),
        )

    def _suppressed(
        self, rows: npt.NDArray[np.int64], position: npt.NDArray[np.int32], seq_ids: list[int]
    ) -> tuple[tuple[int, npt.NDArray[np.int64]], ...]:
        """Stop tokens of the rows that have fewer outputs than min_tokens, for SamplingBatch."""
        batch = self._batch
        return tuple(
            (int(index), np.array(sorted(batch.params(seq_ids[index]).stop_ids), dtype=np.int64))
            for index in np.flatnonzero(position < batch.min_output[rows])
        )

    def _edits(self, rows: npt.NDArray[np.int64]) -> tuple[tuple[int, RowEdits], ...]:
        edits = self._batch.edits
        if not edits:
            return ()
        return tuple((index, edits[row]) for index, row in enumerate(rows.tolist()) if row in edits)

    def _named(
        self, rows: npt.NDArray[np.int64], seq_ids: list[int]
    ) -> tuple[tuple[int, npt.NDArray[np.int64]], ...]:
        """Token ids of logprob_token_ids, for SamplingBatch."""
        asking = np.flatnonzero(self._batch.num_logprobs[rows] != NO_LOGPROBS).tolist()
        named = [(index, self._batch.params(seq_ids[index]).logprob_token_ids) for index in asking]
        return tuple((index, np.array(ids, dtype=np.int64)) for index, ids in named if ids)


def _has_mask(
    grammars: GrammarOutput, seq_ids: Sequence[int], sequences: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Bool [N]: which of the sequences that sample are constrained by a grammar."""
    masked = set(grammars.seq_ids)
    return np.fromiter((seq_ids[i] in masked for i in sequences), np.bool_, len(sequences))
