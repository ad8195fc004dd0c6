"""The engine as a process: its start, its service, its end."""

import os
import subprocess
from collections import Counter

import msgspec
import pytest
import zmq

from engine_core.kv_cache.hashing import BlockHasher
from engine_core.stepper import IDLE_SECONDS
from proto import PROTOCOL_VERSION
from proto.codec import MessageDecoder
from proto.config import CacheConfig, FrontEndConfig, SchedulerConfig, ServeConfig
from proto.engine_io import (
    Abort,
    AdminCall,
    AdminReply,
    EngineCoreOutputs,
    FinishReason,
    SessionInput,
)
from proto.errors import ErrorInfo
from proto.kv_events import AllBlocksCleared, KVEventBatch
from proto.lifecycle import (
    CacheReady,
    EngineAlive,
    EngineReady,
    Fatal,
    Heartbeat,
    InitializeCache,
    KVGroup,
    NewFrontEnd,
    NewWorkers,
    Notice,
    Paused,
    Ping,
    WorkersReady,
)
from proto.model_runner_output import ModelRunnerOutput
from proto.sampling_params import SamplingParams
from proto.scheduler_output import SchedulerOutput
from tests.fakes.engine_process import BLOCK_SIZE, EPOCH, EngineProcess
from tests.fakes.kv_events import CachedHashes
from tests.fakes.paced_worker import PacedWorker
from tests.fakes.paged_runner import PagedRunner, undisturbed


@pytest.fixture
def start(tmp_path_factory):
    """Starts engines that end with the test. Socket paths are short: no tmp_path."""
    engines = []

    def factory(*, boot=None, **config) -> EngineProcess:
        engine = EngineProcess(
            "/tmp",
            config=ServeConfig(**config),
            num_front_ends=config.get("frontend", FrontEndConfig()).api_server_count,
            **(boot or {}),
        )
        engines.append(engine)
        return engine

    yield factory
    for engine in engines:
        engine.close()
        assert not os.path.exists(engine.directory.path)


def outputs_of(engine: EngineProcess, request_id: int, front_end: int = 0):
    """Serve steps until the request, or a turn of it, is over; all its outputs."""
    link = engine.front_ends[front_end]
    found = []
    while not found or found[-1].finish_reason is None:
        engine.answer_step()
        message = engine.expect(link, EngineCoreOutputs, lambda each: each.outputs)
        found += [each for each in message.outputs if each.request_id == request_id]
    return found


def is_idle(message) -> bool:
    stats = message.stats
    return stats is not None and stats.num_running == stats.num_waiting == 0


def test_a_life(start):
    engine = start()
    engine.worker.send(engine.worker_ready())
    assert engine.expect(engine.worker, InitializeCache) == InitializeCache(
        PROTOCOL_VERSION, EPOCH, 100, BLOCK_SIZE, 99 * BLOCK_SIZE
    )
    engine.worker.send(CacheReady(EPOCH, 0))
    notice = engine.expect(engine.supervisor, Notice)
    assert "1584" in notice.message
    assert "4096" in notice.message
    ready = engine.expect(engine.supervisor, EngineReady)
    assert (ready.max_model_len, ready.num_blocks, ready.vocab_size) == (1584, 99, 1000)
    (front_end,) = engine.front_ends
    assert engine.expect(front_end, EngineReady) == ready

    front_end.send(engine.request(7, [1, 2, 3], 5))
    assert engine.expect(front_end, EngineCoreOutputs).accepted == [7]
    outputs = outputs_of(engine, 7)
    assert [token for each in outputs for token in each.new_token_ids] == undisturbed([1, 2, 3], 5)
    assert [each.token_index for each in outputs] == list(range(5))
    assert outputs[-1].finish_reason is FinishReason.LENGTH

    front_end.send(AdminCall(EPOCH, 1, "check_integrity"))
    assert engine.expect(front_end, AdminReply) == AdminReply(EPOCH, 1, True)
    front_end.send(AdminCall(EPOCH, 2, "reset_prefix_cache"))
    assert engine.expect(front_end, AdminReply) == AdminReply(EPOCH, 2, True)
    assert engine.shutdown() == 0


