"""The replay of sessions: the same turns under each policy, and prefixes that meet at an engine."""

from rich.console import Console

from tests.benchmarks.routing import Traffic, measure_decisions, replay_policies


def test_sessions_find_more_of_their_prefixes_with_the_router_than_without():
    outcomes = replay_policies(Traffic(12, 1.0, seed=3), 4, 0.9, Console(quiet=True))
    assert len({outcome.num_turns for outcome in outcomes.values()}) == 1
    assert all(0.0 < outcome.hit_rate < 1.0 for outcome in outcomes.values())
    found = {name: outcome.hit_rate for name, outcome in outcomes.items()}
    assert found["router"] > found["least load"]
    assert found["router, sessions unnamed"] > found["round robin"]


def test_decisions_are_measured_in_parts():
    times = measure_decisions(num_engines=3, num_tokens=200, number=20)
    assert {len(values) for values in times.values()} == {20}
    assert set(times) >= {"hash", "choose", "note", "choose (thread)"}
    assert all(value >= 0 for values in times.values() for value in values)
