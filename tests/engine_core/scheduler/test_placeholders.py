"""Overlapped steps: the next is scheduled before the tokens of the last are known."""

import itertools

import pytest

from engine_core.request import RequestStatus
from proto.messages.engine_io import FinishReason
from tests.fakes.engine_harness import EOS, EngineHarness, scheduled
from tests.fakes.paged_runner import hashed_token, undisturbed


def overlapped(**settings):
    return EngineHarness(async_scheduling=True, **settings)


def prompt(length: int, first: int = 0) -> list[int]:
    """Return tokens that are unique to `first`."""
    return [(first * 37 + position) % 900 for position in range(length)]


def stopping_after(count: int, start: int = 3):
    """Return a worker that samples `EOS` as the last of `count` outputs of a prompt of `start`."""
    return lambda ids, choice: EOS if len(ids) == start + count - 1 else hashed_token(ids, choice)


def test_a_request_is_scheduled_again_before_its_token_is_known():
    engine = overlapped()
    request = engine.add_one([1, 2, 3])
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert scheduled(first) == {request.seq_id: 3}
    assert scheduled(second) == {request.seq_id: 1}
    assert second.cached_requests.num_computed_tokens == [3]
    assert request.num_output_placeholders == 2
    engine.collect(first)
    assert request.num_output_placeholders == 1
    engine.collect(second)
    assert request.num_output_placeholders == 0
    assert engine.tokens_of(request) == undisturbed([1, 2, 3], 2)


def test_a_chunk_that_samples_nothing_reserves_nothing():
    engine = overlapped(max_num_batched_tokens=4)
    request = engine.add_one(prompt(10), max_tokens=3)
    counts = []
    for _ in range(4):
        counts.append((scheduled(engine.scheduler.schedule()), request.num_output_placeholders))
    assert counts == [({0: 4}, 0), ({0: 4}, 0), ({0: 2}, 1), ({0: 1}, 2)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_token_is_scheduled_after_the_last_that_a_request_can_have(max_tokens):
    engine = overlapped()
    requests = [engine.add_one(prompt(10, each), max_tokens=max_tokens) for each in range(2)]
    engine.run()
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, max_tokens)
    total = sum(step.total_num_scheduled_tokens for step in engine.runner.steps)
    assert total == 2 * (10 + max_tokens - 1)
    engine.assert_idle()


def test_no_token_is_scheduled_past_the_usable_length():
    engine = overlapped(max_model_len=8)
    request = engine.add_one(prompt(5), max_tokens=100)
    engine.run()
    assert engine.tokens_of(request) == undisturbed(prompt(5), 3)
    assert engine.finish_reason_of(request) is FinishReason.LENGTH
    assert sum(step.total_num_scheduled_tokens for step in engine.runner.steps) == 5 + 2
    engine.assert_idle()


def test_a_resumed_request_is_not_scheduled_past_its_end_either():
    engine = overlapped()
    tokens = undisturbed(prompt(6), 5)
    request = engine.add_one(prompt(6), max_tokens=5, output_token_ids=(tuple(tokens[:3]),))
    engine.run()
    assert engine.outputs[request.request_id, 0][0].token_index == 3
    assert sum(step.total_num_scheduled_tokens for step in engine.runner.steps) == 6 + 4


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_token_after_a_stop_token_is_thrown_away(count):
    engine = overlapped(next_token=stopping_after(count))
    request = engine.add_one([1, 2, 3])
    other = engine.add_one(prompt(9, 5), max_tokens=8)
    engine.run()
    assert len(engine.tokens_of(request)) == count
    assert engine.finish_reason_of(request) is FinishReason.STOP
    assert len(engine.tokens_of(other)) == 8
    computed = sum(scheduled(step).get(request.seq_id, 0) for step in engine.runner.steps)
    assert computed == 3 + count, "one token too many, in flight when the stop token came"
    engine.assert_idle()


def test_aborted_in_every_order_they_have_the_tokens_they_had():
    engine = overlapped()
    requests = [engine.add_one([each, each], max_tokens=100) for each in range(10)]
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    engine.send()
    for each in order:
        engine.send()
        engine.scheduler.abort_request(requests[each].request_id)
        engine.receive()
    assert [len(engine.tokens_of(requests[each])) for each in order] == list(range(10))
    assert all(each.status is RequestStatus.FINISHED_ABORTED for each in requests)
    engine.run()
    engine.assert_idle()


def test_blocks_of_a_request_aborted_in_flight_can_be_used_in_the_next_step():
    """The worker still writes to them in two steps that come before."""
    engine = overlapped(num_blocks=3)
    gone = engine.add_one(prompt(30))
    engine.send()
    engine.send()
    engine.scheduler.abort_request(gone.request_id)
    taker = engine.add_one(prompt(30, 9), max_tokens=2)
    engine.receive()
    assert scheduled(engine.step()) == {taker.seq_id: 30}
    engine.run()
    assert engine.tokens_of(taker) == undisturbed(prompt(30, 9), 2)
    engine.assert_idle()


def test_a_next_turn_computes_only_new_tokens():
    engine = overlapped()
    first = [engine.add_one(prompt(100, each), 200, eos_token_ids=()) for each in range(5)]
    engine.run()
    turns = [each.prompt_token_ids + engine.tokens_of(each) for each in first]
    second = [engine.add_one(turn, max_tokens=1) for turn in turns]
    assert scheduled(engine.step()) == {each.seq_id: 300 % 16 for each in second}
    engine.run()
    engine.assert_idle()