def test_an_abort_counts_before_the_tokens_that_were_in_flight(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 50))
    engine.answer_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    front_end.send(AdminCall(EPOCH, 1, "reset_prefix_cache"))
    reply = engine.expect(front_end, AdminReply)
    assert not reply.ok
    assert "1 request" in reply.detail
    front_end.send(Abort(EPOCH, 1, "disconnect"))
    assert engine.expect(front_end, EngineCoreOutputs, is_idle).outputs == []
    engine.worker.send(engine.runner.execute(step))
    finished = engine.expect(engine.worker, SchedulerOutput)
    assert finished.finished_handles == step.cached_requests.handles
    engine.worker.send(engine.runner.execute(finished))
    front_end.send(engine.request(2, [4], 1))
    (output,) = outputs_of(engine, 2)
    assert output.new_token_ids == undisturbed([4], 1)


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
    assert finished.finished_handles == [steps[0].new_requests[0].handle]
    engine.worker.send(engine.runner.execute(finished))
    front_end.send(engine.request(2, [4], 1))
    (output,) = outputs_of(engine, 2)
    assert output.new_token_ids == undisturbed([4], 1)


def test_overlapped_a_worker_of_20_ms_a_step_nearly_always_has_the_next_one(start):
    """While requests come, stop, end at their lengths, are aborted and preempted."""
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
                    continue  # sent before the engine heard of the abort
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
    *had_next, _ = worker.had_next  # nothing follows the last one
    assert len(had_next) > 80
    assert sum(had_next) >= 0.95 * len(had_next)
    assert engine.shutdown() == 0


def test_a_request_with_odd_scores_gets_an_error_and_the_others_their_tokens(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 3))
    engine.answer_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    result = engine.runner.execute(step)
    engine.worker.send(
        msgspec.structs.replace(result, sampled_token_ids=[[]], failed_handles=result.handles)
    )
    message = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.outputs and each.outputs[0].error
    )
    (output,) = message.outputs
    assert (output.request_id, output.token_index) == (1, 1)
    assert (output.finish_reason, output.error.kind) == (FinishReason.ERROR, "internal")
    assert message.stats.num_corrupted == 1
    front_end.send(engine.request(2, [4], 2))
    outputs = outputs_of(engine, 2)
    assert [token for each in outputs for token in each.new_token_ids] == undisturbed([4], 2)


