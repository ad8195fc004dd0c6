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

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.sampling_params import GREEDY_TEMPERATURE
from worker.kernels import KernelsUnavailableError, load_kernels
from worker.sample.backend import (
    DrawKeys,
    KernelBackend,
    ReferenceBackend,
    RowFilters,
    SamplingBackend,
)
from worker.sample.best import Best, Change
from worker.sample.grammar_masks import rule_out
from worker.sample.logprobs import named_logprobs, row_logprobs
from worker.sample.rows import Sampled, SamplingRows

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

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
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

    def _choose(self, logits: torch.Tensor, rows: SamplingRows) -> npt.NDArray[np.int64]:
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
        self, logits: torch.Tensor, drawn: npt.NDArray[np.int64], rows: SamplingRows
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
    rows: SamplingRows,
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
