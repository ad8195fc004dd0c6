"""When somebody who does not answer is left alone, and for how long."""

from proto.circuit_breaker import MAX_BACKOFF, CircuitBreaker
from tests.fakes.clock import FakeClock


def test_it_opens_for_a_while_and_then_one_failure_opens_it_for_twice_as_long() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(2.0, clock=clock)
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.is_open
    assert breaker.seconds_left == 2.0
    clock.now += 2.0
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.seconds_left == 4.0


def test_it_is_never_open_for_more_than_a_multiple() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    for _ in range(20):
        breaker.record_failure()
        clock.now += breaker.seconds_left
    breaker.record_failure()
    assert breaker.seconds_left == MAX_BACKOFF


def test_failures_of_what_was_asked_before_count_once() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    for _ in range(5):
        breaker.record_failure()
    assert breaker.seconds_left == 1.0


def test_some_failures_in_a_row_may_be_allowed() -> None:
    breaker = CircuitBreaker(1.0, allowed=1, clock=FakeClock())
    breaker.record_failure()
    assert not breaker.is_open
    breaker.record_success()
    breaker.record_failure()
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.is_open


def test_success_closes_it_and_forgets() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    breaker.record_failure()
    clock.now += 1.0
    breaker.record_failure()
    breaker.record_success()
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.seconds_left == 1.0