def test_each_front_end_gets_its_own(start):
    engine = start(frontend=FrontEndConfig(api_server_count=2))
    engine.start()
    first, second = engine.front_ends
    first.send(engine.request(1, [1], 1))
    engine.expect(first, EngineCoreOutputs, lambda each: each.accepted == [1])
    second.send(engine.request(1 << 55, [2], 1))
    message = engine.expect(second, EngineCoreOutputs, lambda each: each.accepted)
    assert (message.accepted, message.stats) == ([1 << 55], None)
    engine.answer_step()
    (output,) = engine.expect(first, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (output.request_id, output.new_token_ids) == (1, undisturbed([1], 1))
    engine.answer_step()
    (output,) = engine.expect(second, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (output.request_id, output.new_token_ids) == (1 << 55, undisturbed([2], 1))


def test_a_bad_request_gets_an_error_and_harms_nobody(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [5000], 1))
    (output,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error.kind == "invalid_request"
    assert "5000" in output.error.message
    front_end.send(engine.request(2, [5], 1, epoch=EPOCH - 1))
    front_end.send(engine.request(3, [5], 1))
    (output,) = outputs_of(engine, 3)
    assert output.request_id == 3


def test_shutdown_does_not_wait_for_a_step(start):
    engine = start()
    engine.start()
    engine.front_ends[0].send(engine.request(1, [1], 10))
    engine.expect(engine.worker, SchedulerOutput)
    assert engine.shutdown() == 0


def test_shutdown_does_not_wait_for_a_worker_that_loads(start):
    engine = start()
    assert engine.shutdown() == 0


def take_over(engine: EngineProcess, epoch: int, **changes) -> None:
    """Workers of another epoch take the place of those there were; the engine hears of it."""
    engine.replace_worker(epoch)
    engine.supervisor.send(NewWorkers(epoch))
    engine.worker.send(engine.worker_ready(epoch=epoch, **changes))


def test_requests_outlive_their_worker(start):
    """The old one has said that it failed, and takes a step with it."""
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 6))
    front_end.send(engine.request(2, [3], 1000))
    for _ in range(3):
        engine.answer_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    error = ErrorInfo("internal", "ValueError: nan", rank=0, traceback="Traceback: in forward()")
    engine.worker.send(ModelRunnerOutput(EPOCH, step.step, [], [], error=error))
    take_over(engine, EPOCH + 4)
    assert engine.expect(engine.worker, InitializeCache).epoch == EPOCH + 4
    front_end.send(Abort(EPOCH, 2, "disconnect"))
    front_end.send(engine.request(3, [9], 1))
    engine.expect(front_end, EngineCoreOutputs, lambda each: each.accepted == [3])
    engine.worker.send(CacheReady(EPOCH + 4, 0))
    assert engine.expect(engine.supervisor, WorkersReady, is_of(EPOCH + 4))
    step = engine.answer_step()
    assert step.epoch == EPOCH + 4
    assert [len(new.output_token_ids) for new in step.new_requests] == [3, 0]
    assert step.cached_requests.handles == step.finished_handles == []
    engine.expect(engine.supervisor, Heartbeat, is_of(EPOCH + 4))
    for _ in range(2):
        engine.answer_step()
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        message = engine.expect(front_end, EngineCoreOutputs)
        outputs += [each for each in message.outputs if each.request_id == 1]
    tokens = {}
    for each in outputs:
        for index, token in enumerate(each.new_token_ids, each.token_index):
            assert index not in tokens, "a token came twice"
            tokens[index] = token
    assert [tokens[index] for index in range(6 - len(tokens), 6)] == undisturbed([1, 2], 6)[
        6 - len(tokens) :
    ]
    assert max(tokens) == 5
    assert engine.shutdown() == 0


def is_of(epoch: int):
    return lambda message: message.worker_epoch == epoch


@pytest.mark.parametrize(
    ("what", "changes"),
    [("fingerprint", {"fingerprint": b"g" * 32}), ("vocab size", {"vocab_size": 7})],
)
def test_a_worker_that_comes_back_with_another_model_is_refused_by_name(start, what, changes):
    engine = start()
    engine.start()
    take_over(engine, EPOCH + 1, **changes)
    fatal = engine.expect(engine.supervisor, Fatal)
    assert f"ModelError: worker 0 came back with another {what}" in fatal.error.message


def test_a_worker_may_die_while_the_engine_waits_for_it(start):
    engine = start()
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    take_over(engine, EPOCH + 1)
    engine.expect(engine.worker, InitializeCache, lambda each: each.epoch == EPOCH + 1)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    engine.expect(engine.supervisor, EngineReady)
    engine.front_ends[0].send(engine.request(1, [1], 2))
    assert engine.answer_step().epoch == EPOCH + 1


def test_a_front_end_that_takes_over_begins_with_nothing(start):
    engine = start()
    ready = engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1], 1000))
    engine.answer_step()
    under_way = engine.expect(engine.worker, SchedulerOutput)
    engine.supervisor.send(NewFrontEnd(0, 1))
    following = engine.add_front_end(0, incarnation=1)
    assert engine.expect(following, EngineReady) == ready
    following.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    assert engine.expect(following, AdminReply).value == 0
    engine.worker.send(engine.runner.execute(under_way))
    following.send(engine.request(1 << 40, [4], 2))
    engine.answer_step()
    engine.answer_step()
    message = engine.expect(following, EngineCoreOutputs, lambda each: each.outputs)
    assert message.outputs[0].request_id == 1 << 40
    assert engine.shutdown() == 0


