"""Owns the way from the logits of a step to its tokens; keeps nothing between steps.

Order of work, and what each stage sees:

    raw logprobs   the model's logits, only for rows that ask
    forbid         −inf for what is not among allowed_token_ids, for what would complete a bad
                   word, and for stop tokens before min_tokens
    bias           logit_bias is added
    penalties      repetition, then frequency and presence, see edits.py
    grammars       −inf for what a grammar does not allow, only in constrained rows
    greedy rows    argmax, lowest id among equals
    temperature    scores = logits / T
    filters        min-p, then top-k, then top-p, only for rows that filter
    draw           Gumbel-max keyed by (seed, choice, position)
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.sampling_params import GREEDY_TEMPERATURE
from worker.kernels import KernelsUnavailableError, load_kernels
from worker.sampling.cpu_kernels import (
    DrawKeys,
    KernelBackend,
    ReferenceBackend,
    RowFilters,
    SamplingBackend,
)
from worker.sampling.draw import Best, Change
from worker.sampling.grammar_masks import NO_ROW_MASKS, RowMasks, rule_out
from worker.sampling.logit_edits import RowEdits
from worker.sampling.logprobs import named_logprobs, row_logprobs

# What the sampler is told and what it answers, as arrays over the rows of a step.


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling settings of N rows, numpy, each array [N].

    temperature: float32, below GREEDY_TEMPERATURE the row is greedy.
    top_k: int32, 0 keeps all. top_p: float32, 1 keeps all. min_p: float32, 0 keeps all.
    seed: uint64, choice: uint32, position: uint32: key of the draw; position is the
        index of the output token, 0 for the first.
    num_logprobs: int32, alternatives beside the chosen token, -1 for no logprobs.
    suppressed: (row, int64 token ids) pairs; those ids cannot be chosen.
    edits: (row, what changes its scores) pairs, of the rows that have some.
    named: (row, int64 token ids) pairs; log-probabilities of these in place of the best ones.
    masks: what the grammars of constrained rows leave.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint32]
    position: npt.NDArray[np.uint32]
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


logger = logging.getLogger("tokend.sample")


class Sampler:
    """Turns logits into tokens.

    backend: what filters and draws; see create_sampler.
    """

    def __init__(self, backend: SamplingBackend) -> None:
        self._backend = backend

    def best(self, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
        """The best token of each row of logits [N, V] as they come from the model, or changed."""
        return self._backend.best(logits, changes)

    def sample(self, logits: torch.Tensor, rows: SamplingBatch) -> Sampled:
        """One token for each row of logits, float32 [N, V], which is overwritten."""
        wanted = np.flatnonzero(rows.num_logprobs >= 0)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else logits[:0]
        for row, token_ids in rows.suppressed:
            logits[row, torch.from_numpy(token_ids)] = float("-inf")
        if rows.edits:
            self._backend.edit(logits, rows.edits)
        rule_out(logits, rows.masks)
        token_ids = self._choose(logits, rows)
        return Sampled(token_ids, _logprobs(raw, wanted, token_ids, rows))

    def _choose(self, logits: torch.Tensor, rows: SamplingBatch) -> npt.NDArray[np.int64]:
        random = rows.temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return self._backend.best(logits).token_ids
        token_ids = np.empty(logits.shape[0], dtype=np.int64)
        if not random.all():
            greedy = np.flatnonzero(~random)
            token_ids[greedy] = self._backend.best(logits[torch.from_numpy(greedy)]).token_ids
        drawn = np.flatnonzero(random)
        self._filter(logits, drawn, rows)
        keys = DrawKeys(rows.seed[drawn], rows.choice[drawn], rows.position[drawn])
        token_ids[drawn] = self._backend.draw(logits, drawn, rows.temperature[drawn], keys)
        return token_ids

    def _filter(
        self, logits: torch.Tensor, drawn: npt.NDArray[np.int64], rows: SamplingBatch
    ) -> None:
        filtering = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        active = drawn[filtering[drawn]]
        if len(active):
            filters = RowFilters(rows.top_k[active], rows.top_p[active], rows.min_p[active])
            self._backend.filter(logits, active, rows.temperature[active], filters)


def create_sampler() -> Sampler:
    """A sampler on the kernels, or on their reference where there are none."""
    try:
        return Sampler(KernelBackend(load_kernels()))
    except KernelsUnavailableError as reason:
        logger.warning("sampling runs on the slow reference: %s", reason)
        return Sampler(ReferenceBackend())


def _logprobs(
    raw: torch.Tensor,
    wanted: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    rows: SamplingBatch,
) -> tuple[LogprobsArrays | None, ...]:
    """Spread the log-probabilities of the `wanted` rows, raw [W, V], over all rows."""
    spread: list[LogprobsArrays | None] = [None] * len(token_ids)
    if len(wanted):
        packed = row_logprobs(
            raw, token_ids[wanted], rows.num_logprobs[wanted], rows.position[wanted]
        )
        for row, arrays in zip(wanted.tolist(), packed, strict=True):
            spread[row] = arrays
        places = {row: place for place, row in enumerate(wanted.tolist())}
        for row, named in rows.named:
            spread[row] = named_logprobs(
                raw[places[row]], int(token_ids[row]), named, int(rows.position[row])
            )
    return tuple(spread)
