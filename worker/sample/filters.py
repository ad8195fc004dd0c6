"""Top-k, top-p and min-p in torch: which tokens of a row may be drawn.

Works on scores = logits / temperature and writes −inf over what is out. The order
is min-p, top-k, top-p; each sees the distribution that the one before it left.
"""

from collections.abc import Callable
from typing import Final

import torch

from worker.sample.order import order_keys, token_ids_of

NUCLEUS_GUESS: Final = 1024
"""Top-p first sorts this many tokens; the whole row only when they do not reach p."""


def apply_filters(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Mask scores float32 [N, V] in place; top_k int64 [N], top_p and min_p float64 [N].

    A filter at its neutral value (0, 1, 0) keeps all tokens of its row and costs it
    nothing. The best token always stays.
    """
    _on_rows(min_p > 0, _mask_min_p, scores, min_p)
    _on_rows((top_k > 0) & (top_k < scores.shape[1]), _mask_top_k, scores, top_k)
    _on_rows(top_p < 1, _mask_top_p, scores, top_p)


def _on_rows(
    active: torch.Tensor,
    mask: Callable[[torch.Tensor, torch.Tensor], None],
    scores: torch.Tensor,
    parameter: torch.Tensor,
) -> None:
    """Apply `mask` in place to the rows where `active`."""
    if active.all():
        mask(scores, parameter)
    elif active.any():
        rows = active.nonzero().squeeze(1)
        some = scores[rows]
        mask(some, parameter[rows])
        scores[rows] = some


def _mask_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens less likely than min_p times the best."""
    limit = scores.amax(dim=1) + min_p.log()
    scores.masked_fill_(scores < limit[:, None], float("-inf"))


def _mask_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep exactly the top_k best."""
    keys = order_keys(scores)
    best = keys.topk(int(top_k.max()), dim=1).values
    worst_kept = best.gather(1, top_k[:, None] - 1)
    scores.masked_fill_(keys < worst_kept, float("-inf"))


def _mask_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the smallest set of best tokens whose probability reaches top_p."""
    log_total = scores.logsumexp(dim=1, keepdim=True)
    keys = order_keys(scores)
    best = keys.topk(min(NUCLEUS_GUESS, keys.shape[1]), dim=1).values
    reached = _cumulated(scores, best, log_total)
    if (reached[:, -1] < top_p).any():
        best = keys.sort(dim=1, descending=True).values
        reached = _cumulated(scores, best, log_total)
    # The token at which the sum reaches p is the last one in.
    last = (reached < top_p[:, None]).sum(dim=1, keepdim=True).clamp(max=best.shape[1] - 1)
    scores.masked_fill_(keys < best.gather(1, last), float("-inf"))


def _cumulated(scores: torch.Tensor, keys: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Probability of the tokens in keys and of all before them, float64, as keys."""
    probabilities = (scores.gather(1, token_ids_of(keys)) - log_total).exp()
    return probabilities.cumsum(dim=1, dtype=torch.float64)
