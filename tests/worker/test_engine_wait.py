"""A worker waits at most 30 s for an engine."""

import pytest

from proto.errors import ProcessDiedError
from worker.worker import ENGINE_SECONDS, EngineWait


class Case:
    def __init__(self):
        self.now = 100.0
        self.wait = EngineWait(lambda: self.now)


def test_no_wait_with_an_engine():
    case = Case()
    case.now += 1e6
    assert case.wait.seconds_left() is None


def test_the_wait_ends_with_an_error_after_its_limit():
    case = Case()
    case.wait.begin()
    assert case.wait.seconds_left() == ENGINE_SECONDS == 30
    case.now += 29
    assert case.wait.seconds_left() == 1
    case.now += 1
    with pytest.raises(ProcessDiedError, match="no engine has connected for 30 s"):
        case.wait.seconds_left()


def test_an_engine_that_died_before_connecting_does_not_restart_the_wait():
    case = Case()
    case.wait.begin()
    case.now += 20
    case.wait.begin()
    assert case.wait.seconds_left() == 10


def test_a_connected_engine_ends_the_wait_until_it_is_lost():
    case = Case()
    case.wait.begin()
    case.now += 20
    case.wait.end()
    case.now += 20
    assert case.wait.seconds_left() is None
    case.wait.begin()
    assert case.wait.seconds_left() == 30
