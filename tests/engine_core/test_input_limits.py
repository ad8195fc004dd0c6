"""Limits of the queue, and deadlines."""

from proto.messages.engine_io import FinishReason
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EOS
from tests.fakes.input_harness import InputProcessorHarness, refused
from tests.fakes.messages import request


def test_a_full_queue_refuses_with_one_output_and_takes_again_when_it_is_emptier():
    harness = InputProcessorHarness(max_num_seqs=1, max_num_queued_reqs=3)
    for request_id in (1, 2, 3, 4):
        harness.receive(request(request_id), front_end=1)
    assert refused(harness) == [(4, "queue_full")]
    (front_end, output) = harness.outputs.outputs[0]
    assert (front_end, output.finish_reason) == (1, FinishReason.ERROR)
    assert output.error.param == "max_num_queued_reqs"
    assert output.error.retry_after_seconds >= 1
    harness.engine.step()
    harness.receive(request(5))
    harness.receive(request(6))
    assert refused(harness) == [(4, "queue_full"), (6, "queue_full")]
    harness.engine.run()
    harness.engine.assert_idle()


def test_all_choices_of_a_request_are_accepted_or_none():
    harness = InputProcessorHarness(max_num_queued_reqs=4)
    harness.receive(request(1, n=2))
    harness.receive(request(2, n=3))
    harness.receive(request(3, n=2))
    assert harness.outputs.accepted == [(0, 1), (0, 3)]
    assert refused(harness) == [(2, "queue_full")]
    assert harness.engine.scheduler.num_unfinished == 4


def test_a_request_resumed_after_a_crash_is_never_refused():
    harness = InputProcessorHarness(max_num_queued_reqs=1)
    for request_id in (1, 2, 3):
        harness.receive(request(request_id, accepted=True))
    harness.receive(request(4))
    assert [each for _, each in harness.outputs.accepted] == [1, 2, 3]
    assert refused(harness) == [(4, "queue_full")], "resent requests count"


def test_choices_finished_before_the_crash_take_no_queue_slot():
    harness = InputProcessorHarness(max_num_queued_reqs=1)
    harness.receive(request(1, n=2, output_token_ids=((1,), (7, EOS)), finished_choices=(0,)))
    harness.receive(request(2))
    assert harness.outputs.accepted == [(0, 1), (0, 2)]


def test_a_failed_submission_releases_its_queue_slots(monkeypatch):
    harness = InputProcessorHarness(max_num_queued_reqs=2)
    harness.receive(request(1))
    add = harness.input_processor._add_choice
    monkeypatch.setattr(
        harness.input_processor, "_add_choice", lambda *given: add(*given) or 1 // 0
    )
    harness.receive(request(2))
    monkeypatch.undo()
    harness.receive(request(3))
    assert harness.outputs.accepted == [(0, 1), (0, 3)]


def test_an_expired_request_ends_with_one_output():
    clock = FakeClock()
    harness = InputProcessorHarness(clock=clock, max_num_seqs=1)
    harness.receive(request(1, n=2, max_tokens=50, deadline=130.0), front_end=1)
    harness.receive(request(2, queue_deadline=110.0))
    harness.engine.step()
    assert not harness.input_processor.end_overdue_requests()
    clock.now = 115.0
    assert harness.input_processor.end_overdue_requests()
    assert refused(harness) == [(2, "queue_timeout")]
    clock.now = 130.0
    assert harness.input_processor.end_overdue_requests()
    assert refused(harness) == [(2, "queue_timeout"), (1, "time_limit")]
    assert harness.outputs.outputs[1][0] == 1
    harness.engine.step()
    harness.engine.assert_idle()


def test_a_time_limit_that_passed_while_there_was_no_engine():
    clock = FakeClock()
    harness = InputProcessorHarness(clock=clock)
    harness.receive(request(1, deadline=90.0, accepted=True, output_token_ids=((5,),)))
    assert harness.outputs.accepted == [(0, 1)]
    assert harness.input_processor.end_overdue_requests()
    assert refused(harness) == [(1, "time_limit")]
    harness.engine.assert_idle()
