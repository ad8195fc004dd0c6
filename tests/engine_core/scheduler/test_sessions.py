"""Sessions: input in parts, turns, rest, the end; who gets the blocks of those at rest."""

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from proto.engine_io import FinishReason, SessionInput
from proto.errors import InvalidRequestError
from proto.sampling_params import SamplingParams
from tests.fakes.engine_harness import EOS, EngineHarness, scheduled
from tests.fakes.paged_runner import hashed_token, undisturbed


class Clock:
    """Stands still until a test moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def open_session(engine, prompt, max_tokens=2, **params):
    return engine.add_one(prompt, max_tokens, resumable=True, **params)


def rest(engine, prompt, max_tokens=2, **params):
    """A session whose first turn is over and that waits for more; returns its request."""
    session = open_session(engine, prompt, max_tokens, **params)
    while engine.scheduler.has_work:
        engine.step()
    assert current(engine, session).status is RequestStatus.WAITING_FOR_STREAMING_REQ
    return session


def current(engine, session):
    """The request of the turn that goes on or comes next."""
    unfinished = [*engine.scheduler.running, *engine.scheduler.waiting]
    (found,) = [each for each in unfinished if each.request_id == session.request_id]
    return found


def turns(*inputs):
    """The tokens of a session, turn by turn, as fresh requests would give them."""
    prompt, found = [], []
    for tokens, max_tokens in inputs:
        prompt = prompt + tokens
        found.append(undisturbed(prompt, max_tokens))
        prompt = prompt + found[-1][:-1]
    return found


def flat(lists):
    return [token for each in lists for token in each]


def scripted(*tokens):
    """A next token for each position after the third."""
    return lambda token_ids, choice: tokens[len(token_ids) - 3]


def test_a_turn_ends_and_the_next_one_computes_only_what_is_new():
    """STR-06, STR-08."""
    engine = EngineHarness(next_token=scripted(10, 11, 0, 20, 21))
    session = open_session(engine, [1, 2, 3], 8, stop_token_ids=(11, 21))
    assert scheduled(engine.step()) == {session.handle: 3}
    assert scheduled(engine.step()) == {session.handle: 1}
    (_, end_of_turn) = engine.outputs[session.request_id, 0]
    assert (end_of_turn.new_token_ids, end_of_turn.finish_reason) == ([11], FinishReason.STOP)
    assert end_of_turn.goes_on
    assert end_of_turn.stop_reason == 11

    following = current(engine, session)
    assert following.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert engine.kv_cache.block_ids(following.handle) == [[1]]
    params = SamplingParams(max_tokens=8, stop_token_ids=(21,))
    message = SessionInput(1, session.request_id, [4, 5], params)
    assert engine.scheduler.sessions.take(message) == []
    assert following.status is RequestStatus.WAITING
    output = engine.step()
    assert following.status is RequestStatus.RUNNING
    assert output.finished_handles == [session.handle]
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
    engine.give(session, [4], 5)
    engine.give(session, [5, 6], 1, last=True)
    engine.run()
    expected = turns(([1, 2, 3], 2), ([4], 5), ([5, 6], 1))
    outputs = engine.outputs[session.request_id, 0]
    assert [each.token_index for each in outputs] == [0, 1, 0, 1, 2, 3, 4, 0]
    assert [each.goes_on for each in outputs] == [0, 1, 0, 0, 0, 0, 1, 0]
    assert [each.first is not None for each in outputs] == [1, 0, 1, 0, 0, 0, 0, 1]
    assert engine.tokens_of(session) == flat(expected)
    assert engine.reason_of(session) is FinishReason.LENGTH
    engine.assert_at_rest()


def test_the_kept_tokens_count_as_cached():
    engine = EngineHarness(enable_prefix_caching=False)
    session = rest(engine, list(range(40)), 5)
    engine.give(session, [7, 8, 9], 1)
    engine.step()
    assert engine.outputs[session.request_id, 0][-1].first.num_cached_tokens == 44


def test_the_time_in_the_queue_counts_from_the_input():
    clock = Clock()
    engine = EngineHarness(clock=clock)
    session = rest(engine, [1, 2])
    clock.now += 20.0
    engine.give(session, [3], 1)
    clock.now += 0.5
    engine.step()
    first = engine.outputs[session.request_id, 0][-1].first
    assert (first.queued_at, first.scheduled_at) == (120.0, 120.5)


def test_at_rest_there_is_no_work_but_an_unfinished_request():
    engine = EngineHarness()
    session = rest(engine, list(range(20)))
    assert not engine.scheduler.has_work
    assert engine.scheduler.num_unfinished == 1
    assert engine.scheduler.running == []
    assert engine.runner.rows == {}, "the worker was told to forget the turn"
    stats = engine.scheduler.take_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 1, 1)
    assert stats.kv_cache_usage > 0
    assert engine.scheduler.knows(session.request_id)
    assert check(engine.kv_cache) == []


def test_others_pass_a_session_at_rest_and_it_keeps_its_place():
    engine = EngineHarness(max_num_seqs=1)
    session = rest(engine, [1, 2])
    first, second = engine.add_one([3], 2), engine.add_one([4], 2)
    engine.step()
    assert engine.scheduler.running == [first]
    engine.give(session, [5], 1)
    waiting = list(engine.scheduler.waiting)
    assert waiting == [current(engine, session), second]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_input_that_comes_early_waits_for_the_end_of_the_turn(steps):
    """Before the first turn has begun, and while it goes on."""
    engine = EngineHarness()
    session = open_session(engine, [1, 2, 3], 3)
    for _ in range(steps):
        engine.step()
    engine.give(session, [4, 5], 2)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tokens_of(session) == flat(turns(([1, 2, 3], 3), ([4, 5], 2)))
    assert current(engine, session).status is RequestStatus.WAITING_FOR_STREAMING_REQ


def test_parameters_are_those_of_the_turn_whatever_has_come_meanwhile():
    """STR-11."""
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 2, logprobs=3)
    engine.step()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for tokens, given in ([5], params), ([6], None):
        message = SessionInput(1, session.request_id, tokens, given)
        engine.scheduler.sessions.take(message)
    while engine.scheduler.has_work:
        engine.step()
    sent = [new for step in engine.runner.steps for new in step.new_requests]
    assert [each.sampling_params.logprobs for each in sent] == [3, None, None]
    assert sent[1].sampling_params is sent[2].sampling_params is params


# The end


def test_closed_at_rest_it_ends_with_the_reason_of_its_last_turn():
    engine = EngineHarness()
    session = rest(engine, [1, 2], 3)
    (final,) = engine.give(session, [], last=True)
    assert (final.new_token_ids, final.goes_on) == ([], False)
    assert final.finish_reason is FinishReason.LENGTH
    engine.assert_at_rest()


def test_closed_during_a_turn_it_ends_with_it():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 3)
    engine.step()
    assert engine.give(session, [], last=True) == []
    engine.run()
    assert len(engine.outputs[session.request_id, 0]) == 3
    assert engine.reason_of(session) is FinishReason.LENGTH
    engine.assert_at_rest()


def test_the_last_input_may_have_tokens():
    engine = EngineHarness()
    session = rest(engine, [1, 2], 1)
    engine.give(session, [3], 2, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns(([1, 2], 1), ([3], 2)))
    engine.assert_at_rest()


def test_a_closed_session_takes_no_more():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 3, client=2)
    sessions = engine.scheduler.sessions
    assert sessions.takes_input(2, session.request_id)
    assert not sessions.takes_input(1, session.request_id), "it is another front end's"
    assert not sessions.takes_input(2, session.request_id + 1)
    engine.give(session, [3], last=True)
    assert not sessions.takes_input(2, session.request_id)


@pytest.mark.parametrize("when", ["during a turn", "at rest", "in line"])
def test_it_can_be_aborted_and_leaves_nothing(when):
    engine = EngineHarness()
    session = rest(engine, list(range(20)))
    if when != "at rest":
        engine.give(session, [1, 2], 5)
    if when == "during a turn":
        engine.step()
    assert engine.scheduler.abort(session.request_id) == 1
    if engine.scheduler.has_work:
        engine.step()
    assert not engine.scheduler.sessions.takes_input(0, session.request_id)
    assert engine.reason_of(session) is None
    engine.assert_at_rest()


def test_sessions_of_a_front_end_that_is_gone_are_over():
    engine = EngineHarness()
    mine, theirs = rest(engine, [1, 2], client=1), rest(engine, [3, 4], client=2)
    assert engine.scheduler.abort_client(1) == 1
    assert not engine.scheduler.sessions.takes_input(1, mine.request_id)
    engine.give(theirs, [5], 1, last=True)
    engine.run()
    engine.assert_at_rest()


def test_tokens_under_way_when_it_is_aborted_are_dropped():
    engine = EngineHarness()
    session = open_session(engine, [1, 2], 1)
    output = engine.scheduler.schedule()
    engine.scheduler.abort(session.request_id)
    assert engine.collect(output) == {}
    engine.step()
    engine.assert_at_rest()


# Too much, too late


def test_input_that_can_never_fit_ends_the_session_when_it_comes():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, list(range(10)), 4)
    engine.give(session, list(range(10)), 2)
    with pytest.raises(InvalidRequestError, match=r"\(31 tokens\).*\(2\).*33 tokens.* 32 "):
        engine.give(session, list(range(11)), 2)


def test_input_that_has_become_a_turn_is_counted_once():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, [1], 1)
    engine.give(session, list(range(14)), 1)
    while engine.scheduler.has_work:
        engine.step()
    assert engine.give(session, list(range(15)), 2) == []


def test_input_that_does_not_fit_behind_the_outputs_ends_the_session_after_the_turn():
    engine = EngineHarness(max_model_len=32)
    session = open_session(engine, list(range(10)), 6)
    engine.give(session, list(range(14)), 4)
    while engine.scheduler.has_work:
        engine.step()
    *_, end_of_turn, final = engine.outputs[session.request_id, 0]
    assert end_of_turn.goes_on
    assert final.finish_reason is FinishReason.ERROR
    assert (final.error.kind, final.error.param) == ("invalid_request", "max_tokens")
    assert "prompt (29 tokens)" in final.error.message
    assert "32" in final.error.message
    assert engine.tokens_of(session) == undisturbed(list(range(10)), 6)
    engine.assert_at_rest()


def test_the_longest_session_there_can_be():
    engine = EngineHarness(max_model_len=32, num_blocks=3)
    session = rest(engine, list(range(20)), 4)
    engine.give(session, list(range(6)), 3, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns((list(range(20)), 4), (list(range(6)), 3)))


def test_a_session_at_rest_for_too_long_ends_with_an_error():
    clock = Clock()
    engine = EngineHarness(clock=clock, session_timeout=30.0)
    sessions = engine.scheduler.sessions
    old = rest(engine, [1, 2], client=1)
    clock.now += 20.0
    young = rest(engine, [3, 4], client=2)
    clock.now += 9.9
    assert sessions.end_overdue() == {}
    clock.now += 0.1
    overdue = sessions.end_overdue()
    engine.note(overdue)
    ((client, (final,)),) = overdue.items()
    assert (client, final.request_id) == (1, old.request_id)
    assert final.finish_reason is FinishReason.ERROR
    assert "30 seconds" in final.error.message
    assert "--session-timeout" in final.error.message
    clock.now += 20.0
    engine.note(sessions.end_overdue())
    assert engine.reason_of(young) is FinishReason.ERROR
    engine.assert_at_rest()


def test_time_counts_only_at_rest_and_anew_each_time():
    clock = Clock()
    engine = EngineHarness(clock=clock, session_timeout=30.0)
    session = rest(engine, [1, 2], 1)
    clock.now += 29.0
    engine.give(session, [3], 2)
    clock.now += 50.0
    engine.step()
    assert engine.scheduler.sessions.end_overdue() == {}, "a turn may take as long as it takes"
    engine.step()
    clock.now += 29.0
    assert engine.scheduler.sessions.end_overdue() == {}
    clock.now += 1.0
    assert len(engine.scheduler.sessions.end_overdue()[0]) == 1


# Blocks


def test_a_running_request_takes_the_blocks_of_the_session_that_has_rested_longest():
    """Six usable blocks: two sessions of two blocks each, one request that grows to three."""
    engine = EngineHarness(num_blocks=7, enable_prefix_caching=False)
    first = rest(engine, list(range(20)))
    second = rest(engine, list(range(100, 120)))
    runner = engine.add_one(list(range(200, 230)), 5)
    engine.run_until_over(runner)
    assert engine.tokens_of(runner) == undisturbed(list(range(200, 230)), 5)
    assert runner.num_preemptions == 0
    assert current(engine, first).num_computed_tokens == 0
    assert current(engine, second).num_computed_tokens == 21
    for each in (first, second):
        engine.give(each, [7, 7], 2, last=True)
    engine.run()
    for each, start in (first, 0), (second, 100):
        expected = turns((list(range(start, start + 20)), 2), ([7, 7], 2))
        assert engine.tokens_of(each) == flat(expected)
    engine.assert_at_rest()


def test_a_waiting_request_takes_the_blocks_of_sessions_at_rest():
    engine = EngineHarness(num_blocks=5)
    session = rest(engine, list(range(40)))
    other = engine.add_one(list(range(500, 540)), 2)
    assert scheduled(engine.step()) == {other.handle: 40}
    assert check(engine.kv_cache) == []
    engine.give(session, [1], 1, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns((list(range(40)), 2), ([1], 1)))


def test_a_head_of_the_line_without_room_looks_again_when_a_session_comes_to_rest():
    """Nothing else has changed: no block is free that was not free before."""
    engine = EngineHarness(num_blocks=7, enable_prefix_caching=False)
    runner = engine.add_one(list(range(20)), 9)
    session = open_session(engine, list(range(100, 140)), 3)
    engine.step()
    head = engine.add_one(list(range(200, 240)), 2)
    engine.step()
    assert engine.scheduler.running == [runner, session]
    engine.step()
    output = engine.step()
    assert engine.scheduler.running == [runner, head]
    assert output.preempted_handles == []


def test_a_session_in_line_keeps_its_blocks_as_long_as_someone_else_can_give_way():
    """Of eight blocks it has three, and two requests grow until they need six."""
    engine = EngineHarness(num_blocks=9, max_num_seqs=2, enable_prefix_caching=False)
    session = rest(engine, list(range(40)), 2)
    runners = [engine.add_one(list(range(each, each + 30)), 20) for each in (100, 200)]
    engine.step()
    engine.give(session, [1], 2)
    engine.run_until_over(runners[0])
    assert [each.num_preemptions for each in runners] == [0, 1]
    assert engine.tokens_of(session) == undisturbed(list(range(40)), 2)
    assert current(engine, session).num_computed_tokens == 41
    engine.give(session, [], last=True)
    engine.run()
    engine.assert_at_rest()


def test_the_only_one_that_runs_takes_the_blocks_of_those_in_line_rather_than_give_way():
    """If it gave way to a session that cannot run either, a step would bring nothing."""
    engine = EngineHarness(num_blocks=7, max_num_seqs=1, enable_prefix_caching=False)
    session = rest(engine, list(range(40)), 2)
    runner = engine.add_one(list(range(100, 130)), 25)
    engine.step()
    engine.give(session, [1], 2)
    engine.run_until_over(runner)
    assert runner.num_preemptions == 0
    assert current(engine, session).num_computed_tokens == 0
    engine.give(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns((list(range(40)), 2), ([1], 2)))
    assert engine.tokens_of(runner) == undisturbed(list(range(100, 130)), 25)
    engine.assert_at_rest()


def test_where_nobody_runs_the_head_of_the_line_takes_the_blocks_of_those_behind_it():
    """Otherwise nobody would ever: the session holds what the head lacks."""
    engine = EngineHarness(num_blocks=6, enable_prefix_caching=False, scheduling_policy="priority")
    session = rest(engine, list(range(40)), 2, priority=1)
    engine.scheduler.pause("freeze")
    head = engine.add_one(list(range(100, 160)), 2)
    engine.give(session, [1], 2)
    engine.scheduler.resume()
    assert scheduled(engine.step()) == {head.handle: 60}
    engine.give(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns((list(range(40)), 2), ([1], 2)))
    engine.assert_at_rest()


def test_a_session_at_the_head_of_the_line_is_not_robbed_for_itself():
    engine = EngineHarness(num_blocks=6, enable_prefix_caching=False, max_model_len=80)
    session = rest(engine, list(range(40)), 2)
    other = rest(engine, list(range(100, 120)), 2)
    engine.scheduler.pause("freeze")
    engine.give(session, list(range(30)), 2)
    engine.give(other, [1], 2)
    engine.scheduler.resume()
    output = engine.step()
    (new,) = output.new_requests
    assert (new.num_computed_tokens, new.num_scheduled_tokens) == (41, 30)


@pytest.mark.parametrize(
    "settings",
    [
        {"watermark": 0.5},
        {"scheduler_reserve_full_isl": True},
        {"stop_admission_above": 0.5, "resume_admission_below": 0.4},
    ],
)
def test_rules_of_admission_count_the_blocks_at_rest_as_room(settings):
    engine = EngineHarness(num_blocks=11, enable_prefix_caching=False, **settings)
    rest(engine, list(range(96)))
    running = engine.add_one([1], 9)
    engine.step()
    engine.add_one(list(range(200, 250)), 2)
    assert len(scheduled(engine.step())) == 2
    assert engine.scheduler.running[0] is running


def test_a_session_with_blocks_is_admitted_though_its_whole_prompt_would_not_fit_again():
    engine = EngineHarness(
        num_blocks=8, enable_prefix_caching=False, scheduler_reserve_full_isl=True
    )
    session = rest(engine, list(range(60)), 2)
    engine.add_one([1], 9)
    engine.step()
    engine.give(session, [2], 1)
    assert len(scheduled(engine.step())) == 2


def test_pressure_is_relieved_at_the_cost_of_sessions_at_rest():
    engine = EngineHarness(
        num_blocks=11, preempt_above=0.5, stop_admission_above=0.5, enable_prefix_caching=False
    )
    session = rest(engine, list(range(60)))
    only = engine.add_one([1], 30)
    engine.run_until_over(only)
    assert only.num_preemptions == 0
    assert current(engine, session).num_computed_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (7, None, 14)])
def test_every_turn_gives_what_a_fresh_request_would(windows, overlapped, caching):
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
        engine.give(session, tokens, max_tokens)
    engine.give(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns(*inputs))
    engine.assert_at_rest()


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
        engine.give(session, [10 + index, 11 + index, 13], 20, last=index == 5)
    engine.run()
    tokens, expected = [1, 2, 3, 4], []
    for index in range(7):
        turn = []
        while not turn or turn[-1] != EOS:
            turn.append(stops_at_multiples_of_three([*tokens, *turn], 0))
        expected += turn
        tokens += [*turn[:-1], 10 + index, 11 + index, 13]
    assert engine.tokens_of(session) == expected
    engine.assert_at_rest()


def stops_at_multiples_of_three(token_ids, choice):
    return hashed_token(token_ids, choice) if len(token_ids) % 3 else EOS


def test_what_a_turn_computed_is_found_by_others_and_what_it_dropped_is_not():
    """Blocks of 4: prompt and outputs end with a block, whose last token is dropped."""
    engine = EngineHarness(block_size=4)
    session = rest(engine, [1, 2, 3, 4, 5], 3)
    engine.give(session, [9, 9], 1)
    engine.step()
    dropped = [1, 2, 3, 4, 5, *undisturbed([1, 2, 3, 4, 5], 3), 7]
    other = engine.add_one(dropped, 1)
    engine.step()
    assert other.num_cached_tokens == 4
    merged = [*dropped[:7], 9, 9, 7]
    third = engine.add_one(merged, 1)
    engine.step()
    assert third.num_cached_tokens == 8


def test_a_session_waits_for_nobody_who_computes_the_same_prefix():
    """It has blocks of its own, and could not use the other's."""
    engine = EngineHarness(block_size=4, long_prefill_token_threshold=4)
    session = rest(engine, [1, 2, 3, 4, 5, 6], 1)
    leader = engine.add_one([1, 2, 3, 4, 5, 6, *range(100, 130)], 1)
    engine.step()
    engine.give(session, list(range(100, 110)), 1)
    following = current(engine, session)
    assert scheduled(engine.step()) == {leader.handle: 4, following.handle: 4}


