"""Top-k, top-p and min-p in torch: which tokens of a row may be drawn.

Works on scores = logits / temperature and writes −inf over what is out. The order
is min-p, top-k, top-p; each sees the distribution that the one before it left.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.kernels import DTYPE_CODES, Kernels
from worker.sampling.logit_edits import NEVER, RowEdits, edit_logits

# Philox-4x32-10 in numpy: random words that are a function of a key and a counter.
#
# Algorithm and constants: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As
# Easy as 1, 2, 3" (SC 2011), section 3.4. No state, so the same draw comes out on
# any device and in any order.


ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD: Final = np.uint64(0xFFFFFFFF)
_WORD_BITS: Final = np.uint64(32)

STREAM_SAMPLE: Final = 0
"""Last counter word of the draws that choose an output token."""


def philox_4x32_10(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """counter [4, n], 32-bit words held in uint64 → the four output words, [4, n]."""
    c0, c1, c2, c3 = counter
    for round_number in range(ROUNDS):
        keys = [
            np.uint64((word + round_number * weyl) & 0xFFFFFFFF)
            for word, weyl in zip(key, _WEYL, strict=True)
        ]
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ keys[0],
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ keys[1],
            product0 & _LOW_WORD,
        )
    return np.stack((c0, c1, c2, c3))


def token_words(seed: int, choice: int, position: int, num_tokens: int) -> npt.NDArray[np.uint64]:
    """Word x_i of every token id i in [0, num_tokens): uint64 below 2^32."""
    num_counters = -(-num_tokens // 4)
    counter = np.empty((4, num_counters), dtype=np.uint64)
    counter[0] = np.arange(num_counters, dtype=np.uint64)
    counter[1], counter[2], counter[3] = position, choice, STREAM_SAMPLE
    words = philox_4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return words.T.reshape(-1)[:num_tokens]


def gumbel_noise(seed: int, choice: int, position: int, num_tokens: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise −ln(−ln u_i) with u_i = (x_i + ½)·2⁻³², float64 [num_tokens]."""
    words = token_words(seed, choice, position, num_tokens).astype(np.float64)
    uniform = (words + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))


# The one order of tokens: higher score first, among equals the lower id.
#
# Top-k sets, logprob columns and ranks all follow it, so a tie is decided alike
# everywhere and whatever the other rows are.


_LOW_32_BITS: Final = 0xFFFFFFFF
_VALUE_BITS: Final = 0x7FFFFFFF


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] → int64 [N, V], unique in a row; a better token has a larger key.

    | score as an order-preserving int32 | 2^32 - 1 - id |
    """
    return _pack_keys(scores, torch.arange(scores.shape[1], device=scores.device))


def ordered_bits(scores: torch.Tensor) -> torch.Tensor:
    """float32 to int32 in the same order; both zeros are one."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ _VALUE_BITS, bits)


def _pack_keys(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return (ordered_bits(scores).long() << 32) | (_LOW_32_BITS - token_ids)


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The token ids, int64, in keys made by order_keys."""
    return _LOW_32_BITS - (keys & _LOW_32_BITS)


def best_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best token ids of each row in order, int64 [N, count].

    topk leaves open which of several equal scores it takes and in which order; keys
    decide, over the whole row only where a tie crosses the edge.
    """
    if count == 0:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64)
    values, ids = scores.topk(count, dim=1)
    keys = _pack_keys(values, ids).sort(dim=1, descending=True).values
    tied = ((scores >= values[:, -1:]).sum(dim=1) > count).nonzero().squeeze(1)
    if len(tied):
        keys[tied] = order_keys(scores[tied]).topk(count, dim=1).values
    return token_ids_of(keys)


def token_ranks(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rank of token_ids int64 [N, 1] in each row, 1 for the best, int64 [N]."""
    chosen = scores.gather(1, token_ids)
    ids = torch.arange(scores.shape[1], device=scores.device)
    better = (scores > chosen) | ((scores == chosen) & (ids < token_ids))
    return better.sum(dim=1) + 1


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


# The largest score of each row and where it is: the token of a greedy row.
#
# The same pass says which rows are numbers at all. −inf is legal among logits, because a
# mask puts it there, as long as something else is left. Rows that ask for changes of their scores
# have their token with these made, without another pass and with the logits left as they are.


class Change(NamedTuple):
    """What changes the scores of a row. late: tokens that cannot be chosen yet."""

    row: int
    edits: RowEdits
    late: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Best:
    """scores: float32 [N] as they came, NaN where a row has one. token_ids: int64 [N], those of
    the best scores once changes are made, lowest of equals."""

    scores: npt.NDArray[np.float32]
    token_ids: npt.NDArray[np.int64]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Bool [N]: rows with a NaN or +inf, or without any number."""
        return ~np.isfinite(self.scores)


def best_by_torch(logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
    """The best of each row of logits [N, V], in any floating dtype, with the changes made."""
    scores: npt.NDArray[np.float32] = logits.amax(dim=1).float().numpy()
    best = Best(scores, logits.argmax(dim=1).numpy())
    for change in changes:
        changed = logits[change.row : change.row + 1].float().clone()
        edit_logits(changed, [(0, change.edits)])
        changed[0, list(change.late)] = float(NEVER)
        best.token_ids[change.row] = changed.argmax()
    return best


def best_by_kernel(kernels: Kernels, logits: torch.Tensor, changes: Sequence[Change] = ()) -> Best:
    """The same, in one pass."""
    num_rows, vocab_size = logits.shape
    logits = logits.contiguous()
    scores = np.empty(num_rows, dtype=np.float32)
    token_ids = np.empty(num_rows, dtype=np.int64)
    edits = _addresses(num_rows, changes)
    kernels.find_best(
        DTYPE_CODES[logits.dtype],
        num_rows,
        vocab_size,
        logits.data_ptr(),
        scores.ctypes.data,
        token_ids.ctypes.data,
        ctypes.addressof(edits) if edits is not None else None,
    )
    return Best(scores, token_ids)


def _addresses(num_rows: int, changes: Sequence[Change]) -> "ctypes.Array[c_void_p] | None":
    if not changes:
        return None
    edits = (c_void_p * num_rows)()
    for change in changes:
        edits[change.row] = change.edits.address(change.late)
    return edits
