"""Sessions: input in parts, one turn for each, idle in between."""

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason, SessionInput
from proto.messages.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EOS, EngineHarness, scheduled
from tests.fakes.events import first_events, num_cached_tokens
from tests.fakes.paged_runner import hashed_token, undisturbed
from tests.fakes.sessions import current, expected_turns, flat, idle_session, open_session


def scripted(*tokens):
    """Return a next token for each position after the third."""
    return lambda token_ids, choice: tokens[len(token_ids) - 3]


def test_the_next_turn_computes_only_new_tokens():
    """STR-06, STR-08."""
    engine = EngineHarness(next_token=scripted(10, 11, 0, 20, 21))
    session = open_session(engine, [1, 2, 3], 8, stop_token_ids=(11, 21))
    assert scheduled(engine.step()) == {session.seq_id: 3}
    assert scheduled(engine.step()) == {session.seq_id: 1}
    (_, end_of_turn) = engine.outputs[session.request_id, 0]
    assert (end_of_turn.new_token_ids, end_of_turn.finish_reason) == ([11], FinishReason.STOP)
    assert end_of_turn.goes_on
    assert end_of_turn.stop_reason == 11

    following = current(engine, session)
    assert following.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert engine.kv_cache.block_ids(following.seq_id) == [[1]]
    params = SamplingParams(max_tokens=8, stop_token_ids=(21,))
    message = SessionInput(1, session.request_id, [4, 5], params)
    assert engine.scheduler.resumable_sessions.add_input(message) == []
    assert following.status is RequestStatus.WAITING
    output = engine.step()
    assert following.status is RequestStatus.RUNNING
    assert output.finished_seq_ids == [session.seq_id]
    (new,) = output.new_requests
    assert (new.prompt_token_ids, new.output_token_ids) == ([1, 2, 3, 10, 4, 5], [])
    assert (new.num_computed_tokens, new.num_scheduled_tokens) == (4, 2)
    assert new.block_ids == [[1]]
    assert new.sampling_params is params
    assert message.prompt_token_ids == [4, 5]
    assert new.prompt_token_ids is not following.all_token_ids
    assert engine.tokens_of(session) == [10, 11, 20]
    engine.step()
    assert engine.tokens_of(session) == [10, 11, 20, 21]
    assert new.prompt_token_ids == [1, 2, 3, 10, 4, 5]


def test_indices_and_max_tokens_count_from_the_start_of_the_turn():
    """STR-03."""
    engine = EngineHarness()
    session = open_session(engine, [1, 2, 3], 2)
    engine.add_session_input(session, [4], 5)
    engine.add_session_input(session, [5, 6], 1, last=True)
    engine.run()
    expected = expected_turns(([1, 2, 3], 2), ([4], 5), ([5, 6], 1))
    outputs = engine.outputs[session.request_id, 0]
    assert [each.token_index for each in outputs] == [0, 1, 0, 1, 2, 3, 4, 0]
    assert [each.goes_on for each in outputs] == [0, 1, 0, 0, 0, 0, 1, 0]
    assert [len(each.events) for each in outputs] == [2, 0, 2, 0, 0, 0, 0, 2]
    assert engine.tokens_of(session) == flat(expected)
    assert engine.finish_reason_of(session) is FinishReason.LENGTH
    engine.assert_idle()


def test_the_kept_tokens_count_as_cached():
    engine = EngineHarness(enable_prefix_caching=False)
    session = idle_session(engine, list(range(40)), 5)
    engine.add_session_input(session, [7, 8, 9], 1)
    engine.step()
    assert num_cached_tokens(engine.outputs[session.request_id, 0][-1]) == 44


def test_the_time_in_the_queue_counts_from_the_input():
    clock = FakeClock()
    engine = EngineHarness(clock=clock)
    session = idle_session(engine, [1, 2])
    clock.now += 20.0
    engine.add_session_input(session, [3], 1)
    clock.now += 0.5
    engine.step()
    events = engine.outputs[session.request_id, 0][-1].events
    assert events == first_events(3, 120.0, 120.5)


def test_at_rest_there_is_no_work_but_an_unfinished_request():
    engine = EngineHarness()
    session = idle_session(engine, list(range(20)))
    assert not engine.scheduler.has_work
    assert engine.scheduler.num_unfinished == 1
    assert engine.scheduler.running == []
    assert engine.runner.rows == {}, "the turn is reported to the worker as finished"
    stats = engine.scheduler.pop_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 1, 1)
    assert stats.kv_cache_usage > 0
    assert engine.scheduler.has_request(session.request_id)
    assert check(engine.kv_cache) == []


