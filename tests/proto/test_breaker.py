"""When somebody who does not answer is left alone, and for how long."""

from proto.breaker import MOST, Breaker
from tests.fakes.clock import FakeClock


def test_it_opens_for_a_while_and_then_one_failure_opens_it_for_twice_as_long() -> None:
    clock = FakeClock()
    breaker = Breaker(2.0, clock=clock)
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open
    assert breaker.seconds_left == 2.0
    clock.now += 2.0
    assert not breaker.is_open
    breaker.failed()
    assert breaker.seconds_left == 4.0


def test_it_is_never_open_for_more_than_a_multiple() -> None:
    clock = FakeClock()
    breaker = Breaker(1.0, clock=clock)
    for _ in range(20):
        breaker.failed()
        clock.now += breaker.seconds_left
    breaker.failed()
    assert breaker.seconds_left == MOST


def test_failures_of_what_was_asked_before_count_once() -> None:
    clock = FakeClock()
    breaker = Breaker(1.0, clock=clock)
    for _ in range(5):
        breaker.failed()
    assert breaker.seconds_left == 1.0


def test_some_failures_in_a_row_may_be_allowed() -> None:
    breaker = Breaker(1.0, allowed=1, clock=FakeClock())
    breaker.failed()
    assert not breaker.is_open
    breaker.succeeded()
    breaker.failed()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open


def test_success_closes_it_and_forgets() -> None:
    clock = FakeClock()
    breaker = Breaker(1.0, clock=clock)
    breaker.failed()
    clock.now += 1.0
    breaker.failed()
    breaker.succeeded()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.seconds_left == 1.0
