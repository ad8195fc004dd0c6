"""After a death of the workers all requests are queued again, and get the same tokens."""

import pytest

from engine_core.request import RequestStatus
from proto.messages.engine_io import EventType
from proto.messages.kv_events import AllBlocksCleared, BlockStored
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.events import event_types
from tests.fakes.kv_events import event_log
from tests.fakes.paged_runner import undisturbed

BOTH = pytest.mark.parametrize("overlapped", [False, True])


def prompt_of(number, length=20):
    return [(number * 50 + position) % 900 for position in range(length)]


@BOTH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_all_requests_are_queued_in_order_with_nothing_computed(overlapped, policy):
    engine = EngineHarness(max_num_seqs=3, scheduling_policy=policy, async_scheduling=overlapped)
    requests = [engine.add_one(prompt_of(each), 8, arrival_time=each) for each in range(5)]
    for _ in range(3):
        engine.step()
    had = {each.seq_id: list(each.output_token_ids) for each in requests}
    assert engine.lose_workers() == {}
    assert engine.scheduler.running == []
    assert list(engine.scheduler.waiting) == requests
    assert {each.num_computed_tokens for each in requests} == {0}
    assert {each.num_output_placeholders for each in requests} == {0}
    assert engine.kv_cache.usage == 0
    output = engine.send()
    assert output.epoch == 2
    assert output.cached_requests.seq_ids == []
    assert output.finished_seq_ids == output.preempted_seq_ids == output.block_copies == []
    assert [new.seq_id for new in output.new_requests] == [each.seq_id for each in requests[:3]]
    for new in output.new_requests:
        assert new.output_token_ids == had[new.seq_id]
        assert new.num_computed_tokens == 0, "no hit in an empty cache"
    engine.receive()
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 8)
    engine.assert_idle()


@BOTH
def test_a_prompt_half_computed_and_a_request_that_had_begun_to_wait(overlapped):
    engine = EngineHarness(max_num_batched_tokens=16, async_scheduling=overlapped)
    requests = [engine.add_one(prompt_of(each, 50), 3) for each in range(3)]
    engine.step()
    engine.step()
    engine.lose_workers()
    assert scheduled(engine.step()) == {requests[0].seq_id: 16}
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


@BOTH
def test_the_last_token_that_was_in_flight_is_computed_again(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    request = engine.add_one([1, 2], 2)
    engine.step()
    engine.send()
    engine.lose_workers()
    engine.run()
    assert engine.tokens_of(request) == undisturbed([1, 2], 2)
    engine.assert_idle()


@BOTH
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_choices_share_their_prompt_again(overlapped, num_steps):
    engine = EngineHarness(max_num_batched_tokens=32, async_scheduling=overlapped)
    choices = engine.add(prompt_of(0, 40), 6, n=3, ignore_eos=True)
    for _ in range(num_steps):
        engine.step()
    engine.lose_workers()
    engine.run()
    for each in choices:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 6, each.choice)
    computed = sum(each.total_num_scheduled_tokens for each in engine.runner.steps)
    assert computed < 39 + 3 * 7 + 3 * num_steps, "the prompt was computed once"
    engine.assert_idle()


@BOTH
def test_a_request_that_waited_for_a_shared_prefix(overlapped):
    engine = EngineHarness(long_prefill_token_threshold=20, async_scheduling=overlapped)
    requests = [engine.add_one([*prompt_of(0, 64), each], 3) for each in range(3)]
    engine.step()
    engine.step()
    assert any(each.status is RequestStatus.WAITING_FOR_PREFIX for each in requests)
    engine.lose_workers()
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


@BOTH
def test_sessions_at_rest_lose_their_blocks_and_no_tokens(overlapped):
    engine = EngineHarness(async_scheduling=overlapped)
    idle = engine.add_one(prompt_of(0), 2, resumable=True)
    while engine.scheduler.has_work or engine.in_flight:
        engine.step()
    engine.lose_workers()
    assert not engine.scheduler.has_work
    engine.add_session_input(idle, [8], 2, last=True)
    engine.run()
    first = undisturbed(idle.prompt_token_ids, 2)
    merged = [*idle.prompt_token_ids, first[0], 8]
    assert engine.tokens_of(idle) == first + undisturbed(merged, 2)
    engine.assert_idle()


def test_a_late_abort_and_a_new_request_while_there_are_no_workers():
    engine = EngineHarness()
    leaving, staying = engine.add_one([1], 5), engine.add_one([2], 5)
    engine.step()
    engine.lose_workers()
    engine.scheduler.abort_request(leaving.request_id)
    late = engine.add_one([3], 5)
    engine.run()
    assert engine.tokens_of(staying) == undisturbed([2], 5)
    assert engine.tokens_of(late) == undisturbed([3], 5)
    assert len(engine.tokens_of(leaving)) == 1
    engine.assert_idle()


def test_windows_are_refilled():
    engine = EngineHarness(windows=(None, 24), block_size=8, num_blocks=60)
    requests = [engine.add_one(prompt_of(each, 60), 10) for each in range(2)]
    for _ in range(4):
        engine.step()
    engine.lose_workers()
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 10)
    engine.assert_idle()


def test_subscribers_are_notified_of_the_empty_cache():
    log = event_log()
    engine = EngineHarness(observers=[log])
    engine.add_one(prompt_of(0, 40), 5)
    engine.step()
    (stored,) = log.pop_events()
    assert isinstance(stored, BlockStored)
    engine.lose_workers()
    assert log.pop_events()[-1] == AllBlocksCleared()


def test_each_event_is_reported_once():
    engine = EngineHarness()
    request = engine.add_one(prompt_of(0), 4)
    engine.step()
    engine.lose_workers()
    engine.run()
    first, *later = engine.outputs[request.request_id, 0]
    assert event_types(first) == [EventType.QUEUED, EventType.SCHEDULED]
    assert event_types(later[0]) == [EventType.PREEMPTED, EventType.SCHEDULED]
    assert [each.events for each in later[1:]] == [()] * 2
