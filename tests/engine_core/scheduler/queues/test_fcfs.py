"""First come, first served, and the return of preempted requests."""

import pytest

from engine_core.scheduler.queues.policies import FCFSQueue
from tests.fakes.engine_harness import EngineHarness


@pytest.fixture
def requests():
    engine = EngineHarness()
    return [engine.add_one([each]) for each in range(5)]


def test_order_of_arrival(requests):
    queue = FCFSQueue()
    for each in requests:
        queue.add_request(each)
    assert list(queue) == requests
    assert queue.peek_request() is requests[0]
    assert [queue.pop_request() for _ in requests] == requests
    assert len(queue) == 0


def test_preempted_requests_keep_their_order_at_the_head(requests):
    queue = FCFSQueue()
    for each in requests[3:]:
        queue.add_request(each)
    for each in reversed(requests[:3]):  # the youngest is preempted first
        queue.requeue_preempted(each)
    assert list(queue) == requests


def test_requests_can_be_removed_anywhere(requests):
    queue = FCFSQueue()
    for each in requests:
        queue.add_request(each)
    for index in (2, 0, 4):
        queue.remove_request(requests[index])
    assert list(queue) == [requests[1], requests[3]]
    assert queue.peek_request() is requests[1]
    with pytest.raises(KeyError):
        queue.remove_request(requests[0])
