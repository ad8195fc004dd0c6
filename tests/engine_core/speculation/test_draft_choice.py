"""Acceptance, the cost of rows, and the choice of lengths against all choices."""

import itertools
import random

import pytest

from engine_core.speculation.acceptance import AcceptanceTable
from engine_core.speculation.draft_choice import (
    MIN_GAIN,
    StepCost,
    choose_lengths,
    needed_acceptance_prob,
)
from engine_core.speculation.proposer import Draft


def cost_of(costs: list[float]) -> StepCost:
    """Costs of 1 row, 2 rows and so on; beyond the list as the last one."""
    cost = StepCost()
    for index, row in enumerate(cost._rows):
        cost._costs[index] = costs[min(row, len(costs)) - 1]
    return cost


def draft(length: int, probability: float = 0.8, key: int = 0) -> Draft:
    acceptance_probs = [probability ** (position + 1) for position in range(length)]
    return Draft(list(range(length)), acceptance_probs, "suffix", key)


def accept(table: AcceptanceTable, probability: float, number: int, key: int = 0) -> None:
    """Record drafts of 8 tokens whose tokens are right with this probability."""
    generator = random.Random(1)
    for _ in range(number):
        right = (generator.random() < probability for _ in range(8))
        num_accepted = len(list(itertools.takewhile(bool, right)))
        table.record(draft(8, key=key), 8, num_accepted)


def learn(cost: StepCost, seconds_of, rows, repeats: int = 30, noise: float = 0.0) -> None:
    generator = random.Random(2)
    for _ in range(repeats):
        for number in rows:
            cost.learn_step(number, seconds_of(number) * (1 + noise * generator.uniform(-1, 1)))


# Acceptance


def test_an_unknown_key_is_as_its_proposer_expects():
    assert AcceptanceTable().acceptance_probs(draft(3)) == draft(3).acceptance_probs


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.7, 1.0])
def test_survival_approaches_what_is_accepted(probability):
    table = AcceptanceTable()
    accept(table, probability, 300)
    acceptance_probs = table.acceptance_probs(draft(8))
    assert acceptance_probs[0] == pytest.approx(probability, abs=0.2)
    assert acceptance_probs[3] == pytest.approx(probability**4, abs=0.2)
    assert acceptance_probs == sorted(acceptance_probs, reverse=True)
    assert all(0.0 <= value <= 1.0 for value in acceptance_probs)


def test_keys_are_apart_and_old_acceptance_is_forgotten():
    table = AcceptanceTable()
    accept(table, 0.0, 100, key=1)
    assert table.acceptance_probs(draft(2, key=2)) == draft(2).acceptance_probs
    assert table.acceptance_probs(draft(2, key=1))[0] < 0.1
    accept(table, 1.0, 100, key=1)
    assert table.acceptance_probs(draft(2, key=1))[0] > 0.7


def test_buckets_after_the_first_wrong_token_learn_nothing():
    """Only the first token was wrong; the others resemble it until they are seen."""
    table = AcceptanceTable()
    for _ in range(100):
        table.record(draft(8), 8, 0)
    known = table._keys["suffix", 0]
    assert known.expected[1:] == [0.0] * 6


def test_a_draft_that_was_cut_counts_as_far_as_it_was_verified():
    table = AcceptanceTable()
    table.record(draft(8), 2, 2)
    known = table._keys["suffix", 0]
    assert known.accepted[:3] == [1.0, 1.0, 0.0]


# Costs


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_are_learnt_from_steps(noise):
    cost = StepCost()
    learn(cost, lambda rows: 0.01 * (1 + 0.05 * (rows - 1)), (1, 2, 4, 8, 16), noise=noise)
    for rows in (2, 3, 8, 12, 16):
        assert cost.cost(rows) == pytest.approx(1 + 0.05 * (rows - 1), rel=0.12)


def test_costs_grow_with_rows_whatever_was_measured():
    cost, generator = StepCost(), random.Random(3)
    for _ in range(2000):
        cost.learn_step(generator.randrange(1, 3000), generator.uniform(0.001, 0.1))
    costs = [cost.cost(rows) for rows in range(1, 20_000)]
    assert all(a <= b for a, b in itertools.pairwise(costs))
    assert costs[0] == pytest.approx(1.0)


def test_longer_contexts_change_no_ratio():
    """All steps take three times as long, but only one row count is seen meanwhile."""
    cost = StepCost()
    learn(cost, lambda rows: 0.01 * (1 + 0.1 * (rows - 1)), (1, 4, 8))
    before = cost.cost(8)
    for step in range(400):
        cost.learn_step(1, 0.01 * (1 + step / 200))
    assert cost.cost(8) == pytest.approx(before, rel=0.25)


