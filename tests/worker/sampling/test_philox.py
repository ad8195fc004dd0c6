"""Philox words against published vectors and plain Python."""

import math

import numpy as np
import pytest

from tests.worker.sampling.philox_words import philox, token_word
from worker.reference.sampling import gumbel_noise, philox_4x32_10, token_words

# Published with Random123 (kat_vectors, philox4x32 10): all zeros, all ones, the digits of pi.
KNOWN_ANSWERS = [
    (
        (0x00000000,) * 4,
        (0x00000000,) * 2,
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_matches_the_published_vectors(counter, key, words) -> None:
    assert philox(counter, key) == words
    column = np.array(counter, dtype=np.uint64)[:, None]
    assert tuple(int(word) for word in philox_4x32_10(column, key)[:, 0]) == words


@pytest.mark.parametrize(
    ("seed", "choice", "position"),
    [(0, 0, 0), (2**64 - 1, 7, 31), (0x0123456789ABCDEF, 2**32 - 1, 2**32 - 1)],
)
def test_token_words_follow_the_definition(seed: int, choice: int, position: int) -> None:
    words = token_words(seed, choice, position, 103)
    assert words.tolist() == [token_word(seed, choice, position, each) for each in range(103)]


def test_seed_choice_and_position_each_change_the_words() -> None:
    keys = [(5, 0, 0), (6, 0, 0), (5 + (1 << 32), 0, 0), (5, 1, 0), (5, 0, 1)]
    words = {tuple(token_words(*key, 8).tolist()) for key in keys}
    assert len(words) == len(keys)


def test_noise_is_finite_at_both_ends_and_gumbel_in_between() -> None:
    noise = gumbel_noise(11, 0, 0, 200_000)
    assert np.isfinite(noise).all()
    # Mean and variance of the standard Gumbel distribution, within five standard errors.
    variance = math.pi**2 / 6
    assert abs(noise.mean() - np.euler_gamma) < 5 * math.sqrt(variance / len(noise))
    assert abs(noise.var() - variance) < 5 * math.sqrt(4.4 * variance**2 / len(noise))
