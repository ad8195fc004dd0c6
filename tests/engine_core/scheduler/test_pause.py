"""Both pause modes, and requests during a pause."""

from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def test_running_requests_finish_and_none_begins():
    engine = EngineHarness(max_num_seqs=2)
    requests = [engine.add_one([each], max_tokens=3) for each in range(4)]
    engine.step()
    engine.scheduler.pause("finish_running")
    late = engine.add_one([9], max_tokens=1)
    while engine.scheduler.has_work:
        engine.step()
    assert [engine.finish_reason_of(each) for each in requests[:2]] == [FinishReason.LENGTH] * 2
    assert engine.scheduler.num_unfinished == 3
    assert {each.status for each in (*requests[2:], late)} == {RequestStatus.WAITING_FOR_RESUME}
    assert engine.scheduler.pop_stats().num_deferred == 3
    engine.scheduler.resume()
    assert list(engine.scheduler.waiting) == [*requests[2:], late]
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


def test_a_request_that_has_begun_comes_back_after_a_preemption():
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False)
    old = engine.add_one(list(range(32)), max_tokens=3)
    young = engine.add_one(list(range(100, 130)), max_tokens=3)
    engine.step()
    fresh = engine.add_one([5], max_tokens=1)
    engine.scheduler.pause("finish_running")
    while engine.scheduler.has_work:
        engine.step()
    assert young.num_preemptions == 1
    for each in (old, young):
        assert engine.finish_reason_of(each) is FinishReason.LENGTH
    assert engine.finish_reason_of(fresh) is None


def test_a_freeze_schedules_nothing_and_keeps_everything():
    engine = EngineHarness()
    running = engine.add_one(list(range(40)), max_tokens=5)
    engine.step()
    engine.scheduler.pause("freeze")
    waiting = engine.add_one([5], max_tokens=2)
    assert not engine.scheduler.has_work
    assert engine.step().total_num_scheduled_tokens == 0
    assert running.num_computed_tokens == 40
    assert engine.kv_cache.usage > 0
    assert engine.scheduler.num_unfinished == 2
    assert engine.scheduler.pop_stats().num_deferred == 1, "it does not wait for capacity"
    engine.scheduler.resume()
    assert scheduled(engine.step()) == {running.seq_id: 1, waiting.seq_id: 1}
    engine.run()
    assert engine.tokens_of(running) == undisturbed(list(range(40)), 5)
    engine.assert_idle()


def test_frozen_requests_can_be_aborted_and_the_worker_is_notified():
    engine = EngineHarness()
    running, waiting = engine.add_one([1]), engine.add_one([2])
    engine.scheduler.pause("finish_running")
    engine.scheduler.resume()
    engine.step()
    engine.scheduler.pause("freeze")
    engine.scheduler.abort_request(running.request_id)
    engine.scheduler.abort_request(waiting.request_id)
    assert engine.scheduler.has_work
    assert set(engine.step().finished_seq_ids) == {running.seq_id, waiting.seq_id}
    engine.assert_idle()


def test_a_pause_can_change_its_mode():
    engine = EngineHarness(max_num_seqs=1)
    running = engine.add_one([1], max_tokens=4)
    waiting = engine.add_one([2], max_tokens=1)
    engine.step()
    engine.scheduler.pause("freeze")
    engine.scheduler.pause("finish_running")
    while engine.scheduler.has_work:
        engine.step()
    assert engine.finish_reason_of(running) is FinishReason.LENGTH
    engine.scheduler.pause("freeze")
    engine.scheduler.resume()
    engine.run()
    assert engine.finish_reason_of(waiting) is FinishReason.LENGTH
    engine.assert_idle()


def test_a_paused_request_that_is_aborted_is_not_let_back_in():
    engine = EngineHarness()
    request = engine.add_one([1])
    engine.scheduler.pause("finish_running")
    engine.step()
    engine.scheduler.abort_request(request.request_id)
    engine.scheduler.resume()
    engine.assert_idle()
