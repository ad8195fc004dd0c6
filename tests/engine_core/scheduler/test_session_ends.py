"""The end of sessions: closed, aborted, oversized input, idle timeout."""

import msgspec
import pytest

from proto.errors import InvalidRequestError
from proto.messages.engine_io import FinishReason
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.paged_runner import undisturbed
from tests.fakes.sessions import expected_turns, flat, idle_session, open_session


def test_closed_at_rest_it_ends_with_the_reason_of_its_last_turn():
    engine = EngineHarness()
    session = idle_session(engine, [1, 2], 3)
    (final,) = engine.add_session_input(session, [], last=True)
    assert (final.new_token_ids, final.goes_on) == ([], False)
    assert final.finish_reason is FinishReason.LENGTH
    engine.assert_idle()


def test_closed_during_a_turn_it_ends_with_it():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 3)
    engine.step()
    assert engine.add_session_input(session, [], last=True) == []
    engine.run()
    assert len(engine.outputs[session.request_id, 0]) == 3
    assert engine.finish_reason_of(session) is FinishReason.LENGTH
    engine.assert_idle()


def test_the_last_input_may_have_tokens():
    engine = EngineHarness()
    session = idle_session(engine, [1, 2], 1)
    engine.add_session_input(session, [3], 2, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns(([1, 2], 1), ([3], 2)))
    engine.assert_idle()


def test_a_closed_session_takes_no_more():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 3, front_end=2)
    sessions = engine.scheduler.resumable_sessions
    assert sessions.accepts_input(2, session.request_id)
    assert not sessions.accepts_input(1, session.request_id), (
        "the session belongs to another front end"
    )
    assert not sessions.accepts_input(2, session.request_id + 1)
    engine.add_session_input(session, [3], last=True)
    assert not sessions.accepts_input(2, session.request_id)


@pytest.mark.parametrize("when", ["during a turn", "at rest", "in line"])
def test_it_can_be_aborted_and_leaves_nothing(when):
    engine = EngineHarness()
    session = idle_session(engine, list(range(20)))
    if when != "at rest":
        engine.add_session_input(session, [1, 2], 5)
    if when == "during a turn":
        engine.step()
    assert engine.scheduler.abort_request(session.request_id) == 1
    if engine.scheduler.has_work:
        engine.step()
    assert not engine.scheduler.resumable_sessions.accepts_input(0, session.request_id)
    assert engine.finish_reason_of(session) is None
    engine.assert_idle()


def test_sessions_end_with_their_front_end():
    engine = EngineHarness()
    mine, theirs = (
        idle_session(engine, [1, 2], front_end=1),
        idle_session(engine, [3, 4], front_end=2),
    )
    engine.scheduler.abort_front_end_requests(1)
    assert not engine.scheduler.resumable_sessions.accepts_input(1, mine.request_id)
    engine.add_session_input(theirs, [5], 1, last=True)
    engine.run()
    engine.assert_idle()


def test_tokens_under_way_when_it_is_aborted_are_dropped():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 1)
    output = engine.scheduler.schedule()
    engine.scheduler.abort_request(session.request_id)
    assert engine.collect(output) == {}
    engine.step()
    engine.assert_idle()


def test_input_that_can_never_fit_ends_the_session_when_it_comes():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, list(range(10)), 4)
    engine.add_session_input(session, list(range(10)), 2)
    with pytest.raises(InvalidRequestError, match=r"\(31 tokens\).*\(2\).*33 tokens.* 32 "):
        engine.add_session_input(session, list(range(11)), 2)


def test_input_that_has_become_a_turn_is_counted_once():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, [1], 1)
    engine.add_session_input(session, list(range(14)), 1)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.add_session_input(session, list(range(15)), 2) == []


def test_input_that_does_not_fit_behind_the_outputs_ends_the_session_after_the_turn():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, list(range(10)), 6)
    engine.add_session_input(session, list(range(14)), 4)
    while engine.scheduler.has_work:
        engine.step()
    *_, end_of_turn, final = engine.outputs[session.request_id, 0]
    assert end_of_turn.goes_on
    assert final.finish_reason is FinishReason.ERROR
    assert (final.error.kind, final.error.param) == ("invalid_request", "max_tokens")
    assert "prompt (29 tokens)" in final.error.message
    assert "32" in final.error.message
    assert engine.tokens_of(session) == undisturbed(list(range(10)), 6)
    engine.assert_idle()


def test_the_longest_session_there_can_be():
    engine = EngineHarness(max_model_len=32, num_blocks=3)
    session = idle_session(engine, list(range(20)), 4)
    engine.add_session_input(session, list(range(6)), 3, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(
        expected_turns((list(range(20)), 4), (list(range(6)), 3))
    )


def test_a_session_at_rest_for_too_long_ends_with_an_error():
    clock = FakeClock()
    engine = EngineHarness(clock=clock, session_timeout=30.0)
    sessions = engine.scheduler.resumable_sessions
    old = idle_session(engine, [1, 2], front_end=1)
    clock.now += 20.0
    young = idle_session(engine, [3, 4], front_end=2)
    clock.now += 9.9
    assert sessions.end_idle_sessions() == {}
    clock.now += 0.1
    overdue = sessions.end_idle_sessions()
    engine.record_outputs(overdue)
    ((front_end, (final,)),) = overdue.items()
    assert (front_end, final.request_id) == (1, old.request_id)
    assert final.finish_reason is FinishReason.ERROR
    assert "30 seconds" in final.error.message
    assert "--session-timeout" in final.error.message
    clock.now += 20.0
    engine.record_outputs(sessions.end_idle_sessions())
    assert engine.finish_reason_of(young) is FinishReason.ERROR
    engine.assert_idle()


def test_the_idle_timeout_counts_from_the_end_of_every_turn():
    clock = FakeClock()
    engine = EngineHarness(clock=clock, session_timeout=30.0)
    session = idle_session(engine, [1, 2], 1)
    clock.now += 29.0
    engine.add_session_input(session, [3], 2)
    clock.now += 50.0
    engine.step()
    assert engine.scheduler.resumable_sessions.end_idle_sessions() == {}, "a turn has no time limit"
    engine.step()
    clock.now += 29.0
    assert engine.scheduler.resumable_sessions.end_idle_sessions() == {}
    clock.now += 1.0
    assert len(engine.scheduler.resumable_sessions.end_idle_sessions()[0]) == 1


def test_a_session_ends_on_a_closing_input_also_while_all_is_frozen():
    engine = EngineHarness()
    session = idle_session(engine, [1, 2])
    engine.scheduler.pause("freeze")
    assert len(engine.add_session_input(session, [], last=True)) == 1
    engine.assert_idle()


def test_the_final_output_of_a_session_has_no_mark():
    """Messages distinguish the end of a turn from the end of the request."""
    engine = EngineHarness()
    session = idle_session(engine, [1], 1)
    (end_of_turn,) = engine.outputs[session.request_id, 0]
    (final,) = engine.add_session_input(session, [], last=True)
    assert msgspec.structs.asdict(end_of_turn)["goes_on"]
    assert [end_of_turn.finish_reason, final.finish_reason] == [FinishReason.LENGTH] * 2
    assert not final.goes_on
