"""Blocks of sessions between two turns: preemption, and when they are kept."""

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed
from tests.fakes.sessions import current, expected_turns, flat, idle_session, open_session


def test_a_running_request_takes_the_blocks_of_the_session_that_has_rested_longest():
    """Six usable blocks: two sessions of two blocks each, one request that grows to three."""
    engine = EngineHarness(num_blocks=7, enable_prefix_caching=False)
    first = idle_session(engine, list(range(20)))
    second = idle_session(engine, list(range(100, 120)))
    runner = engine.add_one(list(range(200, 230)), 5)
    engine.run_until_finished(runner)
    assert engine.tokens_of(runner) == undisturbed(list(range(200, 230)), 5)
    assert runner.num_preemptions == 0
    assert current(engine, first).num_computed_tokens == 0
    assert current(engine, second).num_computed_tokens == 21
    for each in (first, second):
        engine.add_session_input(each, [7, 7], 2, last=True)
    engine.run()
    for each, start in (first, 0), (second, 100):
        expected = expected_turns((list(range(start, start + 20)), 2), ([7, 7], 2))
        assert engine.tokens_of(each) == flat(expected)
    engine.assert_idle()


def test_a_waiting_request_takes_the_blocks_of_sessions_at_rest():
    engine = EngineHarness(num_blocks=5)
    session = idle_session(engine, list(range(40)))
    other = engine.add_one(list(range(500, 540)), 2)
    assert scheduled(engine.step()) == {other.seq_id: 40}
    assert check(engine.kv_cache) == []
    engine.add_session_input(session, [1], 1, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns((list(range(40)), 2), ([1], 1)))


def test_a_head_without_free_blocks_is_rechecked_when_a_session_idles():
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
    assert output.preempted_seq_ids == []


def test_a_queued_session_loses_blocks_only_as_a_last_resort():
    """The session has three of eight blocks, and two requests grow until they need six."""
    engine = EngineHarness(num_blocks=9, max_num_seqs=2, enable_prefix_caching=False)
    session = idle_session(engine, list(range(40)), 2)
    runners = [engine.add_one(list(range(each, each + 30)), 20) for each in (100, 200)]
    engine.step()
    engine.add_session_input(session, [1], 2)
    engine.run_until_finished(runners[0])
    assert [each.num_preemptions for each in runners] == [0, 1]
    assert engine.tokens_of(session) == undisturbed(list(range(40)), 2)
    assert current(engine, session).num_computed_tokens == 41
    engine.add_session_input(session, [], last=True)
    engine.run()
    engine.assert_idle()


def test_the_only_running_request_takes_blocks_of_queued_ones():
    """If it were preempted for a session that cannot run either, the step would be empty."""
    engine = EngineHarness(num_blocks=7, max_num_seqs=1, enable_prefix_caching=False)
    session = idle_session(engine, list(range(40)), 2)
    runner = engine.add_one(list(range(100, 130)), 25)
    engine.step()
    engine.add_session_input(session, [1], 2)
    engine.run_until_finished(runner)
    assert runner.num_preemptions == 0
    assert current(engine, session).num_computed_tokens == 0
    engine.add_session_input(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns((list(range(40)), 2), ([1], 2)))
    assert engine.tokens_of(runner) == undisturbed(list(range(100, 130)), 25)
    engine.assert_idle()


def test_without_running_requests_the_head_takes_blocks_of_later_ones():
    """Otherwise no request could run, since the session holds the blocks that the head needs."""
    engine = EngineHarness(num_blocks=6, enable_prefix_caching=False, scheduling_policy="priority")
    session = idle_session(engine, list(range(40)), 2, priority=1)
    engine.scheduler.pause("freeze")
    head = engine.add_one(list(range(100, 160)), 2)
    engine.add_session_input(session, [1], 2)
    engine.scheduler.resume()
    assert scheduled(engine.step()) == {head.seq_id: 60}
    engine.add_session_input(session, [], last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns((list(range(40)), 2), ([1], 2)))
    engine.assert_idle()


def test_a_queued_session_keeps_its_blocks_at_its_own_admission():
    engine = EngineHarness(num_blocks=6, enable_prefix_caching=False, max_model_len=80)
    session = idle_session(engine, list(range(40)), 2)
    other = idle_session(engine, list(range(100, 120)), 2)
    engine.scheduler.pause("freeze")
    engine.add_session_input(session, list(range(30)), 2)
    engine.add_session_input(other, [1], 2)
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
    idle_session(engine, list(range(96)))
    running = engine.add_one([1], 9)
    engine.step()
    engine.add_one(list(range(200, 250)), 2)
    assert len(scheduled(engine.step())) == 2
    assert engine.scheduler.running[0] is running


def test_a_session_with_blocks_is_admitted_though_its_whole_prompt_would_not_fit_again():
    engine = EngineHarness(
        num_blocks=8, enable_prefix_caching=False, scheduler_reserve_full_isl=True
    )
    session = idle_session(engine, list(range(60)), 2)
    engine.add_one([1], 9)
    engine.step()
    engine.add_session_input(session, [2], 1)
    assert len(scheduled(engine.step())) == 2


def test_pressure_is_relieved_at_the_cost_of_sessions_at_rest():
    engine = EngineHarness(
        num_blocks=11, preempt_above=0.5, stop_admission_above=0.5, enable_prefix_caching=False
    )
    session = idle_session(engine, list(range(60)))
    only = engine.add_one([1], 30)
    engine.run_until_finished(only)
    assert only.num_preemptions == 0
    assert current(engine, session).num_computed_tokens == 0


def test_a_session_does_not_wait_for_a_prefix_leader():
    """It has its own blocks, and could not use those of the other one."""
    engine = EngineHarness(block_size=4, long_prefill_token_threshold=4)
    session = idle_session(engine, [1, 2, 3, 4, 5, 6], 1)
    leader = engine.add_one([1, 2, 3, 4, 5, 6, *range(100, 130)], 1)
    engine.step()
    engine.add_session_input(session, list(range(100, 110)), 1)
    following = current(engine, session)
    assert scheduled(engine.step()) == {leader.seq_id: 4, following.seq_id: 4}


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
    engine.add_session_input(session, [1], 2, last=True)
    engine.run()
    assert engine.tokens_of(session) == flat(expected_turns((list(range(20)), 2), ([1], 2)))
    engine.assert_idle()


def test_a_pause_holds_the_next_turn_and_its_blocks_stay():
    engine = EngineHarness()
    session = idle_session(engine, list(range(20)), 2)
    engine.scheduler.pause("finish_running")
    engine.add_session_input(session, [1], 2)
    engine.step()
    following = current(engine, session)
    assert following.status is RequestStatus.WAITING_FOR_RESUME
    assert following.num_computed_tokens == 21
    assert not engine.scheduler.has_work
    engine.scheduler.resume()
    assert scheduled(engine.step()) == {following.seq_id: 1}
    assert len(engine.scheduler.resumable_sessions.waiting_block_holders) == 0
