"""Min-p, top-k and top-p by sorting, and how far kept tokens may be from the exact ones.

Works on logits / temperature and writes −inf over dropped tokens. The order is min-p, top-k, top-p;
every filter works on the distribution that the one before it left.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.sampling.row_params import FILTERS, RowParams, torch_columns
from worker.sampling.token_order import order_keys, token_ids_of


def filter_by_sorting(logits: torch.Tensor, rows: npt.NDArray[np.int64], params: RowParams) -> None:
    """The signature and effect of SamplingBackend.filter."""
    index = torch.from_numpy(rows)
    some = logits[index]
    scaled = some / torch.from_numpy(params["temperature"].copy())[:, None]
    apply_filters(scaled, *map(torch.from_numpy, torch_columns(params, FILTERS)))
    logits[index] = some.masked_fill_(scaled == float("-inf"), float("-inf"))


NUCLEUS_GUESS: Final = 1024
"""Top-p first sorts this many tokens; the whole row only when they do not reach p."""


def apply_filters(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Write −inf over the tokens that a row's filters drop; its best token always stays.

    logits: float32 [N, V], divided by the temperatures. top_k: int64 [N]. top_p, min_p:
    float64 [N]. A filter at its neutral value (0, 1, 0) costs its row nothing.
    """
    _on_rows(min_p > 0, _mask_min_p, logits, min_p)
    _on_rows((top_k > 0) & (top_k < logits.shape[1]), _mask_top_k, logits, top_k)
    _on_rows(top_p < 1, _mask_top_p, logits, top_p)


def _on_rows(
    active: torch.Tensor,
    mask: Callable[[torch.Tensor, torch.Tensor], None],
    logits: torch.Tensor,
    parameter: torch.Tensor,
) -> None:
    """Apply `mask` in place to the rows where `active`."""
    if active.all():
        mask(logits, parameter)
    elif active.any():
        rows = active.nonzero().squeeze(1)
        some = logits[rows]
        mask(some, parameter[rows])
        logits[rows] = some


def _mask_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens less likely than min_p times the best."""
    limit = logits.amax(dim=1) + min_p.log()
    logits.masked_fill_(logits < limit[:, None], float("-inf"))


def _mask_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep exactly the top_k best."""
    keys = order_keys(logits)
    best = keys.topk(int(top_k.max()), dim=1).values
    worst_kept = best.gather(1, top_k[:, None] - 1)
    logits.masked_fill_(keys < worst_kept, float("-inf"))


def _mask_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the smallest set of best tokens whose probability reaches top_p."""
    log_total = logits.logsumexp(dim=1, keepdim=True)
    keys = order_keys(logits)
    best = keys.topk(min(NUCLEUS_GUESS, keys.shape[1]), dim=1).values
    reached = _cumulated(logits, best, log_total)
    if (reached[:, -1] < top_p).any():
        best = keys.sort(dim=1, descending=True).values
        reached = _cumulated(logits, best, log_total)
    # The token at which the sum reaches p is the last one kept.
    last = (reached < top_p[:, None]).sum(dim=1, keepdim=True).clamp(max=best.shape[1] - 1)
    logits.masked_fill_(keys < best.gather(1, last), float("-inf"))


def _cumulated(logits: torch.Tensor, keys: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Probability of the tokens in keys and of all before them, float64, as keys."""
    probabilities = (logits.gather(1, token_ids_of(keys)) - log_total).exp()
    return probabilities.cumsum(dim=1, dtype=torch.float64)


def check_kept(
    logits: torch.Tensor, kept: torch.Tensor, params: RowParams, tolerance: float = 1e-6
) -> int:
    """Check which tokens of each row are kept; return in how many rows a sum's rounding shows.

    Min-p, top-k, ties and order are exact. Top-p may end where the sum of the kept
    probabilities, in float64, is within `tolerance` of p. logits: float32 [N, V]. kept: bool
    [N, V], in which −inf does not count. Raises AssertionError.
    """
    scaled = (logits / torch.from_numpy(params["temperature"].copy())[:, None]).numpy()
    num_rounded = 0
    for row, (values, chosen, record) in enumerate(zip(scaled, kept.numpy(), params, strict=True)):
        order = np.argsort(-values, kind="stable")
        best = np.float64(values[order[0]])
        values = values.astype(np.float64)[order]
        count = int((values > -np.inf).sum())
        if record["min_p"] > 0:
            count = int((values[:count] >= best + np.log(np.float64(record["min_p"]))).sum())
        if record["top_k"] > 0:
            count = min(count, int(record["top_k"]))
        found = int((chosen & (scaled[row] > -np.inf)).sum())
        if record["top_p"] < 1:
            p = np.float64(record["top_p"])
            weights = np.exp(values[:count] - best)
            reached = np.append(0.0, np.cumsum(weights) / weights.sum())
            num_rounded += found != int((reached[:count] < p).sum())
            assert 1 <= found <= count, (row, found, count)
            assert reached[found - 1] < p + tolerance, (row, found, reached[found - 1])
            assert reached[found] >= p - tolerance, (row, found, reached[found])
        else:
            assert found == count, (row, found, count)
        assert chosen[order[:found]].all(), (row, found)
    return num_rounded
