"""Durations of tools, compared with a search of all of them, and corner cases of the rule."""

import math
import random
from statistics import correlation

import pytest

from engine_core.scheduler.features.retention.ttl_rule import (
    MAX_TOOLS,
    MAX_TOOLS_OF_TENANT,
    MIN_SAMPLES,
    MIN_TOOL_SAMPLES,
    WINDOW,
    Durations,
    ToolDurations,
    TurnCounts,
)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_time_is_that_of_a_search(seed):
    rng = random.Random(seed)
    durations, kept = Durations(), []
    for _ in range(rng.choice([1, 5, WINDOW + 200])):
        seconds = rng.choice([rng.expovariate(1.0), rng.uniform(0, 50), math.inf])
        durations.add_sample(seconds)
        kept = [*kept, seconds][-WINDOW:]
    benefit = rng.choice([0.0, 0.3, 2.0, 20.0])

    def gain(tau):
        return sum(each <= tau for each in kept) / len(kept) * benefit - tau

    candidates = [0.0, *(each for each in kept if each < math.inf)]
    best = max(candidates, key=gain)
    tau, gained = durations.best_ttl(benefit)
    assert gained == pytest.approx(max(0.0, gain(best)))
    assert gain(tau) == pytest.approx(max(gain(0.0), gain(best))) or tau == 0.0
    assert len(durations) == len(kept)


def test_a_tool_has_its_own_estimate_after_enough_samples():
    times = ToolDurations()
    assert times.best_ttl("a", math.e) == (pytest.approx(1.0), pytest.approx(math.e - 2.0))
    assert times.best_ttl("a", 0.9) == (0.0, 0.0)
    for _ in range(MIN_SAMPLES):
        times.add_sample("b", 3.0)
    assert times.best_ttl("a", 10.0)[0] == 3.0
    for _ in range(MIN_TOOL_SAMPLES + 1):
        times.add_sample("a", 0.5)
    assert times.best_ttl("a", 10.0)[0] == 0.5
    for _ in range(MIN_TOOL_SAMPLES + 1):
        times.add_sample("never", math.inf)
    assert times.best_ttl("never", 1000.0) == (0.0, 0.0)


def test_tools_are_forgotten_when_there_are_too_many():
    times = ToolDurations()
    for each in range(10 * MAX_TOOLS):
        times.add_sample(f"{each % 300:016x}/tool {each}", 1.0)
    assert len(times) == MAX_TOOLS


def test_invented_names_of_one_tenant_do_not_make_the_tools_of_another_forgotten():
    times = ToolDurations()
    own = f"{1:016x}/shell"
    for _ in range(MIN_TOOL_SAMPLES + 1):
        times.add_sample(own, 0.5)
    for tenant in range(2, 7):
        for each in range(2 * MAX_TOOLS_OF_TENANT):
            times.add_sample(f"{tenant:016x}/tool {each}", 3.0)
    for each in range(2 * MAX_TOOLS):
        times.add_sample(f"tool/{each}", 3.0)
    assert times.median(own) == 0.5
    assert len(times) <= MAX_TOOLS


@pytest.mark.parametrize("seed", range(5))
def test_eta_is_the_correlation_of_turns_behind_and_before(seed):
    rng = random.Random(seed)
    counts, behind, before = TurnCounts(), [], []
    for _ in range(50):
        number = rng.randint(1, 20)
        counts.add_session(number)
        behind += range(1, number + 1)
        before += [number - k for k in range(1, number + 1)]
    assert counts.eta == pytest.approx(min(1.0, max(0.0, -correlation(behind, before))))


def test_eta_is_one_until_something_is_known():
    counts = TurnCounts()
    assert counts.eta == 1.0
    counts.add_session(1)
    assert counts.eta == 1.0
    counts.add_session(8)
    assert 0.0 <= counts.eta <= 1.0