def test_others_pass_a_session_at_rest_and_it_keeps_its_place():
    engine = EngineHarness(max_num_seqs=1)
    session = idle_session(engine, [1, 2])
    first, second = engine.add_one([3], 2), engine.add_one([4], 2)
    engine.step()
    assert engine.scheduler.running == [first]
    engine.add_session_input(session, [5], 1)
    waiting = list(engine.scheduler.waiting)
    assert waiting == [current(engine, session), second]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_input_that_comes_early_waits_for_the_end_of_the_turn(steps):
    """Before the first turn begins, and during it."""
    engine = EngineHarness()
    session = open_session(engine, [1, 2, 3], 3)
    for _ in range(steps):
        engine.step()
    engine.add_session_input(session, [4, 5], 2)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tokens_of(session) == flat(expected_turns(([1, 2, 3], 3), ([4, 5], 2)))
    assert current(engine, session).status is RequestStatus.WAITING_FOR_STREAMING_REQ


def test_sampling_parameters_belong_to_their_turn():
    """STR-11."""
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 2, logprobs=3)
    engine.step()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for tokens, given in ([5], params), ([6], None):
        message = SessionInput(1, session.request_id, tokens, given)
        engine.scheduler.resumable_sessions.add_input(message)
    while engine.scheduler.has_work:
        engine.step()
    sent = [new for step in engine.runner.steps for new in step.new_requests]
    assert [each.sampling_params.logprobs for each in sent] == [3, None, None]
    assert sent[1].sampling_params is sent[2].sampling_params is params


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (7, None, 14)])
def test_every_turn_equals_a_fresh_request(windows, overlapped, caching):
    engine = EngineHarness(
        block_size=4,
        windows=windows,
        enable_prefix_caching=caching,
        max_num_batched_tokens=9,
        async_scheduling=overlapped,
    )
    inputs = [(list(range(each, each + 3 + each % 7)), 1 + each % 5) for each in range(12)]
    session = open_session(engine, *inputs[0])
    for index, (tokens, max_tokens) in enumerate(inputs[1:]):
        if index % 2:
            while engine.scheduler.has_work:
                engine.step()
        engine.add_session_input(session, tokens, max_tokens)
    engine.add_session_input(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns(*inputs))
    engine.assert_idle()


@pytest.mark.parametrize("num_steps", [1, 2, 30])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_turn_that_stops_while_the_next_step_is_under_way(overlapped, num_steps):
    """That step computes the stop token, which is dropped; the next turn overwrites it."""
    engine = EngineHarness(
        block_size=4, next_token=stops_at_multiples_of_three, async_scheduling=overlapped
    )
    session = open_session(engine, [1, 2, 3, 4], 20)
    for index in range(6):
        for _ in range(num_steps):
            engine.step()
        engine.add_session_input(session, [10 + index, 11 + index, 13], 20, last=index == 5)
    engine.run()
    tokens, expected = [1, 2, 3, 4], []
    for index in range(7):
        turn = []
        while not turn or turn[-1] != EOS:
            turn.append(stops_at_multiples_of_three([*tokens, *turn], 0))
        expected += turn
        tokens += [*turn[:-1], 10 + index, 11 + index, 13]
    assert engine.tokens_of(session) == expected
    engine.assert_idle()


def stops_at_multiples_of_three(token_ids, choice):
    return hashed_token(token_ids, choice) if len(token_ids) % 3 else EOS


def test_blocks_of_a_turn_are_findable_except_dropped_tokens():
    """Blocks of 4: prompt and outputs end with a block, whose last token is dropped."""
    engine = EngineHarness(block_size=4)
    session = idle_session(engine, [1, 2, 3, 4, 5], 3)
    engine.add_session_input(session, [9, 9], 1)
    engine.step()
    dropped = [1, 2, 3, 4, 5, *undisturbed([1, 2, 3, 4, 5], 3), 7]
    other = engine.add_one(dropped, 1)
    engine.step()
    assert other.num_cached_tokens == 4
    merged = [*dropped[:7], 9, 9, 7]
    third = engine.add_one(merged, 1)
    engine.step()
    assert third.num_cached_tokens == 8
