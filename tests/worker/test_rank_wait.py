"""When a rank reports that it waits for other ranks."""

from tests.fakes.clock import FakeClock
from worker.parallel.group import LONG_WAIT_SECONDS
from worker.worker import RankWaitTimer


def test_a_slow_step_is_reported_once() -> None:
    clock = FakeClock()
    timer = RankWaitTimer(clock)
    assert not timer.is_due(7)
    clock.now += 0.9 * LONG_WAIT_SECONDS
    assert not timer.is_due(7)
    clock.now += 0.2 * LONG_WAIT_SECONDS
    assert timer.is_due(7)
    assert not timer.is_due(7)
    assert not timer.is_due(8)
    clock.now += 2 * LONG_WAIT_SECONDS
    assert timer.is_due(8)


def test_no_step_in_flight_is_no_wait() -> None:
    clock = FakeClock()
    timer = RankWaitTimer(clock)
    for step in (None, 1, None, None, 2):
        assert not timer.is_due(step)
        clock.now += 2 * LONG_WAIT_SECONDS
