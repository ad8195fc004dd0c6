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
    bits = (scores + 0.0).view(torch.int32)
    monotonic = torch.where(bits < 0, bits ^ _VALUE_BITS, bits).long()
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return (monotonic << 32) | (_LOW_WORD - ids)


def token_ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The token ids, int64, in keys made by order_keys."""
    return _LOW_WORD - (keys & _LOW_WORD)
