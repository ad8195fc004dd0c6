"""The engine process with two steps in flight."""

from collections import Counter

from proto.messages.engine_io import Abort, EngineCoreOutputs, FinishReason
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import CacheConfig, SchedulerConfig
from tests.fakes.engine_process import EPOCH, is_idle
from tests.fakes.paced_worker import PacedWorker
from tests.fakes.paged_runner import undisturbed


def test_overlapped_the_next_step_comes_before_the_tokens_of_the_last(start):
    engine = start(scheduler=SchedulerConfig(async_scheduling=True))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 12))
    found = []
    step = engine.expect(engine.worker, SchedulerOutput)
    for _ in range(11):
        following = engine.expect(engine.worker, SchedulerOutput)
        assert following.cached_requests.num_scheduled_tokens == [1]
        engine.worker.send(engine.runner.execute(step))
        message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
        found += message.outputs[0].new_token_ids
        step = following
    engine.worker.send(engine.runner.execute(step))
    (last,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert [*found, *last.new_token_ids] == undisturbed([1, 2], 12)
    assert last.finish_reason is FinishReason.LENGTH
    assert engine.expect(engine.worker, SchedulerOutput).total_num_scheduled_tokens == 0
    assert engine.shutdown() == 0


def test_overlapped_an_abort_counts_before_two_steps_in_flight(start):
    engine = start(scheduler=SchedulerConfig(async_scheduling=True))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 50))
    steps = [engine.expect(engine.worker, SchedulerOutput) for _ in range(2)]
    front_end.send(Abort(EPOCH, 1, "disconnect"))
    assert engine.expect(front_end, EngineCoreOutputs, is_idle).outputs == []
    for step in steps:
        engine.worker.send(engine.runner.execute(step))
    finished = engine.expect(engine.worker, SchedulerOutput)
    assert finished.finished_seq_ids == [steps[0].new_requests[0].seq_id]
    engine.worker.send(engine.runner.execute(finished))
    front_end.send(engine.request(2, [4], 1))
    (output,) = engine.outputs_of(2)
    assert output.new_token_ids == undisturbed([4], 1)


def test_overlapped_a_worker_of_20_ms_a_step_nearly_always_has_the_next_one(start):
    """Requests arrive, stop, reach their length, are aborted and preempted meanwhile."""
    engine = start(
        cache=CacheConfig(num_gpu_blocks_override=20),
        scheduler=SchedulerConfig(async_scheduling=True),
    )
    engine.start()
    (front_end,) = engine.front_ends
    params = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(0, 1000, 25)))
    prompts = {number: [number + each for each in range(10 + number)] for number in range(32)}
    tokens = {number: [] for number in prompts}
    to_come, unfinished, ends = list(prompts), set(), Counter()
    with PacedWorker(engine, 0.02) as worker:
        while to_come or unfinished:
            while to_come and len(unfinished) < 12:
                number = to_come.pop()
                unfinished.add(number)
                front_end.send(engine.request(number, prompts[number], 40, sampling_params=params))
            message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs)
            for output in message.outputs:
                number = output.request_id
                if number not in unfinished:
                    continue  # sent before the engine received the abort
                tokens[number] += output.new_token_ids
                if output.finish_reason is not None:
                    ends[output.finish_reason] += 1
                    unfinished.remove(number)
                elif number % 4 == 0 and len(tokens[number]) == 5:
                    front_end.send(Abort(EPOCH, number, "disconnect"))
                    ends[FinishReason.ABORT] += 1
                    unfinished.remove(number)
    assert all(found == undisturbed(prompts[each], len(found)) for each, found in tokens.items())
    assert ends.total() == len(prompts)
    assert ends[FinishReason.STOP] >= 10
    assert ends[FinishReason.ABORT] >= 5
    assert ends[FinishReason.LENGTH] >= 1
    assert worker.num_preempted >= 5
    *had_next, _ = worker.had_next  # no output after the last one
    assert len(had_next) > 80
    assert sum(had_next) >= 0.95 * len(had_next)
    assert engine.shutdown() == 0