def test_a_turn_that_ends_while_the_request_has_lost_its_blocks():
    engine = EngineHarness()
    session = open_session(engine, list(range(20)), 2)
    engine.step()
    output = engine.scheduler.schedule()
    assert engine.scheduler.reset_prefix_cache(preempting=True)
    engine.collect(output)
    following = current(engine, session)
    assert following.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert following.num_computed_tokens == 0
    assert engine.kv_cache.usage == 0
    engine.give(session, [1], 2, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(turns((list(range(20)), 2), ([1], 2)))
    engine.assert_at_rest()


# Pauses


def test_a_pause_holds_the_next_turn_and_its_blocks_stay():
    engine = EngineHarness()
    session = rest(engine, list(range(20)), 2)
    engine.scheduler.pause("finish_running")
    engine.give(session, [1], 2)
    engine.step()
    following = current(engine, session)
    assert following.status is RequestStatus.WAITING_FOR_RESUME
    assert following.num_computed_tokens == 21
    assert not engine.scheduler.has_work
    engine.scheduler.resume()
    assert scheduled(engine.step()) == {following.handle: 1}
    assert len(engine.scheduler.sessions.idle_blocks) == 0


def test_a_session_ends_on_a_closing_input_also_while_all_is_frozen():
    engine = EngineHarness()
    session = rest(engine, [1, 2])
    engine.scheduler.pause("freeze")
    assert len(engine.give(session, [], last=True)) == 1
    engine.assert_at_rest()


def test_the_final_output_of_a_session_has_no_mark():
    """The wire tells the end of a turn from the end of the request."""
    engine = EngineHarness()
    session = rest(engine, [1], 1)
    (end_of_turn,) = engine.outputs[session.request_id, 0]
    (final,) = engine.give(session, [], last=True)
    assert msgspec.structs.asdict(end_of_turn)["goes_on"]
    assert [end_of_turn.finish_reason, final.finish_reason] == [FinishReason.LENGTH] * 2
    assert not final.goes_on