def test_a_pause_is_told_and_taken_up_again(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(AdminCall(EPOCH, 1, "pause", "finish_running"))
    assert engine.expect(engine.supervisor, Paused) == Paused("finish_running")
    front_end.send(AdminCall(EPOCH, 2, "resume"))
    assert engine.expect(engine.supervisor, Paused) == Paused(None)


def test_an_engine_that_follows_a_paused_one_is_paused(start):
    """What had begun with the last engine goes on."""
    engine = start(boot={"pause_mode": "finish_running"})
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 3))
    outputs = ((*undisturbed([3], 2),),)
    front_end.send(engine.request(2, [3], 4, output_token_ids=outputs, crash_count=1))
    begun = outputs_of(engine, 2)
    tokens = [token for each in begun for token in each.new_token_ids]
    assert (begun[0].token_index, tokens) == (2, undisturbed([3], 4)[2:])
    front_end.send(AdminCall(EPOCH, 1, "resume"))
    assert outputs_of(engine, 1)[0].token_index == 0
    assert engine.shutdown() == 0


def test_a_request_that_engines_died_of_is_computed_alone_and_at_last_refused(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1], 2, crash_count=4))
    front_end.send(engine.request(3, [3], 2, crash_count=2))
    message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.alone)
    assert message.alone == [1]
    steps = [engine.answer_step() for _ in range(3)]
    sequences = [len(each.new_requests) + len(each.cached_requests.handles) for each in steps]
    front_end.send(engine.request(2, [2], 2, crash_count=5))
    assert sequences == [1, 2, 1], "once it has a token it may have company"
    (output,) = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.outputs and each.outputs[0].error
    ).outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "crashed 5 times" in output.error.message
    assert output.error.to_exception().status == 500


@pytest.mark.parametrize("tokens", [[[1000]], [[]], []])
def test_a_result_that_cannot_be_ends_the_engine(start, tokens):
    engine = start()
    engine.start()
    engine.front_ends[0].send(engine.request(1, [1], 10))
    step = engine.expect(engine.worker, SchedulerOutput)
    engine.worker.send(ModelRunnerOutput(EPOCH, step.step, [0], tokens))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "worker 0" in fatal.error.message
    assert engine.process.wait(20) == 1


def test_garbage_from_the_worker_ends_the_engine(start):
    engine = start()
    engine.start()
    engine.worker.zmq_socket.send(b"\xc1 not a message")
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "worker 0" in fatal.error.message
    assert engine.process.wait(20) == 1


def test_a_worker_of_another_version_is_refused(start):
    engine = start()
    engine.worker.send(engine.worker_ready(protocol_version=PROTOCOL_VERSION + 1))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "protocol" in fatal.error.message
    assert engine.process.wait(20) == 1


def test_a_pool_without_room_for_a_block_is_refused_by_name(start):
    engine = start()
    engine.worker.send(engine.worker_ready(kv_cache_bytes=100))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "--kv-cache-memory" in fatal.error.message


