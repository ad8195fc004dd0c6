"""Owns the way from the logits of a step to its tokens; keeps nothing between steps.

Order of work, and what each stage sees:

    raw logprobs   the model's logits, only for rows that ask
    suppress       ids that may not come yet (min_tokens) become −inf
    greedy rows    argmax, lowest id among equals
    temperature    scores = logits / T
    filters        min-p, then top-k, then top-p, only for rows that filter
    draw           Gumbel-max keyed by (seed, choice, position)
"""

import logging

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.sampling_params import GREEDY_TEMPERATURE
from worker.kernels import KernelsUnavailableError, load_kernels
from worker.sample.draw import Draw, DrawKeys, KernelDraw, draw_reference
from worker.sample.filters import apply_filters
from worker.sample.logprobs import row_logprobs
from worker.sample.rows import Sampled, SamplingRows

logger = logging.getLogger("tokend.sample")


class Sampler:
    """Turns logits into tokens.

    draw: how tokens are drawn; see create_sampler.
    """

    def __init__(self, *, draw: Draw) -> None:
        self._draw = draw

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        """One token for each row of logits, float32 [N, V], which is overwritten."""
        wanted = np.flatnonzero(rows.num_logprobs >= 0)
        raw = logits[torch.from_numpy(wanted)]
        for row, token_ids in rows.suppressed:
            logits[row, torch.from_numpy(token_ids)] = float("-inf")
        token_ids = self._choose(logits, rows)
        return Sampled(token_ids, _logprobs(raw, wanted, token_ids, rows))

    def _choose(self, logits: torch.Tensor, rows: SamplingRows) -> npt.NDArray[np.int64]:
        random = rows.temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return logits.argmax(dim=1).numpy()
        token_ids = np.empty(logits.shape[0], dtype=np.int64)
        greedy_rows, random_rows = np.flatnonzero(~random), np.flatnonzero(random)
        if len(greedy_rows):
            token_ids[greedy_rows] = logits[torch.from_numpy(greedy_rows)].argmax(dim=1).numpy()
        _filter(logits, random_rows, rows)
        keys = DrawKeys(
            rows.seed[random_rows], rows.choice[random_rows], rows.position[random_rows]
        )
        token_ids[random_rows] = self._draw(
            logits, random_rows, rows.temperature[random_rows], keys
        )
        return token_ids


def create_sampler() -> Sampler:
    """A sampler that draws with the kernel, or with its reference where there is none."""
    try:
        return Sampler(draw=KernelDraw(load_kernels()))
    except KernelsUnavailableError as reason:
        logger.warning("tokens are drawn by the slow reference: %s", reason)
        return Sampler(draw=draw_reference)


def _filter(logits: torch.Tensor, random_rows: npt.NDArray[np.int64], rows: SamplingRows) -> None:
    """Write −inf into logits where a filter of a random row drops a token."""
    filtering = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    active = random_rows[filtering[random_rows]]
    if not len(active):
        return
    index = torch.from_numpy(active)
    scores = logits[index] / torch.from_numpy(rows.temperature[active])[:, None]
    apply_filters(
        scores,
        torch.from_numpy(rows.top_k[active]).long(),
        torch.from_numpy(rows.top_p[active]).double(),
        torch.from_numpy(rows.min_p[active]).double(),
    )
    logits[index] = logits[index].masked_fill_(scores == float("-inf"), float("-inf"))


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
    return tuple(spread)
