"""A request with nonfinite logits ends with an error, alone, and its KV is forgotten."""

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import RequestStatus
from proto.errors import InternalRequestError, ProtocolError
from proto.messages.engine_io import FinishReason
from proto.settings.config import LoRAConfig
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.lora import lora_request
from tests.fakes.paged_runner import undisturbed


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first * 37 + position) % 900 for position in range(length)]


def answer(engine, output, *failed):
    """Run a step with nonfinite logits of these requests; return the outputs."""
    result = engine.runner.execute(output)
    seq_ids = [each.seq_id for each in failed]
    tokens = [
        [] if seq_id in seq_ids else row
        for seq_id, row in zip(result.seq_ids, result.sampled_token_ids, strict=True)
    ]
    result = msgspec.structs.replace(result, failed_seq_ids=seq_ids, sampled_token_ids=tokens)
    return engine.scheduler.update_from_output(output, result)


def test_a_corrupt_request_ends_with_one_error_output():
    engine = EngineHarness()
    bad, good = engine.add_one(prompt(20), 8, front_end=1), engine.add_one(prompt(20, 5), 8)
    engine.step()
    outputs = answer(engine, engine.scheduler.schedule(), bad)
    (error,) = outputs[1]
    assert (error.request_id, error.token_index, error.new_token_ids) == (bad.request_id, 1, [])
    assert error.finish_reason is FinishReason.ERROR
    assert isinstance(error.error.to_exception(), InternalRequestError)
    assert "NaN or infinity" in error.error.message
    assert bad.status is RequestStatus.FINISHED_ERROR
    assert [each.new_token_ids for each in outputs[0]] == [undisturbed(prompt(20, 5), 2)[1:]]
    assert engine.scheduler.running == [good]
    assert engine.step().finished_seq_ids == [bad.seq_id]
    while engine.scheduler.num_unfinished:
        engine.step()
    assert good.output_token_ids == undisturbed(prompt(20, 5), 8)
    assert engine.scheduler.pop_stats().num_corrupted == 1
    assert engine.scheduler.pop_stats().num_corrupted == 0


def test_the_error_and_the_count_name_the_adapter():
    engine = EngineHarness(lora=LoRAConfig(enable_lora=True))
    bad = engine.add_one(prompt(20), 8, lora_request=lora_request(3))
    good = engine.add_one(prompt(20, 5), 8)
    while not good.output_token_ids or not bad.output_token_ids:
        engine.step()
    (outputs,) = answer(engine, engine.scheduler.schedule(), bad).values()
    (error,) = [output.error for output in outputs if output.error is not None]
    assert (error.kind, error.param) == ("internal", "model")
    assert "NaN or infinity with the adapter adapter-3" in error.message
    assert engine.scheduler.adapters.usage(1).num_corrupted == {"adapter-3": 1}
    assert engine.scheduler.pop_stats().num_corrupted == 1
    while engine.scheduler.num_unfinished:
        engine.step()
    assert good.output_token_ids == undisturbed(prompt(20, 5), 8)


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)])
def test_blocks_of_a_corrupt_request_are_not_findable(windows):
    engine = EngineHarness(block_size=4, windows=windows)
    first = engine.add_one(prompt(20), max_tokens=1)
    engine.run()
    bad = engine.add_one(prompt(40), max_tokens=30, eos_token_ids=())
    other = engine.add_one(prompt(20, 9), max_tokens=1)
    for _ in range(10):
        engine.step()
    assert bad.num_cached_tokens == 20
    answer(engine, engine.scheduler.schedule(), bad)
    num_blocks_of_other = 5 * len(windows)
    assert len(engine.kv_cache.pool.index) == num_blocks_of_other
    for again, found in ((first, 0), (other, 16)):
        repeated = engine.add_one([*again.prompt_token_ids], max_tokens=1)
        engine.step()
        assert repeated.num_cached_tokens == found
        assert check(engine.kv_cache) == []
    engine.run()
    engine.assert_idle()


def test_a_chunk_can_fail_before_its_prompt_is_complete():
    engine = EngineHarness(max_num_batched_tokens=16)
    bad = engine.add_one(prompt(40))
    follower = engine.add_one([*prompt(40), 7], max_tokens=3)
    assert scheduled(engine.step()) == {bad.seq_id: 16}
    assert follower.status is not RequestStatus.RUNNING, "the request waits for the prefix"
    ((error,),) = answer(engine, engine.scheduler.schedule(), bad).values()
    assert error.finish_reason is FinishReason.ERROR
    engine.run()
    assert follower.num_cached_tokens == 0
    assert engine.tokens_of(follower) == undisturbed([*prompt(40), 7], 3)
    engine.assert_idle()