def test_a_session_goes_on_turn_by_turn(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2, 3], 2, resumable=True))
    first = outputs_of(engine, 1)
    assert first[-1].goes_on
    tokens = [token for each in first for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2, 3], 2)
    front_end.send(SessionInput(EPOCH, 1, [4, 5]))
    second = outputs_of(engine, 1)
    tokens = [token for each in second for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2, 3, *undisturbed([1, 2, 3], 1), 4, 5], 2)
    assert second[0].first.num_cached_tokens == 4
    front_end.send(SessionInput(EPOCH, 1, [], last=True))
    (final,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (final.finish_reason, final.goes_on) == (FinishReason.LENGTH, False)
    front_end.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    assert engine.expect(front_end, AdminReply).value == 0
    front_end.send(AdminCall(EPOCH, 2, "reset_prefix_cache"))
    assert engine.expect(front_end, AdminReply).ok
    assert engine.shutdown() == 0


@pytest.mark.parametrize("seconds", [0.1, IDLE_SECONDS + 0.3])
def test_a_session_that_hears_nothing_ends_though_nothing_else_happens(start, seconds):
    engine = start(scheduler=SchedulerConfig(session_timeout=seconds))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2, 3], 1, resumable=True))
    assert outputs_of(engine, 1)[-1].goes_on
    (final,) = engine.expect(front_end, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert final.finish_reason is FinishReason.ERROR
    assert "--session-timeout" in final.error.message
    front_end.send(SessionInput(EPOCH, 1, [4, 5]))
    front_end.send(engine.request(2, [4], 1))
    (output,) = outputs_of(engine, 2)
    assert output.new_token_ids == undisturbed([4], 1)
    assert engine.shutdown() == 0


def ask(engine: EngineProcess) -> EngineAlive:
    engine.supervisor.send(Ping())
    return engine.expect(engine.supervisor, EngineAlive)


def test_it_says_whom_it_waits_for_when_it_is_asked(start):
    engine = start()
    assert ask(engine) == EngineAlive(EPOCH, 0, (0,)), "the worker has not said anything"
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    assert ask(engine) == EngineAlive(EPOCH, 0, (0,)), "its cache is not there"
    engine.worker.send(CacheReady(EPOCH, 0))
    engine.expect(engine.supervisor, EngineReady)
    assert ask(engine) == EngineAlive(EPOCH, 0, (), ready=True)
    engine.front_ends[0].send(engine.request(1, [1, 2], 2))
    step = engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine) == EngineAlive(EPOCH, 0, (0,), ready=True, has_work=True)
    engine.worker.send(engine.runner.execute(step))
    engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine) == EngineAlive(EPOCH, 1, (0,), ready=True, has_work=True)
    take_over(engine, EPOCH + 1)
    engine.expect(engine.worker, InitializeCache)
    assert ask(engine) == EngineAlive(EPOCH + 1, 0, (0,), has_work=True)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    engine.answer_step()
    finished = engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine).awaits == (0,), "an answer to a step without tokens is one, too"
    engine.worker.send(engine.runner.execute(finished))
    while ask(engine).awaits:
        pass
    idle = ask(engine)
    assert (idle.worker_epoch, idle.awaits, idle.has_work) == (EPOCH + 1, (), False)
    assert engine.shutdown() == 0


@pytest.mark.parametrize("resumable", [False, True])
def test_idle_costs_nothing(start, resumable):
    """A whole second of waiting, counted in processor time: a spinning loop would use all of it.

    A session at rest is no reason to spin, either.
    """
    engine = start(scheduler=SchedulerConfig(max_num_seqs=4))
    engine.start()
    engine.front_ends[0].send(engine.request(1, [1], 1, resumable=resumable))
    outputs_of(engine, 1)
    before = engine.cpu_seconds()
    with pytest.raises(subprocess.TimeoutExpired):
        engine.process.wait(1.2)
    assert engine.cpu_seconds() - before < 0.3


