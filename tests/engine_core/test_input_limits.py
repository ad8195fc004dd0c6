"""Limits of the queue, and deadlines."""

from proto.engine_io import FinishReason
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EOS
from tests.fakes.input_desk import Desk, refused
from tests.fakes.messages import request


def test_a_full_queue_refuses_with_one_output_and_takes_again_when_it_is_emptier():
    desk = Desk(max_num_seqs=1, max_num_queued_reqs=3)
    for request_id in (1, 2, 3, 4):
        desk.take(request(request_id), client=1)
    assert refused(desk) == [(4, "queue_full")]
    (client, output) = desk.outputs.outputs[0]
    assert (client, output.finish_reason) == (1, FinishReason.ERROR)
    assert output.error.param == "max_num_queued_reqs"
    assert output.error.retry_after_seconds >= 1
    desk.engine.step()
    desk.take(request(5))
    desk.take(request(6))
    assert refused(desk) == [(4, "queue_full"), (6, "queue_full")]
    desk.engine.run()
    desk.engine.assert_at_rest()


def test_all_choices_of_a_request_are_accepted_or_none():
    desk = Desk(max_num_queued_reqs=4)
    desk.take(request(1, n=2))
    desk.take(request(2, n=3))
    desk.take(request(3, n=2))
    assert desk.outputs.accepted == [(0, 1), (0, 3)]
    assert refused(desk) == [(2, "queue_full")]
    assert desk.engine.scheduler.num_unfinished == 4


def test_a_request_resumed_after_a_crash_is_never_refused():
    desk = Desk(max_num_queued_reqs=1)
    for request_id in (1, 2, 3):
        desk.take(request(request_id, accepted=True))
    desk.take(request(4))
    assert [each for _, each in desk.outputs.accepted] == [1, 2, 3]
    assert refused(desk) == [(4, "queue_full")], "those who came again do take places"


def test_choices_finished_before_the_crash_take_no_queue_slot():
    desk = Desk(max_num_queued_reqs=1)
    desk.take(request(1, n=2, output_token_ids=((1,), (7, EOS)), finished_choices=(0,)))
    desk.take(request(2))
    assert desk.outputs.accepted == [(0, 1), (0, 2)]


def test_a_failed_submission_releases_its_queue_slots(monkeypatch):
    desk = Desk(max_num_queued_reqs=2)
    desk.take(request(1))
    add = desk.input_processor._add_choice
    monkeypatch.setattr(desk.input_processor, "_add_choice", lambda *given: add(*given) or 1 // 0)
    desk.take(request(2))
    monkeypatch.undo()
    desk.take(request(3))
    assert desk.outputs.accepted == [(0, 1), (0, 3)]


def test_an_expired_request_ends_with_one_output():
    clock = FakeClock()
    desk = Desk(clock=clock, max_num_seqs=1)
    desk.take(request(1, n=2, max_tokens=50, deadline=130.0), client=1)
    desk.take(request(2, queue_deadline=110.0))
    desk.engine.step()
    assert not desk.input_processor.end_overdue_requests()
    clock.now = 115.0
    assert desk.input_processor.end_overdue_requests()
    assert refused(desk) == [(2, "queue_timeout")]
    clock.now = 130.0
    assert desk.input_processor.end_overdue_requests()
    assert refused(desk) == [(2, "queue_timeout"), (1, "time_limit")]
    assert desk.outputs.outputs[1][0] == 1
    desk.engine.step()
    desk.engine.assert_at_rest()


def test_a_time_limit_that_passed_while_there_was_no_engine():
    clock = FakeClock()
    desk = Desk(clock=clock)
    desk.take(request(1, deadline=90.0, accepted=True, output_token_ids=((5,),)))
    assert desk.outputs.accepted == [(0, 1)]
    assert desk.input_processor.end_overdue_requests()
    assert refused(desk) == [(1, "time_limit")]
    desk.engine.assert_at_rest()
