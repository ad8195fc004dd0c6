"""The noise of one draw, from its definition, without numpy.

A token is the argmax of logit/T - ln(-ln u) with u = (x + 1/2) / 2^32; x is word (id mod 4)
of Philox-4x32-10 with the seed as key and (id div 4, position, choice, 0) as counter.
Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import math
from typing import Final

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_WORD: Final = 0xFFFFFFFF


def gumbel_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    """What is added to logit/T of this token at this output position (from 0)."""
    word = _philox((token_id // 4, position, choice, 0), (seed & _WORD, seed >> 32))[token_id % 4]
    return -math.log(-math.log((word + 0.5) * 2.0**-32))


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, third = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (third >> 32) ^ c1 ^ k0,
            third & _WORD,
            (first >> 32) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