def test_a_model_with_windows(start):
    engine = start(scheduler=SchedulerConfig(max_num_batched_tokens=64))
    windows = (None, 40, 40)
    engine.runner = PagedRunner(BLOCK_SIZE, windows=windows)
    ready = engine.worker_ready()
    groups = tuple(KVGroup(window) for window in windows)
    geometry = msgspec.structs.replace(ready.geometry, groups=groups)
    engine.worker.send(msgspec.structs.replace(ready, geometry=geometry))
    assert engine.expect(engine.worker, InitializeCache).num_blocks == 100
    engine.worker.send(CacheReady(EPOCH, 0))
    # ceil(103 / 16) + 1 blocks for each window, the other 83 for full attention.
    assert engine.expect(engine.supervisor, EngineReady).max_model_len == 83 * BLOCK_SIZE
    (front_end,) = engine.front_ends
    prompt = [position % 900 for position in range(1000)]
    for request_id, num_cached in ((1, 0), (2, 992)):
        front_end.send(engine.request(request_id, prompt, 20))
        for _ in range((1000 - num_cached - 1) // 64):
            engine.answer_step()
        outputs = outputs_of(engine, request_id)
        assert outputs[0].first.num_cached_tokens == num_cached
        tokens = [token for each in outputs for token in each.new_token_ids]
        assert tokens == undisturbed(prompt, 20)
    front_end.send(AdminCall(EPOCH, 1, "check_integrity"))
    assert engine.expect(front_end, AdminReply) == AdminReply(EPOCH, 1, True)
    assert engine.shutdown() == 0


@pytest.fixture
def subscribe():
    """Connects SUB sockets that are closed with the test."""
    sockets = []

    def factory(endpoint: str) -> zmq.Socket:
        socket = zmq.Context.instance().socket(zmq.SUB)
        sockets.append(socket)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    yield factory
    for socket in sockets:
        socket.close(linger=0)


@pytest.mark.parametrize("endpoint", ["ipc", "tcp://127.0.0.1:0"])
def test_kv_events_tell_what_is_cached(start, subscribe, endpoint):
    engine = start(cache=CacheConfig(kv_events_endpoint=endpoint))
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    notice = engine.expect(engine.supervisor, Notice, lambda each: "KV events" in each.message)
    socket = subscribe(notice.message.removeprefix("KV events: "))
    engine.expect(engine.supervisor, EngineReady)
    (front_end,) = engine.front_ends
    decoder = MessageDecoder(KVEventBatch)
    # A subscriber that comes late starts from an empty cache, when it hears of one.
    calls = 0
    while not socket.poll(20):
        calls += 1
        assert calls < 500
        front_end.send(AdminCall(EPOCH, calls, "reset_prefix_cache"))
        assert engine.expect(front_end, AdminReply).ok

    prompts = [list(range(40)), [*range(16), *range(500, 540)], list(range(100, 116))]
    expected = set()
    for request_id, prompt in enumerate(prompts, 1):
        front_end.send(engine.request(request_id, prompt, 1))
        outputs_of(engine, request_id)
        hashes = []
        BlockHasher(BLOCK_SIZE, b"f" * 32).extend(hashes, prompt)
        expected |= {(0, block_hash) for block_hash in hashes}
    known, sequences = CachedHashes(), []
    while known.held != expected:
        assert socket.poll(20_000), "the events are not complete"
        batch = decoder.decode(socket.recv())
        assert batch.epoch == EPOCH
        sequences.append(batch.sequence)
        for event in batch.events:
            known.apply(event)
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    front_end.send(AdminCall(EPOCH, 0, "reset_prefix_cache"))
    assert engine.expect(front_end, AdminReply).ok
    assert socket.poll(20_000)
    assert decoder.decode(socket.recv()).events == [AllBlocksCleared()]
    assert engine.shutdown() == 0


def test_an_endpoint_that_cannot_be_bound_is_refused_by_name(start):
    engine = start(cache=CacheConfig(kv_events_endpoint="ipc:///nowhere/at/all"))
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH, 0))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "--kv-events-endpoint ipc:///nowhere/at/all" in fatal.error.message


def test_residency_of_blocks_travels_with_the_statistics(start):
    engine = start(cache=CacheConfig(num_gpu_blocks_override=3, kv_cache_metrics_one_in=1))
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1] * 16, 2))
    outputs_of(engine, 1)
    front_end.send(engine.request(2, [2] * 17, 1))
    engine.answer_step()
    message = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.stats and each.stats.kv_evictions
    )
    (eviction, *_) = message.stats.kv_evictions
    assert eviction.lifetime >= eviction.idle >= 0
