"""Continuum policy: turns in the order of their agent sessions, those with retained KV first."""

from engine_core.scheduler.queues.policies import LEAD_SECONDS, OLDEST_SECONDS, ContinuumQueue
from tests.fakes.engine_harness import EngineHarness


def turns(*sessions):
    """Return requests from (arrival of the session, arrival of the turn, KV is retained)."""
    engine = EngineHarness()
    made = []
    for first_arrival, arrival, is_kept in sessions:
        request = engine.add_one([1], arrival_time=float(arrival))
        request.agent_session_arrival = float(first_arrival)
        request.finds_retained_prefix = is_kept
        made.append(request)
    return made


def order(queue, requests):
    return [requests.index(queue.pop_request()) for _ in range(queue.num_ready)]


def filled(requests):
    queue = ContinuumQueue()
    for each in reversed(requests):
        queue.add_request(each)
    return queue


def test_requests_are_ordered_by_session_and_retained_prefixes_go_first():
    requests = turns((5, 5, False), (1, 9, False), (4, 8, True), (3, 3, False), (2, 10, True))
    assert order(filled(requests), requests) == [4, 2, 1, 3, 0]


def test_retained_prefixes_of_younger_sessions_cause_no_starvation():
    late = LEAD_SECONDS + 1
    requests = turns((0, 0, False), (late, late, True))
    assert order(filled(requests), requests) == [0, 1]


def test_an_endless_session_causes_no_starvation():
    bound = OLDEST_SECONDS + LEAD_SECONDS
    requests = turns((5, 5, False), (0, bound, True), (0, bound + 10, True))
    assert order(filled(requests), requests) == [1, 0, 2]


def test_preempted_requests_are_at_the_head_in_their_old_order():
    requests = turns((1, 1, True), (2, 2, False), (3, 3, False))
    queue = filled(requests[:1])
    queue.requeue_preempted(requests[2])
    queue.requeue_preempted(requests[1])
    assert order(queue, requests) == [1, 2, 0]


def test_a_turn_moves_when_its_prefix_is_retained_or_lost():
    requests = turns((1, 1, True), (2, 2, False), (3, 3, False))
    queue = filled(requests)
    requests[0].finds_retained_prefix, requests[2].finds_retained_prefix = False, True
    for each in (requests[0], requests[2]):
        queue.reorder_request(each)
    assert len(queue) == 3
    assert order(queue, requests) == [2, 0, 1]
