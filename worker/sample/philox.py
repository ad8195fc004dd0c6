"""Philox-4x32-10 in numpy: random words that are a function of a key and a counter.

Algorithm and constants: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As
Easy as 1, 2, 3" (SC 2011), section 3.4. No state, so the same draw comes out on
any device and in any order.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

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
