"""The circuit breaker opens after failures, for pauses that double up to a limit."""

from proto.runtime.circuit_breaker import MAX_BACKOFF, CircuitBreaker
from tests.fakes.clock import FakeClock


def test_a_failure_after_the_pause_doubles_the_pause() -> None:
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


def test_the_pause_is_capped_at_max_backoff() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    for _ in range(20):
        breaker.record_failure()
        clock.now += breaker.seconds_left
    breaker.record_failure()
    assert breaker.seconds_left == MAX_BACKOFF


def test_failures_while_open_do_not_lengthen_the_pause() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    for _ in range(5):
        breaker.record_failure()
    assert breaker.seconds_left == 1.0


def test_allowed_failures_in_a_row_do_not_open_it() -> None:
    breaker = CircuitBreaker(1.0, allowed=1, clock=FakeClock())
    breaker.record_failure()
    assert not breaker.is_open
    breaker.record_success()
    breaker.record_failure()
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.is_open


def test_success_closes_it_and_resets_the_pause() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(1.0, clock=clock)
    breaker.record_failure()
    clock.now += 1.0
    breaker.record_failure()
    breaker.record_success()
    assert not breaker.is_open
    breaker.record_failure()
    assert breaker.seconds_left == 1.0
