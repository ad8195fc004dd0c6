"""When a rank says that it waits."""

from tests.fakes.clock import FakeClock
from worker.parallel.group import LONG_WAIT_SECONDS, RankWaitReporter


def test_a_step_that_takes_long_is_told_of_once() -> None:
    clock, told = FakeClock(), []
    wait_reporter = RankWaitReporter(2, lambda: told.append(clock.now), clock)
    wait_reporter.await_step(7)
    clock.now += 0.9 * LONG_WAIT_SECONDS
    wait_reporter.await_step(7)
    assert told == []
    clock.now += 0.2 * LONG_WAIT_SECONDS
    wait_reporter.await_step(7)
    wait_reporter.await_step(7)
    assert len(told) == 1
    wait_reporter.await_step(8)
    clock.now += 2 * LONG_WAIT_SECONDS
    wait_reporter.await_step(8)
    assert len(told) == 2


def test_nobody_waits_between_two_steps_or_alone() -> None:
    clock, told = FakeClock(), []
    among_others, alone = (
        RankWaitReporter(size, lambda: told.append(clock.now), clock) for size in (2, 1)
    )
    for step in (None, 1, None, None, 2):
        for each in (among_others, alone):
            each.await_step(step)
        clock.now += 2 * LONG_WAIT_SECONDS
    alone.await_step(2)
    assert told == []
