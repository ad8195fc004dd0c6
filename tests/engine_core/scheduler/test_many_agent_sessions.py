"""Ten thousand agent sessions that never return hold at most their share of the pool."""

import random

import pytest

from proto.messages.engine_io import AgentHint
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness

AT_ONCE = 25
USABLE = 400
LONG_MS = 120_000.0
LIES = ("ls", "", "pytest", "a tool that nobody has", "x" * 256)


@pytest.mark.parametrize(
    ("num_sessions", "ttl_ms"),
    [
        (500, None),
        (500, LONG_MS),
        pytest.param(10_000, None, marks=pytest.mark.suite("lives")),
        pytest.param(10_000, LONG_MS, marks=pytest.mark.suite("lives")),
    ],
)
def test_agent_sessions_that_never_return(num_sessions: int, ttl_ms: float | None) -> None:
    """Some of them report a quick tool; one in a hundred returns at once, so that tools appear
    quick. Afterwards the pool is as before."""
    rng, clock = random.Random(9), FakeClock()
    engine = EngineHarness(
        num_blocks=USABLE + 1, scheduling_policy="continuum", clock=clock, max_num_seqs=AT_ONCE
    )
    scheduler, most_pinned, num_taken, preempted = engine.scheduler, 0, 0, 0
    for first in range(0, num_sessions, AT_ONCE):
        turns = []
        for number in range(first, first + AT_ONCE):
            prompt = rng.choices(range(1, 900), k=rng.randrange(16, 80))
            hint = AgentHint(f"session {number}", False, ttl_ms)
            turns.append(engine.add_one(prompt, 2, agent=hint, arrival_time=clock()))
        engine.run()
        for number, turn in enumerate(turns):
            tool = rng.choice(LIES)
            scheduler.report_tool(turn.request_id, turn.agent.session, tool)
            if number == 0 and not first % 100:
                again = [*turn.all_token_ids, 7]
                engine.add_one(again, 2, agent=turn.agent, arrival_time=clock())
        engine.run()
        stats = scheduler.pop_stats()
        most_pinned = max(most_pinned, stats.num_pinned_blocks)
        num_taken += stats.num_pins_taken
        preempted += stats.num_preemptions
        clock.now += 0.5
    assert len(engine.final) == num_sessions + num_sessions // 100
    assert preempted == 0
    assert 0 < most_pinned <= USABLE // 2
    assert num_taken >= (num_sessions if ttl_ms else 1)
    clock.now += LONG_MS / 500
    engine.add_one([1, 2, 3], 1)
    engine.run()
    assert scheduler.pop_stats().num_pinned_blocks == 0
    engine.assert_idle()


def test_a_pool_full_of_pins_serves_as_if_it_were_empty() -> None:
    """The same requests, which need the whole pool, take the same steps."""
    steps = []
    for num_sessions in (0, 60):
        engine = EngineHarness(num_blocks=USABLE + 1, scheduling_policy="continuum")
        rng = random.Random(5)
        for number in range(num_sessions):
            hint = AgentHint(f"session {number}", False, LONG_MS)
            engine.add_one([number, *rng.choices(range(1, 900), k=60)], 2, agent=hint)
            engine.run()
        before = engine.scheduler.pop_stats().num_pinned_blocks
        assert (before > USABLE // 4) == bool(num_sessions)
        for number in range(4):
            prompt = [950 + number, *random.Random(number).choices(range(1, 900), k=98 * 16)]
            engine.add_one(prompt, 8)
        steps.append(engine.run())
        stats = engine.scheduler.pop_stats()
        assert stats.num_preemptions == 0
        assert bool(stats.num_pins_given_up) == bool(num_sessions)
    assert steps[0] == steps[1]
