"""The one order of tokens: higher score first, among equals the lower id.

Top-k sets, logprob columns and ranks all follow it, so a tie is decided alike
everywhere and whatever the other rows are.
"""

from typing import Final

import torch

_LOW_WORD: Final = 0xFFFFFFFF
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
    return (ordered_bits(scores).long() << 32) | (_LOW_WORD - token_ids)


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The token ids, int64, in keys made by order_keys."""
    return _LOW_WORD - (keys & _LOW_WORD)


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
