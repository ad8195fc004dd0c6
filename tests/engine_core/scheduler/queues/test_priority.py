"""Order by priority and arrival, which blocked requests keep, in both queues."""

import random

import pytest

from engine_core.scheduler.queues.policies import FCFSQueue, PriorityQueue
from tests.fakes.engine_harness import EngineHarness

QUEUES = [FCFSQueue, PriorityQueue]


def requests_with(priorities, arrivals=None):
    engine = EngineHarness()
    arrivals = arrivals or [0.0] * len(priorities)
    return [
        engine.add_one([1], priority=priority, arrival_time=float(arrival))
        for priority, arrival in zip(priorities, arrivals, strict=True)
    ]


def popped(queue):
    return [queue.pop_request() for _ in range(queue.num_ready)]


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [0, 0, 0], [1, 2, 0]),
        ([0, 0, 0], [3, 1, 2], [1, 2, 0]),
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
        ([-1, 0, -(1 << 63)], [0, 0, 0], [2, 0, 1]),
        ([5, 5, 5], [1, 1, 1], [0, 1, 2]),
    ],
)
def test_order_by_priority_arrival_and_id(priorities, arrivals, order):
    requests = requests_with(priorities, arrivals)
    queue = PriorityQueue()
    for each in reversed(requests):
        queue.add_request(each)
    expected = [requests[each] for each in order]
    assert list(queue) == expected
    assert popped(queue) == expected


def test_a_preempted_request_has_no_precedence_by_priority():
    first, second = requests_with([0, 1])
    queue = PriorityQueue()
    queue.add_request(first)
    queue.requeue_preempted(second)
    assert popped(queue) == [first, second]


@pytest.mark.parametrize("queue_class", QUEUES)
def test_a_blocked_request_keeps_its_position(queue_class):
    requests = requests_with([0] * 5)
    queue = queue_class()
    for each in requests:
        queue.add_request(each)
    queue.park_request(requests[0])
    queue.park_request(requests[3])
    assert queue.peek_request() is requests[1]
    assert list(queue) == requests
    assert (len(queue), queue.num_ready) == (5, 3)
    assert queue.pop_request() is requests[1]
    queue.unpark_request(requests[3])
    queue.unpark_request(requests[0])
    assert popped(queue) == [requests[0], requests[2], requests[3], requests[4]]
    assert len(queue) == 0


def test_a_preempted_request_goes_before_a_blocked_one():
    requests = requests_with([0] * 3)
    queue = FCFSQueue()
    for each in requests[1:]:
        queue.add_request(each)
    queue.park_request(requests[1])
    queue.requeue_preempted(requests[0])
    queue.unpark_request(requests[1])
    assert popped(queue) == requests


@pytest.mark.parametrize("queue_class", QUEUES)
def test_a_blocked_request_can_be_removed(queue_class):
    first, second = requests_with([0, 0])
    queue = queue_class()
    queue.add_request(first)
    queue.add_request(second)
    queue.park_request(first)
    queue.remove_request(first)
    assert list(queue) == [second]
    with pytest.raises(KeyError):
        queue.unpark_request(first)
    with pytest.raises(KeyError):
        queue.remove_request(first)


@pytest.mark.parametrize("queue_class", QUEUES)
def test_a_request_queued_again_is_queued_once(queue_class):
    first, second = requests_with([0, 0])
    queue = queue_class()
    queue.add_request(first)
    queue.add_request(second)
    for _ in range(3):
        queue.park_request(first)
        queue.unpark_request(first)
        queue.remove_request(second)
        queue.requeue_preempted(second)
    assert sorted(each.seq_id for each in popped(queue)) == [first.seq_id, second.seq_id]


@pytest.mark.parametrize("queue_class", QUEUES)
def test_stale_entries_do_not_accumulate(queue_class):
    first, *others = requests_with([0] * 50)
    queue = queue_class()
    queue.add_request(first)
    for _ in range(100):
        for each in others:
            queue.add_request(each)
        for each in others:
            queue.remove_request(each)
    assert len(queue._heap) < 200
    assert popped(queue) == [first]


@pytest.mark.parametrize("queue_class", QUEUES)
def test_any_sequence_of_operations_agrees_with_a_sorted_list(queue_class):
    rng = random.Random(7)
    requests = requests_with([rng.randrange(3) for _ in range(20)])
    queue = queue_class()
    line, aside, key, last = [], [], {}, 0
    for step in range(1500):
        outside = [each for each in requests if each not in line and each not in aside]
        action = rng.choice(["add", "restore", "pop", "remove", "park", "unpark"])
        if action in ("add", "restore") and outside:
            each = rng.choice(outside)
            last = step + 1 if action == "add" else -step - 1
            key[each] = last if queue_class is FCFSQueue else each.order
            (queue.add_request if action == "add" else queue.requeue_preempted)(each)
            line.append(each)
        elif action == "pop" and line:
            assert queue.peek_request() is min(line, key=key.get)
            line.remove(queue.pop_request())
        elif action == "remove" and line + aside:
            each = rng.choice(line + aside)
            queue.remove_request(each)
            (line if each in line else aside).remove(each)
        elif action == "park" and line:
            each = rng.choice(line)
            queue.park_request(each)
            line.remove(each)
            aside.append(each)
        elif action == "unpark" and aside:
            each = aside.pop(rng.randrange(len(aside)))
            queue.unpark_request(each)
            line.append(each)
        assert list(queue) == sorted(line + aside, key=key.get)
        assert queue.num_ready == len(line)
