"""Beam search, compared with an exhaustive search."""

import random

import numpy as np
import pytest

from engine_core.scheduler.features.beam_search import BeamSearch, Branch
from tests.fakes.beam_reference import beam_search
from tests.fakes.paged_runner import hashed_logprobs

VOCAB_SIZE = 30


def few_tokens(token_ids):
    return hashed_logprobs(token_ids, VOCAB_SIZE)


def best(outputs, prompt, count):
    """Return the candidates that rows report for these hypotheses."""
    ids, values = [], []
    for output in outputs:
        logprobs = few_tokens(prompt + output)
        order = np.argsort(-logprobs, kind="stable")[:count].astype(np.int32)
        ids.append(order)
        values.append(logprobs[order])
    return np.stack(ids), np.stack(values)


def search(prompt, *, width, max_tokens, stop_ids=(), length_penalty=1.0, early_stopping=False):
    """Run a BeamSearch with outputs by slot, like rows."""
    beams = BeamSearch(width, max_tokens, set(stop_ids), length_penalty, early_stopping)
    outputs = [[]]
    rounds = 0
    while True:
        rounds += 1
        branches = beams.advance(*best(outputs, prompt, width + len(stop_ids)))
        if not branches:
            return [each.token_ids for each in beams.finished], rounds
        assert len(branches) == width
        outputs = [[*outputs[each.parent], each.token_id] for each in branches]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_results_are_those_of_a_search_over_all_tokens(length_penalty, early_stopping):
    draw = random.Random(f"{length_penalty} {early_stopping}")
    rounds = set()
    for _ in range(40):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(3)]
        params = {
            "width": draw.choice([1, 2, 3, 4, 7]),
            "max_tokens": draw.choice([1, 2, 9, 25]),
            "stop_ids": draw.sample(range(VOCAB_SIZE), draw.choice([0, 1, 2, 6])),
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        found, num_rounds = search(prompt, **params)
        assert found == beam_search(prompt, few_tokens, **params)
        assert len(found) == params["width"]
        rounds.add(num_rounds < params["max_tokens"])
    assert rounds == {True, False}


def row(*tokens: tuple[int, float]):
    """Return one row of candidates, [1, columns]."""
    ids, values = zip(*tokens, strict=True)
    return np.array([ids], dtype=np.int32), np.array([values], dtype=np.float32)


def rows(*several):
    ids, values = zip(*(row(*each) for each in several), strict=True)
    return np.concatenate(ids), np.concatenate(values)


def test_the_first_child_stays_and_others_take_slots_of_dropped_hypotheses():
    beams = BeamSearch(3, 9, (), 1.0, False)
    first = beams.advance(*row((5, -1), (6, -2), (7, -3)))
    assert first == [Branch(0, 5), Branch(0, 6), Branch(0, 7)]
    second = beams.advance(
        *rows(
            [(1, -9), (2, -9.5), (3, -9.6)],
            [(1, -1), (2, -1.5), (3, -9)],
            [(4, -1), (2, -9), (3, -9)],
        )
    )
    assert second == [Branch(1, 2), Branch(1, 1), Branch(2, 4)]


def test_a_finished_hypothesis_is_replaced_by_an_unfinished_one():
    beams = BeamSearch(2, 9, {0}, 0.0, False)
    assert beams.advance(*row((0, -1), (6, -2), (7, -3))) == [Branch(0, 6), Branch(0, 7)]
    assert [each.token_ids for each in beams.finished] == [[0]]


def test_an_end_that_is_not_among_the_best_counts_for_nothing():
    beams = BeamSearch(2, 9, {0}, 0.0, False)
    assert beams.advance(*row((6, -1), (7, -2), (0, -3))) == [Branch(0, 6), Branch(0, 7)]
    assert beams.finished == []


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "over"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True)],
)
def test_the_search_ends_when_no_better_hypothesis_is_possible(
    early_stopping, length_penalty, over
):
    """Finished at -1 and -1.1; the best active beam has -3: -1.5 per token, -0.3 after ten."""
    beams = BeamSearch(2, 10, {0}, length_penalty, early_stopping)
    beams.advance(*row((0, -1), (6, -1.05), (7, -1.1)))
    branches = beams.advance(*rows([(0, -0.05), (1, -1.95), (2, -8)], [(3, -4), (4, -5), (5, -8)]))
    assert (branches == []) is over


def test_all_hypotheses_end_at_max_tokens():
    beams = BeamSearch(2, 1, {0}, 1.0, "never")
    assert beams.advance(*row((6, -1), (0, -2), (7, -3))) == []
    assert [each.token_ids for each in beams.finished] == [[6], [0]]


def test_a_longer_one_may_win_by_the_length_penalty():
    def winner(length_penalty):
        beams = BeamSearch(1, 2, {0}, length_penalty, "never")
        if beams.advance(*row((0, -2), (6, -2.5))):
            beams.advance(*row((3, -0.5), (4, -9)))
        return beams.finished[0].token_ids

    assert winner(0.0) == [0]
    assert winner(1.0) == [6, 3]
