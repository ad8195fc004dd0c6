"""A worker without an engine holds its memory for 30 s, and no longer."""

import pytest

from proto.errors import ProcessDiedError
from worker.worker import ENGINE_SECONDS, EngineWait


class Case:
    def __init__(self):
        self.now = 100.0
        self.wait = EngineWait(lambda: self.now)


def test_with_an_engine_nothing_is_waited_for():
    case = Case()
    case.now += 1e6
    assert case.wait.seconds_left() is None


def test_it_ends_when_none_has_come():
    case = Case()
    case.wait.begin()
    assert case.wait.seconds_left() == ENGINE_SECONDS == 30
    case.now += 29
    assert case.wait.seconds_left() == 1
    case.now += 1
    with pytest.raises(ProcessDiedError, match="no engine has connected for 30 s"):
        case.wait.seconds_left()


def test_one_that_died_before_it_came_is_no_engine():
    case = Case()
    case.wait.begin()
    case.now += 20
    case.wait.begin()
    assert case.wait.seconds_left() == 10


def test_one_that_came_in_time_ends_the_wait_until_it_is_lost():
    case = Case()
    case.wait.begin()
    case.now += 20
    case.wait.end()
    case.now += 20
    assert case.wait.seconds_left() is None
    case.wait.begin()
    assert case.wait.seconds_left() == 30
