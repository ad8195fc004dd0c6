"""Output of the scheduler: outputs by front end, statistics, refused results."""

import msgspec
import pytest

from proto.errors import ProtocolError
from proto.messages.engine_io import EventType, LogprobsArrays
from proto.messages.model_runner_output import ModelRunnerOutput, RowLogprobs
from tests.fakes.engine_harness import EngineHarness


def test_outputs_go_to_the_client_of_the_request():
    engine = EngineHarness()
    engine.add_one([1], max_tokens=2, front_end=1)
    output = engine.scheduler.schedule()
    assert engine.collect(output).keys() == {1}


def test_first_token_info_comes_once():
    engine = EngineHarness()
    engine.add_one(list(range(40)), max_tokens=1)
    engine.run()
    request = engine.add_one(list(range(40)), max_tokens=3)
    engine.run()
    first, *others = engine.outputs[request.request_id, 0]
    queued, scheduled = first.events
    assert (queued.type, scheduled.type) == (EventType.QUEUED, EventType.SCHEDULED)
    assert scheduled.num_cached_tokens == 32
    assert 0 < queued.timestamp <= scheduled.timestamp
    assert not any(each.events for each in others)


def test_prompt_logprobs_come_with_each_chunk():
    engine = EngineHarness(max_num_batched_tokens=16)
    request = engine.add_one(list(range(40)), max_tokens=1, prompt_logprobs=0)
    engine.run()
    outputs = engine.outputs[request.request_id, 0]
    assert [each.prompt_logprobs.first_position for each in outputs] == [1, 17, 33]
    assert [len(each.new_token_ids) for each in outputs] == [0, 0, 1]
    assert [each.token_index for each in outputs] == [0, 0, 0]
    assert [bool(each.events) for each in outputs] == [True, False, False]


def test_prompt_logprobs_need_every_position_computed():
    engine = EngineHarness()
    engine.add_one(list(range(40)), max_tokens=1)
    engine.run()
    engine.add_one(list(range(40)), max_tokens=1, prompt_logprobs=0)
    assert engine.step().total_num_scheduled_tokens == 40


def test_logprobs_of_sampled_tokens_are_passed_on():
    engine = EngineHarness()
    engine.add_one([1, 2], logprobs=0)
    other = engine.add_one([3, 4], logprobs=0)
    output = engine.scheduler.schedule()
    arrays = LogprobsArrays(0, 1, b"abcd", b"efgh", b"ijkl")
    result = msgspec.structs.replace(
        engine.runner.execute(output), logprobs=[RowLogprobs(other.seq_id, arrays)]
    )
    (outputs,) = engine.scheduler.update_from_output(output, result).values()
    assert [each.logprobs for each in outputs] == [None, arrays]


def test_statistics_are_gauges_and_deltas():
    engine = EngineHarness(num_blocks=5, max_num_seqs=2)
    engine.add_one(list(range(32)), max_tokens=3)
    engine.add_one(list(range(100, 130)), max_tokens=3)
    engine.add_one([5], max_tokens=1)
    engine.step()
    stats = engine.scheduler.pop_stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.kv_cache_usage == 1.0
    assert stats.num_scheduled_tokens == 62
    assert stats.prefix_cache_queries == 62
    engine.step()
    stats = engine.scheduler.pop_stats()
    assert stats.num_preemptions == 1
    assert stats.num_scheduled_tokens == 1
    engine.run()
    stats = engine.scheduler.pop_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    idle = engine.scheduler.pop_stats()
    assert (idle.num_preemptions, idle.num_scheduled_tokens, idle.prefix_cache_hits) == (0, 0, 0)


def test_messages_share_no_list_that_changes():
    engine = EngineHarness(block_size=4)
    engine.add_one([1, 2, 3], max_tokens=8, output_token_ids=((4, 5),))
    first = engine.step()
    before = msgspec.msgpack.encode(first)
    engine.run()
    assert msgspec.msgpack.encode(first) == before


@pytest.mark.parametrize(
    "change",
    [
        {"step": 7},
        {"seq_ids": [0]},
        {"seq_ids": [1, 0]},
        {"sampled_token_ids": [[5]]},
        {"sampled_token_ids": [[5], [1000]]},
        {"sampled_token_ids": [[5], [-1]]},
        {"sampled_token_ids": [[5], []]},
    ],
)
def test_a_result_of_another_step_is_refused(change):
    engine = EngineHarness()
    engine.add_one([1])
    engine.add_one([2])
    output = engine.scheduler.schedule()
    result = msgspec.structs.replace(engine.runner.execute(output), **change)
    with pytest.raises(ProtocolError):
        engine.scheduler.update_from_output(output, result)


def test_a_token_for_an_incomplete_prompt_is_refused():
    engine = EngineHarness(max_num_batched_tokens=4)
    request = engine.add_one(list(range(10)))
    output = engine.scheduler.schedule()
    result = ModelRunnerOutput(1, output.step, [request.seq_id], [[5]])
    with pytest.raises(ProtocolError):
        engine.scheduler.update_from_output(output, result)
