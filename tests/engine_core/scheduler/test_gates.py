"""Requests blocked by gates: blocked, unblocked, and admitted in order."""

import pytest

from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.gates import FakeGate
from tests.fakes.paged_runner import undisturbed

GRAMMAR = RequestStatus.WAITING_FOR_GRAMMAR


def test_a_blocked_request_does_not_block_others():
    gate = FakeGate()
    engine = EngineHarness(max_num_seqs=1, gates=[gate])
    requests = [engine.add_one([each], max_tokens=2) for each in range(4)]
    gate.blocked = set(requests[:2])
    assert scheduled(engine.step()) == {requests[2].seq_id: 1}
    assert list(engine.scheduler.waiting) == [requests[0], requests[1], requests[3]]
    assert [each.status for each in requests[:2]] == [gate.status] * 2
    stats = engine.scheduler.pop_stats()
    assert (stats.num_waiting, stats.num_deferred) == (3, 2)


def test_blocked_requests_are_not_asked_about_again():
    gate = FakeGate()
    engine = EngineHarness(gates=[gate])
    held, other = engine.add_one([1]), engine.add_one([2], max_tokens=9)
    gate.blocked = {held}
    for _ in range(5):
        engine.step()
    assert gate.checked == [held, other]
    gate.unblock(held)
    assert held.status is RequestStatus.WAITING
    assert held.seq_id in scheduled(engine.step())
    engine.run()
    assert gate.admitted_tokens == {held: 1, other: 1}
    assert set(gate.released) == {held, other}
    engine.assert_idle()


def test_unblocked_requests_keep_the_order_of_arrival():
    grammar, remote = FakeGate(GRAMMAR), FakeGate()
    engine = EngineHarness(max_num_seqs=1, gates=[grammar, remote])
    requests = [engine.add_one([each], max_tokens=1) for each in range(4)]
    grammar.blocked, remote.blocked = set(requests[:2]), {requests[2]}
    assert scheduled(engine.step()) == {requests[3].seq_id: 1}
    tail = engine.add_one([9], max_tokens=1)
    remote.unblock(requests[2])
    grammar.unblock(requests[1], requests[0])
    assert scheduled(engine.step()) == {requests[0].seq_id: 1}
    assert list(engine.scheduler.waiting) == [requests[1], requests[2], tail]


def test_by_priority_an_unblocked_request_is_ordered_by_priority():
    gate = FakeGate()
    engine = EngineHarness(scheduling_policy="priority", max_num_seqs=1, gates=[gate])
    low, high, middle = (engine.add_one([each], 1, priority=each) for each in (2, 0, 1))
    gate.blocked = {high, middle}
    assert scheduled(engine.step()) == {low.seq_id: 1}
    last = engine.add_one([5], priority=1)
    gate.unblock(middle, high)
    assert list(engine.scheduler.waiting) == [high, middle, last]


def test_no_step_while_every_request_is_blocked():
    gate = FakeGate()
    engine = EngineHarness(gates=[gate])
    request = engine.add_one([1], max_tokens=1)
    gate.blocked = {request}
    assert engine.scheduler.has_work
    assert engine.step().total_num_scheduled_tokens == 0
    assert not engine.scheduler.has_work
    assert engine.scheduler.num_unfinished == 1
    gate.unblock(request)
    assert engine.scheduler.has_work
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("wake_first", [False, True])
def test_a_blocked_request_can_be_aborted(wake_first):
    gate = FakeGate()
    engine = EngineHarness(gates=[gate])
    request = engine.add_one([1])
    gate.blocked = {request}
    engine.step()
    if wake_first:
        gate.unblock(request)
    engine.scheduler.abort_request(request.request_id)
    gate.unblock(request)  # late, without effect
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert gate.released == [request]
    engine.assert_idle()


def test_unblocking_an_unblocked_request_does_nothing():
    gate = FakeGate()
    engine = EngineHarness(max_num_seqs=1, gates=[gate])
    running, waiting = engine.add_one([1]), engine.add_one([2])
    engine.step()
    gate.unblock(running, waiting)
    assert running.status is RequestStatus.RUNNING
    assert waiting.status is RequestStatus.WAITING
    assert list(engine.scheduler.waiting) == [waiting]


def test_blocking_and_unblocking_keeps_the_preempted_status():
    gate = FakeGate()
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False, gates=[gate])
    old = engine.add_one(list(range(32)), max_tokens=4)
    young = engine.add_one(list(range(100, 130)), max_tokens=4)
    engine.step()
    gate.blocked = {young}
    assert engine.step().preempted_seq_ids == [young.seq_id]
    engine.step()
    engine.step()
    engine.step()
    assert young.status is gate.status
    assert not engine.scheduler.running
    gate.unblock(young)
    assert young.status is RequestStatus.PREEMPTED
    engine.run()
    for each in (old, young):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 4)
    engine.assert_idle()
