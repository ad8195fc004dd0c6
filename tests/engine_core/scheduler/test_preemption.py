"""Preemption when the pool is too small for all running requests."""

from engine_core.request import RequestStatus
from proto.messages.engine_io import EventType, FinishReason
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.paged_runner import undisturbed


def test_the_youngest_is_preempted_and_resumed_first():
    """Four usable blocks of 16: two requests of two blocks each, one needs a third."""
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False)
    old = engine.add_one(list(range(32)), max_tokens=3)
    young = engine.add_one(list(range(100, 130)), max_tokens=3)
    late = engine.add_one(list(range(200, 210)), max_tokens=3)
    engine.step()
    output = engine.step()
    assert output.preempted_seq_ids == [young.seq_id]
    assert scheduled(output) == {old.seq_id: 1}
    assert young.status is RequestStatus.PREEMPTED
    assert young.num_computed_tokens == 0
    assert list(engine.scheduler.waiting) == [young, late]
    engine.step()
    output = engine.step()
    assert output.finished_seq_ids == [old.seq_id]
    assert output.cached_requests.resumed_seq_ids == [young.seq_id]
    assert output.cached_requests.resumed_output_token_ids == [
        undisturbed(list(range(100, 130)), 1)
    ]
    assert output.cached_requests.num_computed_tokens == [0]
    assert output.cached_requests.num_scheduled_tokens == [31]
    assert len(output.cached_requests.new_block_ids[0][0]) == 2
    engine.run()
    for each in (old, young, late):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    assert young.num_preemptions == 1
    outputs = engine.outputs[young.request_id, 0]
    queued, admitted, preempted, again = (event for each in outputs for event in each.events)
    kinds = (EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED)
    assert (queued.type, admitted.type, preempted.type, again.type) == kinds
    assert queued.timestamp <= admitted.timestamp < preempted.timestamp < again.timestamp
    assert [bool(each.events) for each in outputs] == [True, True, False]
    engine.assert_idle()


def test_nothing_is_admitted_in_a_step_that_preempts():
    """With chunks of one block the victim itself would fit again at once."""
    engine = EngineHarness(
        num_blocks=5, enable_prefix_caching=False, long_prefill_token_threshold=16
    )
    old = engine.add_one(list(range(32)), max_tokens=3)
    young = engine.add_one(list(range(100, 130)), max_tokens=3)
    engine.step()
    engine.step()
    output = engine.step()
    assert output.preempted_seq_ids == [young.seq_id]
    assert scheduled(output) == {old.seq_id: 1}
    assert engine.scheduler.running == [old]
    assert scheduled(engine.step()) == {old.seq_id: 1, young.seq_id: 16}


def test_no_other_request_is_admitted_in_that_step():
    """The victim's blocks are for running requests; earlier waiting ones have to wait."""
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False, scheduling_policy="priority")
    old = engine.add_one(list(range(32)), max_tokens=3, priority=1)
    young = engine.add_one(list(range(100, 130)), max_tokens=3, priority=5)
    engine.step()
    urgent = engine.add_one([200, 201], max_tokens=3, priority=0)
    output = engine.step()
    assert output.preempted_seq_ids == [young.seq_id]
    assert scheduled(output) == {old.seq_id: 1}
    assert scheduled(engine.step()) == {old.seq_id: 1, urgent.seq_id: 2}


def test_a_request_last_in_order_preempts_itself():
    engine = EngineHarness(num_blocks=4, enable_prefix_caching=False)
    first = engine.add_one(list(range(20)), max_tokens=5)
    second = engine.add_one(list(range(100, 116)), max_tokens=5)
    engine.step()
    output = engine.step()
    assert output.preempted_seq_ids == [second.seq_id]
    assert scheduled(output) == {first.seq_id: 1}
    engine.run()
    assert engine.finish_reason_of(second) is FinishReason.LENGTH
    engine.assert_idle()


def test_a_token_in_flight_survives_the_preemption():
    """Ten usable blocks, two prompts of five; the second is computing when the first grows."""
    engine = EngineHarness(num_blocks=11, max_num_batched_tokens=100, enable_prefix_caching=False)
    first = engine.add_one(list(range(80)))
    step_0 = engine.scheduler.schedule()
    second = engine.add_one(list(range(100, 180)))
    step_1 = engine.scheduler.schedule()
    engine.collect(step_0)
    step_2 = engine.scheduler.schedule()
    assert second.status is RequestStatus.PREEMPTED
    assert engine.scheduler.running == [first]
    engine.collect(step_1)
    assert second.output_token_ids == undisturbed(list(range(100, 180)), 1)
    engine.collect(step_2)
    engine.run()
    assert engine.tokens_of(second) == undisturbed(list(range(100, 180)), 16)
    engine.assert_idle()


def test_a_request_can_end_by_a_token_that_was_in_flight_when_it_was_preempted():
    engine = EngineHarness(num_blocks=11, max_num_batched_tokens=100, enable_prefix_caching=False)
    engine.add_one(list(range(80)), max_tokens=2)
    step_0 = engine.scheduler.schedule()
    second = engine.add_one(list(range(100, 180)), max_tokens=1)
    step_1 = engine.scheduler.schedule()
    engine.collect(step_0)
    step_2 = engine.scheduler.schedule()
    assert second.status is RequestStatus.PREEMPTED
    engine.collect(step_1)
    assert engine.finish_reason_of(second) is FinishReason.LENGTH
    assert len(engine.scheduler.waiting) == 0
    engine.collect(step_2)
    engine.run()
    engine.assert_idle()


def test_what_the_prefix_cache_kept_is_not_computed_twice():
    engine = EngineHarness(num_blocks=6, block_size=16)
    old = engine.add_one(list(range(32)), max_tokens=20)
    young = engine.add_one(list(range(100, 132)), max_tokens=20)
    engine.run()
    assert young.num_preemptions >= 1
    resumed = [step for step in engine.runner.steps if step.cached_requests.resumed_seq_ids]
    assert resumed
    assert young.num_cached_tokens == 0, "usage counts the first admission only"
    for each in (old, young):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 20)
    engine.assert_idle()


def test_a_preempted_request_loses_its_drafts():
    engine = EngineHarness()
    request = engine.add_one(list(range(20)))
    engine.step()
    request.spec_token_ids.append(5)
    engine.scheduler.reset_prefix_cache(preempting=True)
    assert request.num_preemptions == 1
    assert request.spec_token_ids == []
