"""Min-p, top-k and top-p on a device, without waiting for it; what filters.py defines.

How many tokens are sorted is decided on the host, by the settings alone: as many as the
largest top-k where every row with a top-p has one, else all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.sample.order import order_keys, token_ids_of

_WORST = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """Which filters the rows of a step need, known on the host.

    most_k: largest top-k below the size of the vocabulary; 0 where no row has one.
    sorted_k: tokens that top-p looks through.
    """

    min_p: bool
    most_k: int
    top_p: bool
    sorted_k: int

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
        return FilterPlan(
            bool((min_p > 0).any()), most_k, bool(nucleus.any()), most_k if bounded else vocab_size
        )


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
    if plan.top_p:
        keys = order_keys(scores)
        best = keys.topk(plan.sorted_k, dim=1).values
        log_total = scores.logsumexp(dim=1, keepdim=True)
        shares = (scores.gather(1, token_ids_of(best)) - log_total).exp()
        reached = shares.cumsum(dim=1, dtype=torch.float64)
        # The token at which the sum reaches p is the last one in.
        place = (reached < top_p[:, None]).sum(dim=1, keepdim=True).clamp(max=plan.sorted_k - 1)
        scores = _drop(scores, keys, best.gather(1, place), top_p < 1)
    return logits.masked_fill(scores == float("-inf"), float("-inf"))


def _drop(
    scores: torch.Tensor, keys: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """−inf behind the key `last` [N, 1] of those `rows`, bool [N]."""
    limit = torch.where(rows[:, None], last, _WORST)
    return scores.masked_fill(keys < limit, float("-inf"))