def test_a_corrupt_request_may_have_a_step_in_flight():
    engine = EngineHarness(async_scheduling=True)
    bad, good = engine.add_one(prompt(20), 8), engine.add_one(prompt(20, 5), 8)
    step_0, step_1 = engine.send(), engine.send()
    engine.in_flight.clear()
    (outputs,) = answer(engine, step_0, bad).values()
    assert [each.finish_reason for each in outputs] == [FinishReason.ERROR, None]
    late = answer(engine, step_1, bad)
    assert [each.request_id for each in late[0]] == [good.request_id]
    assert good.num_output_placeholders == 0
    assert engine.scheduler.pop_stats().num_corrupted == 1
    while engine.scheduler.num_unfinished:
        engine.step()
    engine.step()
    assert good.output_token_ids == undisturbed(prompt(20, 5), 8)
    engine.assert_idle()


def test_a_block_that_it_filled_last_does_not_become_findable_by_its_end():
    engine = EngineHarness(async_scheduling=True)
    bad = engine.add_one(prompt(14), max_tokens=3)
    steps = [engine.scheduler.schedule(), engine.scheduler.schedule()]
    engine.collect(steps[0])
    steps.append(engine.scheduler.schedule())
    engine.collect(steps[1])
    assert (bad.num_computed_tokens, bad.num_tokens) == (16, 16)
    answer(engine, steps[2], bad)
    assert len(engine.kv_cache.pool.index) == 0
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_corrupt_request_may_be_aborted_during_its_step(overlapped):
    """Its output is no longer sent, but other requests could hit its blocks."""
    engine = EngineHarness(block_size=4, async_scheduling=overlapped)
    gone = engine.add_one(prompt(20), max_tokens=8)
    other = engine.add_one(prompt(20, 5), max_tokens=8)
    steps = [engine.scheduler.schedule()]
    if overlapped:
        steps.append(engine.scheduler.schedule())
    engine.scheduler.abort_request(gone.request_id)
    assert all(map(engine.kv_cache.is_cached, gone.block_hashes))
    for step in steps[:-1]:
        engine.collect(step)
    assert answer(engine, steps[-1], gone).keys() == {0}, "the token of the other request"
    assert not any(map(engine.kv_cache.is_cached, gone.block_hashes))
    assert all(map(engine.kv_cache.is_cached, other.block_hashes))
    assert engine.scheduler.pop_stats().num_corrupted == 0, "no request ended because of it"
    engine.run()
    engine.assert_idle()


def test_a_corrupt_request_may_be_preempted_during_its_step():
    """Its blocks are free already, but their content must not be found."""
    engine = EngineHarness(async_scheduling=True, num_blocks=11)
    engine.add_one(prompt(80), max_tokens=3)
    bad = engine.add_one(prompt(80, 9), max_tokens=3)
    step_0, step_1 = engine.send(), engine.send()
    assert step_1.preempted_seq_ids == [bad.seq_id]
    engine.in_flight.clear()
    answer(engine, step_0, bad)
    assert list(engine.scheduler.waiting) == []
    engine.collect(step_1)
    assert not any(map(engine.kv_cache.is_cached, bad.block_hashes))
    engine.run()
    engine.assert_idle()


def test_a_corrupt_request_outside_the_step_is_a_protocol_error():
    engine = EngineHarness()
    engine.add_one([1])
    output = engine.scheduler.schedule()
    result = msgspec.structs.replace(engine.runner.execute(output), failed_seq_ids=[5])
    with pytest.raises(ProtocolError, match=r"\[5\]"):
        engine.scheduler.update_from_output(output, result)


@pytest.mark.parametrize("num_rounds", [0, 1, 3])
def test_a_beam_that_fails_ends_its_whole_search(num_rounds):
    engine = EngineHarness(block_size=4)
    rows = engine.add(prompt(19), max_tokens=8, n=3, beam_width=3)
    good = engine.add_one(prompt(20, 5), 12)
    for _ in range(num_rounds):
        engine.step()
    outputs = answer(engine, engine.scheduler.schedule(), rows[0])
    assert [each.finish_reason for each in outputs[0] if each.error] == [FinishReason.ERROR]
    assert [each.request_id for each in outputs[0] if each.error] == [rows[0].request_id]
    assert engine.scheduler.num_unfinished == 1
    while engine.scheduler.has_work:
        engine.step()
    assert good.output_token_ids == undisturbed(prompt(20, 5), 12)
    engine.assert_idle()
