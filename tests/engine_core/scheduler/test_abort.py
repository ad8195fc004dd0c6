"""Ending requests in every state."""

from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def test_waiting_requests_leave_one_by_one():
    engine = EngineHarness()
    requests = [engine.add_one([each]) for each in range(10)]
    for left, each in zip(range(9, -1, -1), requests, strict=True):
        assert engine.scheduler.abort_request(each.request_id) == 1
        assert len(engine.scheduler.waiting) == left
        assert not engine.scheduler.has_request(each.request_id)
    engine.assert_idle()


def test_the_worker_is_notified_of_aborted_running_requests_only():
    engine = EngineHarness(max_num_seqs=1)
    running, waiting = engine.add_one([1, 2]), engine.add_one([3])
    engine.step()
    engine.scheduler.abort_request(running.request_id)
    engine.scheduler.abort_request(waiting.request_id)
    assert engine.scheduler.has_work
    output = engine.step()
    assert output.finished_seq_ids == [running.seq_id]
    assert output.total_num_scheduled_tokens == 0
    engine.assert_idle()


def test_late_tokens_of_an_aborted_request_are_dropped():
    engine = EngineHarness()
    gone, stays = engine.add_one([1, 2], max_tokens=2), engine.add_one([3], max_tokens=2)
    output = engine.scheduler.schedule()
    engine.scheduler.abort_request(gone.request_id)
    engine.collect(output)
    assert engine.tokens_of(gone) == []
    engine.run()
    assert engine.finish_reason_of(gone) is None
    assert engine.tokens_of(stays) == undisturbed([3], 2)
    engine.assert_idle()


def test_blocks_of_a_request_aborted_in_flight_can_be_used_in_the_next_step():
    engine = EngineHarness(num_blocks=3)
    gone = engine.add_one(list(range(30)))
    output = engine.scheduler.schedule()
    engine.scheduler.abort_request(gone.request_id)
    taker = engine.add_one(list(range(100, 130)), max_tokens=2)
    engine.collect(output)
    assert scheduled(engine.step()) == {taker.seq_id: 30}
    engine.run()
    assert engine.tokens_of(taker) == undisturbed(list(range(100, 130)), 2)
    engine.assert_idle()


def test_a_preempted_request_can_be_aborted():
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False)
    engine.add_one(list(range(32)), max_tokens=3)
    young = engine.add_one(list(range(100, 130)), max_tokens=3)
    engine.step()
    assert engine.step().preempted_seq_ids == [young.seq_id]
    engine.scheduler.abort_request(young.request_id)
    assert engine.step().finished_seq_ids == [young.seq_id]
    engine.run()
    engine.assert_idle()


def test_one_choice_can_be_aborted_alone():
    engine = EngineHarness()
    choices = engine.add([1, 2, 3], max_tokens=3, n=3)
    engine.step()
    engine.step()
    assert engine.scheduler.abort_request(choices[0].request_id, 1) == 1
    engine.run()
    assert [len(engine.tokens_of(each)) for each in choices] == [3, 1, 3]
    engine.assert_idle()


def test_aborting_a_finished_or_unknown_request_does_nothing():
    engine = EngineHarness()
    request = engine.add_one([1], max_tokens=1)
    engine.run()
    assert engine.scheduler.abort_request(request.request_id) == 0
    assert engine.scheduler.abort_request(12345, 7) == 0
    engine.assert_idle()


def test_a_disconnected_client_aborts_only_its_own_requests():
    engine = EngineHarness(max_num_seqs=3)
    mine = [engine.add_one([each], max_tokens=3) for each in range(3)]
    others = [engine.add_one([10 + each], max_tokens=3, front_end=1) for each in range(3)]
    engine.step()
    engine.scheduler.abort_front_end_requests(1)
    engine.run()
    assert all(len(engine.tokens_of(each)) == 3 for each in mine)
    assert all(engine.finish_reason_of(each) is None for each in others)
    engine.assert_idle()


def test_aborted_in_every_order_they_have_the_tokens_they_had():
    engine = EngineHarness()
    requests = [engine.add_one([each, each], max_tokens=100) for each in range(10)]
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    for each in order:
        output = engine.scheduler.schedule()
        engine.scheduler.abort_request(requests[each].request_id)
        engine.collect(output)
    assert [len(engine.tokens_of(requests[each])) for each in order] == list(range(10))
    engine.run()
    engine.assert_idle()