def test_a_block_filled_by_tokens_in_flight_is_findable_once_they_are_known():
    """The last of three outputs is sampled by the step that computes the 16th token."""
    engine = overlapped()
    first = engine.add_one(prompt(14), max_tokens=3)
    engine.run()
    turn = engine.add_one(prompt(14) + engine.tokens_of(first) + [5], max_tokens=1)
    engine.step()
    assert turn.num_cached_tokens == 16


def test_only_tokens_that_are_known_are_ever_findable():
    engine = overlapped(block_size=4)
    engine.add_one(prompt(3), max_tokens=20)
    for _ in range(10):
        engine.step()
        (request,) = engine.scheduler.running
        known = [engine.kv_cache.is_cached(each) for each in request.block_hashes]
        assert len(engine.kv_cache.pool.index) == sum(known)
        assert request.num_computed_tokens > request.num_tokens - 1


def crowded(**settings):
    """Ten usable blocks, two prompts of five; the first is about to need a sixth."""
    engine = overlapped(num_blocks=11, enable_prefix_caching=False, **settings)
    return engine, engine.add_one(prompt(80), max_tokens=3), engine.add_one(prompt(80, 9), 3)


def test_a_token_in_flight_survives_the_preemption():
    engine, first, second = crowded()
    step_0 = engine.scheduler.schedule()
    step_1 = engine.scheduler.schedule()
    assert step_1.preempted_seq_ids == [second.seq_id]
    assert scheduled(step_1) == {first.seq_id: 1}
    assert (second.num_output_placeholders, second.num_computed_tokens) == (1, 0)
    engine.collect(step_0)
    assert second.status is RequestStatus.PREEMPTED
    assert second.output_token_ids == undisturbed(prompt(80, 9), 1)
    engine.collect(step_1)
    engine.run()
    resumed = [step.cached_requests for step in engine.runner.steps]
    (late,) = itertools.chain.from_iterable(each.resumed_output_token_ids for each in resumed)
    assert late == undisturbed(prompt(80, 9), 1), "the late token is sent to the worker again"
    for each in (first, second):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 3)
    engine.assert_idle()


def test_a_preempted_request_resumes_first_and_after_its_token():
    engine, first, second = crowded()
    engine.in_flight += [engine.scheduler.schedule(), engine.scheduler.schedule()]
    late = engine.add_one([7], max_tokens=1)
    engine.scheduler.abort_request(first.request_id)
    assert scheduled(engine.send()) == {}
    assert list(engine.scheduler.waiting) == [second, late]
    engine.collect(engine.in_flight.popleft())
    assert scheduled(engine.send()) == {second.seq_id: 81, late.seq_id: 1}
    engine.run()
    for each in (second, late):
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, each.max_tokens)
    engine.assert_idle()


def test_a_preempted_request_can_end_by_its_token_in_flight():
    engine = overlapped(num_blocks=11, enable_prefix_caching=False)
    engine.add_one(prompt(80), max_tokens=3)
    second = engine.add_one(prompt(80, 9), max_tokens=1)
    engine.step()
    assert engine.send().preempted_seq_ids == [second.seq_id]
    engine.receive()
    assert engine.finish_reason_of(second) is FinishReason.LENGTH
    assert len(engine.scheduler.waiting) == 0
    engine.run()
    engine.assert_idle()


def test_a_resumed_request_hits_the_blocks_it_computed():
    engine = overlapped(num_blocks=6)
    requests = [engine.add_one(prompt(32, each), max_tokens=20) for each in range(2)]
    engine.run()
    assert requests[1].num_preemptions >= 1
    resumed = [step.cached_requests for step in engine.runner.steps]
    starts = [each.num_computed_tokens[-1] for each in resumed if each.resumed_seq_ids]
    assert max(starts) >= 16
    for each in requests:
        assert engine.tokens_of(each) == undisturbed(each.prompt_token_ids, 20)
    engine.assert_idle()


def test_frozen_in_flight_it_goes_on_where_it_was():
    engine = overlapped()
    request = engine.add_one(prompt(20), max_tokens=6)
    engine.step()
    engine.step()
    engine.scheduler.pause("freeze")
    assert engine.step().total_num_scheduled_tokens == 0
    assert not engine.in_flight
    assert engine.tokens_of(request) == undisturbed(prompt(20), 2)
    engine.scheduler.resume()
    engine.run()
    assert engine.tokens_of(request) == undisturbed(prompt(20), 6)
    engine.assert_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 8), (5,)])
def test_without_pressure_the_steps_are_those_of_one_at_a_time(windows):
    steps = []
    for is_overlapped in (False, True):
        engine = EngineHarness(async_scheduling=is_overlapped, block_size=4, windows=windows)
        requests = engine.add(prompt(19), max_tokens=5, n=3)
        engine.run()
        for each in requests:
            assert engine.tokens_of(each) == undisturbed(prompt(19), 5, each.choice)
        steps.append([scheduled(step) for step in engine.runner.steps if scheduled(step)])
        engine.assert_idle()
    assert steps[0] == steps[1]