def test_one_slow_step_changes_little():
    cost = StepCost()
    learn(cost, lambda rows: 0.01 * (1 + 0.1 * (rows - 1)), (1, 4))
    before = cost.cost(4)
    cost.learn_step(4, 5.0)
    assert cost.cost(4) <= before * 1.3


def test_steps_without_rows_or_time_are_ignored():
    cost = StepCost()
    cost.learn_step(0, 1.0)
    cost.learn_step(3, 0.0)
    assert cost.cost(8) == StepCost().cost(8)


# The choice


def rate(acceptance_probs, lengths, num_requests, cost) -> float:
    tokens = sum(sum(one[:length]) for one, length in zip(acceptance_probs, lengths, strict=True))
    return (num_requests + tokens) / cost.cost(num_requests + sum(lengths))


def random_acceptance_probs(generator, num_drafts: int) -> list[list[float]]:
    acceptance_probs = []
    for _ in range(num_drafts):
        values = [generator.random()]
        while len(values) < generator.randrange(1, 5):
            values.append(values[-1] * generator.uniform(0.3, 1.0))
        acceptance_probs.append(values)
    return acceptance_probs


@pytest.mark.parametrize("seed", range(60))
def test_no_other_lengths_have_more_tokens_per_time(seed):
    """Against all choices, with costs that grow in any way."""
    generator = random.Random(seed)
    num_drafts = generator.randrange(1, 5)
    num_requests = num_drafts + generator.randrange(4)
    acceptance_probs = random_acceptance_probs(generator, num_drafts)
    costs = list(itertools.accumulate(generator.choice([0.0, 0.1, 0.4]) for _ in range(30)))
    cost = cost_of([1.0 + value for value in costs])
    lengths = choose_lengths(acceptance_probs, num_requests, 0, cost)
    choices = itertools.product(*(range(len(one) + 1) for one in acceptance_probs))
    best = max(rate(acceptance_probs, choice, num_requests, cost) for choice in choices)
    none = rate(acceptance_probs, [0] * num_drafts, num_requests, cost)
    found = rate(acceptance_probs, lengths, num_requests, cost)
    if any(lengths):
        assert found == pytest.approx(best)
    else:
        assert best <= none * (1 + MIN_GAIN) + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_beside_prompts_the_extra_time_is_weighed(seed):
    """The gain at the rate of the best step without prompts is highest, over all choices."""
    generator = random.Random(seed)
    acceptance_probs = random_acceptance_probs(generator, 3)
    costs = list(itertools.accumulate(generator.choice([0.0, 0.1, 0.4]) for _ in range(80)))
    cost = cost_of([1.0 + value for value in costs])
    lengths = choose_lengths(acceptance_probs, 3, 40, cost)
    choices = list(itertools.product(*(range(len(one) + 1) for one in acceptance_probs)))
    price = max(rate(acceptance_probs, choice, 3, cost) for choice in choices)

    def gain(choice) -> float:
        tokens = sum(
            sum(one[:length]) for one, length in zip(acceptance_probs, choice, strict=True)
        )
        return tokens - price * (cost.cost(43 + sum(choice)) - cost.cost(43))

    best = max(map(gain, choices))
    assert gain(lengths) == pytest.approx(best) or (not any(lengths) and best <= 3 * MIN_GAIN)


def test_nothing_is_drafted_where_nothing_can_pay():
    """Beyond 16 rows a row costs as much as it brings: a full batch."""
    steep = cost_of([1.0 + max(0, rows - 16) * 0.08 for rows in range(1, 400)])
    certain = [[1.0] * 4 for _ in range(20)]
    assert needed_acceptance_prob(20, 0, 80, steep) > 1.0
    assert choose_lengths(certain, 20, 0, steep) == [0] * 20
    assert needed_acceptance_prob(4, 0, 16, steep) < 1.0
    assert sum(choose_lengths(certain[:4], 4, 0, steep)) == 12


@pytest.mark.parametrize(("unit_seconds", "num_drafts"), [(0.001, 96), (0.05, 40), (0.2, 10)])
def test_drafts_lengthen_no_step_by_more_than_their_limit(unit_seconds, num_drafts):
    """A further row takes a twentieth of the time of one row here."""
    cost = cost_of([1 + 0.05 * row for row in range(200)])
    cost.unit_seconds = unit_seconds
    certain = [[1.0] * 8] * 12
    assert sum(choose_lengths(certain, 12, 0, cost)) == num_drafts
    assert sum(choose_lengths(certain, 12, 30, cost)) <= num_drafts


def test_without_drafts_there_is_nothing_to_choose():
    assert choose_lengths([], 5, 0, StepCost()) == []
