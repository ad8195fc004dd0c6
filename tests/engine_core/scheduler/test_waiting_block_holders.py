"""Requests that hold blocks without running, and the order in which they lose them."""

import pytest

from engine_core.scheduler.preemption import WaitingBlockHolders
from tests.fakes.kv_requests import Requests, make_manager


@pytest.fixture
def manager():
    """19 usable blocks."""
    return make_manager(20)


@pytest.fixture
def idle(manager):
    return WaitingBlockHolders(manager)


@pytest.fixture
def four(idle, manager):
    """Return four idle requests with one block each, in this order."""
    requests = Requests(manager)
    found = [requests.make([each]) for each in range(4)]
    for each in found:
        requests.schedule(each)
        idle.add_idle(each)
    return found


def have_blocks(requests):
    return [each.num_computed_tokens > 0 for each in requests]


def test_the_longest_idle_session_is_evicted_first(idle, manager, four):
    assert idle.free_idle()
    assert idle.free_idle()
    assert have_blocks(four) == [False, False, True, True]
    assert manager.num_available_blocks == 17
    assert len(idle) == 2


def test_pending_requests_lose_blocks_last_and_the_newest_first(idle, four):
    for each in four[:3]:
        idle.add_pending(each)
    assert idle.any_idle
    assert idle.free_idle()
    assert not idle.any_idle
    assert not idle.free_idle()
    assert idle.free_pending(four[2])
    assert have_blocks(four) == [True, False, True, False]
    assert idle.free_pending(four[2])
    assert not idle.free_pending(four[2])
    assert have_blocks(four) == [False, False, True, False]


def test_requests_without_blocks_are_skipped(idle, manager, four):
    nothing = Requests(manager).make([7])
    nothing.seq_id = len(four)
    idle.add_idle(nothing)
    idle.add_pending(nothing)
    assert len(idle) == 4
    for each in four:
        idle.forget_request(each)
    assert len(idle) == 0
    assert not idle.free_idle()
    assert not idle.free_pending(nothing)


def test_all_blocks_can_be_freed_in_one_call(idle, manager, four):
    idle.add_pending(four[0])
    idle.free_all()
    assert have_blocks(four) == [False] * 4
    assert manager.usage == 0
    assert len(idle) == 0
