"""Priority policy: admission, preemption, and reverting a plan."""

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def by_priority(**settings):
    return EngineHarness(scheduling_policy="priority", **settings)


def add_all(engine, priorities, arrivals=None, **params):
    arrivals = arrivals or [0.0] * len(priorities)
    return [
        engine.add_one([each], priority=priority, arrival_time=float(arrival), **params)
        for each, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True))
    ]


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [0, 0, 0], [1, 2, 0]),
        ([0, 0, 0], [3, 1, 2], [1, 2, 0]),
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
    ],
)
def test_the_lowest_number_is_admitted_first(priorities, arrivals, order):
    engine = by_priority()
    requests = add_all(engine, priorities, arrivals)
    output = engine.step()
    assert [new.seq_id for new in output.new_requests] == [requests[i].seq_id for i in order]


@pytest.mark.parametrize(
    ("seats", "priorities", "arrivals", "running", "waiting"),
    [
        (1, [3, 2, 0], [0, 0, 0], [2], [1, 0]),
        (1, [2, 2, 2], [3, 1, 2], [1], [2, 0]),
        (1, [3, 1, 2, 0], [0, 0, 0, 0], [3], [1, 2, 0]),
        (2, [3, 1, 2, 0], [0, 0, 0, 0], [3, 1], [2, 0]),
    ],
)
def test_the_others_wait_in_order(seats, priorities, arrivals, running, waiting):
    engine = by_priority(max_num_seqs=seats)
    requests = add_all(engine, priorities, arrivals)
    engine.step()
    assert engine.scheduler.running == [requests[each] for each in running]
    assert list(engine.scheduler.waiting) == [requests[each] for each in waiting]


def test_with_max_num_seqs_one_requests_run_one_by_one():
    engine = by_priority(max_num_seqs=1)
    requests = add_all(engine, [5, 1, 8, 3, 2, 7, 4, 6], max_tokens=1)
    engine.run()
    served = [new.seq_id for step in engine.runner.steps for new in step.new_requests]
    priority_of = {each.seq_id: each.priority for each in requests}
    assert [priority_of[seq_id] for seq_id in served] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_first_come_first_served_ignores_priorities():
    engine = EngineHarness()
    requests = add_all(engine, [2, 0, 1])
    engine.step()
    assert engine.scheduler.running == requests


def test_the_lowest_priority_is_preempted_and_resumed():
    """Four usable blocks of 16, two each; the urgent one needs a third."""
    engine = by_priority(num_blocks=5)
    low = engine.add_one(list(range(30)), priority=1, max_tokens=8)
    high = engine.add_one(list(range(100, 132)), priority=0, max_tokens=3)
    engine.step()
    assert engine.kv_cache.num_available_blocks == 0
    output = engine.step()
    assert scheduled(output) == {high.seq_id: 1}
    assert output.preempted_seq_ids == [low.seq_id]
    assert low.status is RequestStatus.PREEMPTED
    assert (len(engine.scheduler.waiting), len(engine.scheduler.running)) == (1, 1)
    engine.step()
    assert engine.finish_reason_of(high) is not None
    output = engine.step()
    cached = output.cached_requests
    assert cached.resumed_seq_ids == [low.seq_id]
    first = undisturbed(list(range(30)), 1)
    assert cached.resumed_output_token_ids == [first]
    engine.run()
    assert engine.tokens_of(low) == undisturbed(list(range(30)), 8)
    engine.assert_idle()


def test_a_victim_that_was_planned_is_taken_out_of_the_plan():
    """The least urgent request runs first and is scheduled before the other one fails."""
    engine = by_priority(num_blocks=9, block_size=4)
    low = engine.add_one(list(range(15)), priority=5, max_tokens=9)
    engine.step()
    high = engine.add_one(list(range(100, 116)), priority=1, max_tokens=9)
    other = engine.add_one([200], priority=2, max_tokens=9)
    output = engine.step()  # low has 4 blocks, high 4, and other waits
    assert scheduled(output) == {low.seq_id: 1, high.seq_id: 16}
    output = engine.step()
    assert output.preempted_seq_ids == [low.seq_id]
    assert scheduled(output) == {high.seq_id: 1}
    assert output.total_num_scheduled_tokens == 1
    assert engine.scheduler.pop_stats().num_scheduled_tokens == 33
    assert engine.scheduler.running == [high]
    assert list(engine.scheduler.waiting) == [other, low]
    engine.run()
    for each in (low, high, other):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 9)
    engine.assert_idle()


def test_a_chunk_that_is_taken_back_leaves_nothing_to_be_found():
    """Seven usable blocks: the third chunk of `low` takes the last two, then `high` needs one."""
    engine = by_priority(
        num_blocks=8, block_size=4, max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    low = engine.add_one(list(range(25)), priority=5, max_tokens=1)
    assert scheduled(engine.step()) == {low.seq_id: 8}
    high = engine.add_one(list(range(100, 104)), priority=1, max_tokens=8)
    assert scheduled(engine.step()) == {low.seq_id: 8, high.seq_id: 4}
    output = engine.scheduler.schedule()
    assert output.preempted_seq_ids == [low.seq_id]
    assert scheduled(output) == {high.seq_id: 1}
    assert engine.kv_cache.get_computed_blocks(low).num_tokens == 16
    assert check(engine.kv_cache) == []
    engine.collect(output)
    engine.run()
    assert engine.tokens_of(low) == undisturbed(list(range(25)), 1)
    assert engine.tokens_of(high) == undisturbed(list(range(100, 104)), 8)
    engine.assert_idle()


def test_a_request_of_lowest_priority_preempts_itself():
    engine = by_priority(num_blocks=6, block_size=4)
    first = engine.add_one(list(range(7)), priority=0, max_tokens=9)
    least = engine.add_one(list(range(100, 108)), priority=9, max_tokens=9)
    last = engine.add_one([200, 201], priority=1, max_tokens=2)
    assert len(scheduled(engine.step())) == 3
    assert engine.kv_cache.num_available_blocks == 0
    output = engine.step()
    assert output.preempted_seq_ids == [least.seq_id]
    assert scheduled(output) == {first.seq_id: 1, last.seq_id: 1}
    engine.run()
    for each in (first, least, last):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, each.max_tokens)
    engine.assert_idle()
