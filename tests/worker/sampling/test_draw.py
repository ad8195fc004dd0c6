"""The keyed draw: definition, distribution, independence of the batch."""

import math

import numpy as np
import pytest
import torch

from tests.worker.sampling.philox_words import token_word
from tests.worker.sampling.settings import backend_of, each_backend, row_params
from worker.sampling.row_params import RowParams


def keys_of(seeds, choice: int = 0, positions=0, temperature=1.0) -> RowParams:
    seed = np.asarray(seeds, dtype=np.uint64)
    return row_params(
        len(seed), seed=seed, choice=choice, position=positions, temperature=temperature
    )


@each_backend
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 1000])
def test_a_drawn_token_is_the_argmax_of_the_definition(variant, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 3
    seeds = [3, 2**64 - 1, 2**32, 17, 0x123456789]
    temperature = np.array([0.3, 1.0, 1.7, 5.0, 1e-4], dtype=np.float32)
    drawn = backend_of(variant).draw(
        logits, np.arange(5), keys_of(seeds, 2, [0, 1, 9, 4, 2], temperature)
    )
    for row, (seed, position) in enumerate(zip(seeds, [0, 1, 9, 4, 2], strict=True)):
        scores = []
        for token_id in range(vocab_size):
            uniform = (token_word(seed, 2, position, token_id) + 0.5) * 2.0**-32
            score = float(logits[row, token_id]) / float(temperature[row])
            scores.append(score - math.log(-math.log(uniform)))
        assert drawn[row] == scores.index(max(scores))


@each_backend
def test_backends_agree_over_a_whole_vocabulary(variant) -> None:
    assert_draws_equal_the_reference(variant, 24, 49152)


@each_backend
def test_backends_agree_on_nearly_equal_best_tokens(variant) -> None:
    """Among 2,000 rows some have two best tokens that differ by a few hundredths."""
    assert_draws_equal_the_reference(variant, 2000, 64)


def assert_draws_equal_the_reference(variant, count: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.1, 8, count)[:, None]
    logits = torch.randn(count, vocab_size, generator=generator) * spread
    keys = keys_of(np.arange(count) * 977, positions=np.arange(count))
    arguments = (logits, np.arange(count), keys)
    drawn = backend_of(variant).draw(*arguments)
    assert drawn.tolist() == backend_of("reference").draw(*arguments).tolist()
    assert len(set(drawn.tolist())) > 4


@each_backend
def test_frequencies_follow_the_softmax(variant) -> None:
    """Chi-square over 8,000 draws of one distribution of eight tokens."""
    draws, temperature = 8_000, 0.8
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0]).repeat(draws, 1)
    drawn = backend_of(variant).draw(
        logits,
        np.arange(draws),
        keys_of(np.full(draws, 99), positions=np.arange(draws), temperature=temperature),
    )
    expected = (logits[0].double() / temperature).softmax(0).numpy() * draws
    observed = np.bincount(drawn, minlength=8)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < 24.3  # 0.1 % of the chi-square distribution with 7 degrees of freedom


@each_backend
def test_a_draw_does_not_depend_on_the_row_in_the_batch(variant) -> None:
    backend = backend_of(variant)
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(9, 777, generator=generator)
    keys = keys_of(np.arange(9) + 40)
    batch = backend.draw(logits, np.arange(9), keys)
    order = np.array([4, 0, 8, 2])
    some = backend.draw(logits, order, keys_of(keys["seed"][order]))
    assert some.tolist() == batch[order].tolist()
    alone = [
        int(backend.draw(logits[row : row + 1], np.array([0]), keys_of([row + 40]))[0])
        for row in range(9)
    ]
    assert alone == batch.tolist()


@each_backend
def test_filtered_tokens_are_never_drawn(variant) -> None:
    logits = torch.full((200, 300), float("-inf"))
    logits[:, 7], logits[:, 250] = -50.0, -51.0
    drawn = backend_of(variant).draw(logits, np.arange(200), keys_of(np.arange(200)))
    assert set(drawn.tolist()) == {7, 250}


@each_backend
def test_strided_rows_are_read_in_place(variant) -> None:
    wide = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    keys = keys_of(np.arange(6))
    part = backend_of(variant).draw(wide[:, :333], np.arange(6), keys)
    copy = backend_of(variant).draw(wide[:, :333].contiguous(), np.arange(6), keys)
    assert part.tolist() == copy.tolist()
