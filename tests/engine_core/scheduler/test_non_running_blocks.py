"""Who holds blocks without running, and in which order they lose them."""

import pytest

from engine_core.scheduler.preemption import NonRunningBlocks
from tests.fakes.kv_requests import Requests, make_manager


@pytest.fixture
def manager():
    """19 usable blocks."""
    return make_manager(20)


@pytest.fixture
def idle(manager):
    return NonRunningBlocks(manager)


@pytest.fixture
def four(idle, manager):
    """Four requests with one block each, at rest in this order."""
    requests = Requests(manager)
    found = [requests.make([each]) for each in range(4)]
    for each in found:
        requests.schedule(each)
        idle.add_resting(each)
    return found


def have_blocks(requests):
    return [each.num_computed_tokens > 0 for each in requests]


def test_the_longest_rest_goes_first(idle, manager, four):
    assert idle.free_resting()
    assert idle.free_resting()
    assert have_blocks(four) == [False, False, True, True]
    assert manager.num_free_blocks == 17
    assert len(idle) == 2


def test_those_in_line_are_asked_last_the_last_one_first(idle, four):
    for each in four[:3]:
        idle.move_to_queued(each)
    assert idle.any_resting
    assert idle.free_resting()
    assert not idle.any_resting
    assert not idle.free_resting()
    assert idle.free_queued(four[2])
    assert have_blocks(four) == [True, False, True, False]
    assert idle.free_queued(four[2])
    assert not idle.free_queued(four[2])
    assert have_blocks(four) == [False, False, True, False]


def test_who_has_none_or_is_forgotten_is_not_asked(idle, manager, four):
    nothing = Requests(manager).make([7])
    idle.add_resting(nothing)
    idle.move_to_queued(nothing)
    assert len(idle) == 4
    for each in four:
        idle.forget_request(each)
    assert len(idle) == 0
    assert not idle.free_resting()
    assert not idle.free_queued(nothing)


def test_all_at_once(idle, manager, four):
    idle.move_to_queued(four[0])
    idle.free_all()
    assert have_blocks(four) == [False] * 4
    assert manager.usage == 0
    assert len(idle) == 0
