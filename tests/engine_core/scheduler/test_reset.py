"""Resetting the prefix cache: while idle, or with recomputation of running requests. SCH-16."""

import pytest

from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def prompt_of(number):
    return [number * 50 + position for position in range(20)]


@pytest.fixture
def engine():
    return EngineHarness()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_running_requests_go_back_to_the_queue_in_their_order(policy):
    engine = EngineHarness(scheduling_policy=policy)
    requests = [engine.add_one(prompt_of(each), 4) for each in range(10)]
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.running == requests
    assert engine.scheduler.reset_prefix_cache(preempting=True)
    assert engine.scheduler.running == []
    assert list(engine.scheduler.waiting) == requests
    assert {each.status for each in requests} == {RequestStatus.PREEMPTED}
    assert engine.kv_cache.usage == 0
    assert engine.scheduler.pop_stats().num_preemptions == 10
    assert sum(scheduled(engine.step()).values()) == 10 * 21, "no token was cached"
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 4)
    assert [each.num_preemptions for each in requests] == [1] * 10
    engine.assert_idle()


def test_waiting_requests_stay_behind_those_that_ran():
    engine = EngineHarness(max_num_seqs=2)
    requests = [engine.add_one(prompt_of(each), 4) for each in range(4)]
    engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert list(engine.scheduler.waiting) == requests


def test_a_reset_clears_the_worker_and_resends_full_requests(engine):
    request = engine.add_one(prompt_of(0), 9)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache(preempting=True)
    output = engine.step()
    assert output.finished_seq_ids == [request.seq_id]
    assert output.preempted_seq_ids == []
    (new,) = output.new_requests
    assert new.output_token_ids == undisturbed(prompt_of(0), 2)
    assert (new.num_computed_tokens, new.num_scheduled_tokens) == (0, 22)


def test_a_token_under_way_is_kept(engine):
    request = engine.add_one(prompt_of(0), 5)
    engine.step()
    output = engine.scheduler.schedule()
    assert engine.scheduler.reset_prefix_cache(preempting=True)
    engine.collect(output)
    assert engine.tokens_of(request) == undisturbed(prompt_of(0), 2)
    engine.run()
    assert engine.tokens_of(request) == undisturbed(prompt_of(0), 5)
    engine.assert_idle()


def test_a_prompt_under_way_is_computed_again():
    engine = EngineHarness(max_num_batched_tokens=8)
    request = engine.add_one(prompt_of(0), 3)
    engine.step()
    output = engine.scheduler.schedule()
    engine.scheduler.reset_prefix_cache(preempting=True)
    engine.collect(output)
    assert request.num_computed_tokens == 0
    engine.run()
    assert engine.tokens_of(request) == undisturbed(prompt_of(0), 3)


def test_sessions_at_rest_and_in_line_lose_their_blocks_too(engine):
    idle = engine.add_one(prompt_of(0), 2, resumable=True)
    in_line = engine.add_one(prompt_of(1), 2, resumable=True)
    while engine.scheduler.has_work:
        engine.step()
    engine.add_session_input(in_line, [7], 2, last=True)
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.reset_prefix_cache(preempting=True)
    engine.add_session_input(idle, [8], 2, last=True)
    engine.run()
    for request, token in ((idle, 8), (in_line, 7)):
        first = undisturbed(request.prompt_token_ids, 2)
        merged = [*request.prompt_token_ids, first[0], token]
        assert engine.tokens_of(request) == first + undisturbed(merged, 2)
    engine.assert_idle()


def test_without_requests_both_kinds_of_reset_are_the_same(engine):
    engine.add_one(prompt_of(0), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.reset_prefix_cache(preempting=True)
