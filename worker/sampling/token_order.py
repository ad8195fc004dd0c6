"""The order of tokens, for top-k, logprobs and ranks: a higher logit first, then the lower id."""

from typing import Final

import torch

_LOW_32_BITS: Final = 0xFFFFFFFF
_VALUE_BITS: Final = 0x7FFFFFFF


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return sort keys int64 [N, V] of logits float32 [N, V]; a better token has a larger key.

    | logit as an order-preserving int32 | 2^32 - 1 - id |
    """
    return _pack_keys(logits, torch.arange(logits.shape[1], device=logits.device))


def ordered_bits(logits: torch.Tensor) -> torch.Tensor:
    """Map float32 to int32 so that the order stays; −0 and +0 become equal."""
    bits = (logits + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ _VALUE_BITS, bits)


def _pack_keys(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return (ordered_bits(logits).long() << 32) | (_LOW_32_BITS - token_ids)


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the token ids, int64, in keys made by `order_keys`."""
    return _LOW_32_BITS - (keys & _LOW_32_BITS)


def best_tokens(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` best token ids of each row in order, int64 [N, count].

    torch.topk does not define the order of equal logits, so keys decide; keys of the whole row are
    needed only if a tie crosses the last place.
    """
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64)
    values, ids = logits.topk(count, dim=1)
    keys = _pack_keys(values, ids).sort(dim=1, descending=True).values
    tied = ((logits >= values[:, -1:]).sum(dim=1) > count).nonzero().squeeze(1)
    if len(tied):
        keys[tied] = order_keys(logits[tied]).topk(count, dim=1).values
    return token_ids_of(keys)


def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the rank of token_ids int64 [N, 1] in each row, int64 [N]; the best token has 1."""
    chosen = logits.gather(1, token_ids)
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logits > chosen) | ((logits == chosen) & (ids < token_ids))
    return better.sum(dim=1) + 1
