"""Min-p, top-k and top-p on a device, without waiting for it; what filters.py defines.

No vocabulary is sorted. What top-p looks through is decided on the host, by the settings alone:
as many of the best tokens as the largest top-k, where every row with a top-p has one. Else the
score of the last token that it keeps is searched for, a bit at a time:

    scores    [ 3.1 | 2.0 | 2.0 | 2.0 | 0.4 | … ]      p = 0.9
    shares      .5    .16   .16   .16   .01            of those above 2.0: .5; from 2.0 on: .98
    kept      [  x  |  x  |  x  |  x  |     |   ]      of equal scores the lowest ids, until p
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.sample.order import order_keys, ordered_bits, token_ids_of

_WORST = torch.iinfo(torch.int64).min
_SCORE_BITS = 32


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """Which filters the rows of a step need, known on the host.

    most_k: largest top-k below the size of the vocabulary; 0 where no row has one.
    bounded: every row with a top-p has a top-k, too.
    """

    min_p: bool
    most_k: int
    top_p: bool
    bounded: bool

    @staticmethod
    def of(
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        min_p: npt.NDArray[np.float32],
        vocab_size: int,
    ) -> "FilterPlan":
        """For the rows with these settings."""
        limited = (top_k > 0) & (top_k < vocab_size)
        most_k = int(top_k[limited].max(initial=0))
        nucleus = top_p < 1
        bounded = bool((limited | ~nucleus).all())
        return FilterPlan(bool((min_p > 0).any()), most_k, bool(nucleus.any()), bounded)


def filter_on_device(
    logits: torch.Tensor,
    plan: FilterPlan,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Logits float32 [N, V] with −inf over the tokens that are out; the best one always stays.

    temperature: float32 [N], above 0. top_k: int64 [N]. top_p, min_p: float64 [N].
    """
    scores = logits / temperature[:, None]
    if plan.min_p:
        limit = scores.amax(dim=1) + min_p.log()
        scores = scores.masked_fill(scores < limit[:, None], float("-inf"))
    if plan.most_k:
        keys = order_keys(scores)
        best = keys.topk(plan.most_k, dim=1).values
        last = best.gather(1, top_k.clamp(1, plan.most_k)[:, None] - 1)
        limited = (top_k > 0) & (top_k < logits.shape[1])
        scores = _drop(scores, keys, last, limited)
    if plan.top_p and plan.bounded:
        keys = order_keys(scores)
        best = keys.topk(plan.most_k, dim=1).values
        log_total = scores.logsumexp(dim=1, keepdim=True)
        shares = (scores.gather(1, token_ids_of(best)) - log_total).exp()
        reached = shares.cumsum(dim=1, dtype=torch.float64)
        # The token at which the sum reaches p is the last one in.
        place = (reached < top_p[:, None]).sum(dim=1, keepdim=True).clamp(max=plan.most_k - 1)
        scores = _drop(scores, keys, best.gather(1, place), top_p < 1)
    elif plan.top_p:
        scores = scores.masked_fill(~_nucleus(scores, top_p), float("-inf"))
    return logits.masked_fill(scores == float("-inf"), float("-inf"))


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Bool [N, V]: the smallest set of best tokens whose probability reaches top_p [N].

    Sums are float64, of shares that are rounded to float32, as on the host.
    """
    wanted = top_p[:, None]
    order = ordered_bits(scores)
    shares = (scores - scores.logsumexp(dim=1, keepdim=True)).exp()

    def share_from(least: torch.Tensor) -> torch.Tensor:
        """Of all tokens whose score is at least this one, float64 [N, 1]."""
        chosen = shares.masked_fill(order < least.to(torch.int32), 0.0)
        return chosen.sum(dim=1, keepdim=True, dtype=torch.float64)

    # From `low` on p is reached, from `high` on it is not; or it is never reached.
    low = torch.full_like(wanted, -(1 << _SCORE_BITS - 1), dtype=torch.int64)
    high = -low
    for _ in range(_SCORE_BITS):
        middle = (low + high) >> 1
        reached = share_from(middle) >= wanted
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    above, equal = order > low, order == low
    tied = shares.masked_fill(~equal, 0.0)
    before = shares.masked_fill(~above, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
    # The token at which the sum reaches p is the last one in.
    before = before + tied.cumsum(dim=1, dtype=torch.float64) - tied
    return above | (equal & (before < wanted)) | (top_p >= 1)[:, None]


def _drop(
    scores: torch.Tensor, keys: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """−inf behind the key `last` [N, 1] of those `rows`, bool [N]."""
    limit = torch.where(rows[:, None], last, _WORST)
    return scores.masked_fill(keys < limit, float("-inf"))
