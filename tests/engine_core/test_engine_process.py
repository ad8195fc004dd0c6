"""The engine process: start, requests, shutdown."""

import msgspec
import pytest

from proto import PROTOCOL_VERSION
from proto.codec import changed
from proto.messages.engine_io import (
    Abort,
    AdminCall,
    AdminReply,
    EngineCoreOutputs,
    FinishReason,
    RequestProgress,
)
from proto.messages.lifecycle import (
    CacheReady,
    EngineAlive,
    EngineReady,
    Fatal,
    InitializeCache,
    Notice,
    Paused,
    Ping,
    ProcessStart,
    StartPhase,
)
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import FrontEndConfig, ParallelConfig
from tests.fakes.engine_process import BLOCK_SIZE, EPOCH, is_idle
from tests.fakes.paged_runner import undisturbed

WORKER_PHASES = (StartPhase("imports", 1.5), StartPhase("weights", 0.25))


def test_an_engine_process_serves_from_start_to_shutdown(start, capfd):
    engine = start()
    engine.worker.send(changed(engine.worker_ready(), phases=WORKER_PHASES))
    assert engine.expect(engine.worker, InitializeCache) == InitializeCache(
        PROTOCOL_VERSION, EPOCH, 100, BLOCK_SIZE, 99 * BLOCK_SIZE, b"f" * 32
    )
    engine.worker.send(CacheReady(EPOCH, 0))
    notice = engine.expect(engine.supervisor, Notice)
    assert "1584" in notice.message
    assert "4096" in notice.message
    ready = engine.expect(engine.supervisor, EngineReady)
    assert "ready: 99 blocks" in capfd.readouterr().err, "before the message to the operator"
    assert (ready.max_model_len, ready.num_blocks, ready.vocab_size) == (1584, 99, 1000)
    worker, itself = ready.starts
    assert worker == ProcessStart("worker", 0, WORKER_PHASES)
    assert (itself.role, itself.index) == ("engine_core", 0)
    assert [each.what for each in itself.phases] == [
        *("imports", "workers' weights", "KV cache and warm-up", "scheduler and KV cache")
    ]
    (front_end,) = engine.front_ends
    assert engine.expect(front_end, EngineReady) == ready

    front_end.send(engine.request(7, [1, 2, 3], 5))
    assert engine.expect(front_end, EngineCoreOutputs).accepted == [7]
    outputs = engine.outputs_of(7)
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
    engine.run_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    front_end.send(AdminCall(EPOCH, 1, "reset_prefix_cache"))
    reply = engine.expect(front_end, AdminReply)
    assert not reply.ok
    assert "1 request" in reply.detail
    front_end.send(Abort(EPOCH, 1, "disconnect"))
    assert engine.expect(front_end, EngineCoreOutputs, is_idle).outputs == []
    engine.worker.send(engine.runner.execute(step))
    finished = engine.expect(engine.worker, SchedulerOutput)
    assert finished.finished_seq_ids == step.cached_requests.seq_ids
    engine.worker.send(engine.runner.execute(finished))
    front_end.send(engine.request(2, [4], 1))
    (output,) = engine.outputs_of(2)
    assert output.new_token_ids == undisturbed([4], 1)


def test_nonfinite_logits_fail_only_their_request(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 3))
    engine.run_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    result = engine.runner.execute(step)
    engine.worker.send(
        msgspec.structs.replace(result, sampled_token_ids=[[]], failed_seq_ids=result.seq_ids)
    )
    message = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.outputs and each.outputs[0].error
    )
    (output,) = message.outputs
    assert (output.request_id, output.token_index) == (1, 1)
    assert (output.finish_reason, output.error.kind) == (FinishReason.ERROR, "internal")
    assert message.stats.num_corrupted == 1
    front_end.send(engine.request(2, [4], 2))
    outputs = engine.outputs_of(2)
    assert [token for each in outputs for token in each.new_token_ids] == undisturbed([4], 2)


def test_every_front_end_gets_its_own_outputs(start):
    engine = start(frontend=FrontEndConfig(api_server_count=2))
    engine.start()
    first, second = engine.front_ends
    first.send(engine.request(1, [1], 1))
    engine.expect(first, EngineCoreOutputs, lambda each: each.accepted == [1])
    second.send(engine.request(1 << 55, [2], 1))
    message = engine.expect(second, EngineCoreOutputs, lambda each: each.accepted)
    assert message.accepted == [1 << 55]
    assert message.stats is not None, "statistics are sent with other messages"
    engine.run_step()
    (output,) = engine.expect(first, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (output.request_id, output.new_token_ids) == (1, undisturbed([1], 1))
    engine.run_step()
    (output,) = engine.expect(second, EngineCoreOutputs, lambda each: each.outputs).outputs
    assert (output.request_id, output.new_token_ids) == (1 << 55, undisturbed([2], 1))


def test_a_bad_request_gets_an_error_and_others_continue(start):
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
    (output,) = engine.outputs_of(3)
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


def test_a_pause_is_reported_and_restored(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(AdminCall(EPOCH, 1, "pause", "finish_running"))
    assert engine.expect(engine.supervisor, Paused) == Paused("finish_running")
    front_end.send(AdminCall(EPOCH, 2, "resume"))
    assert engine.expect(engine.supervisor, Paused) == Paused(None)


def test_the_supervisor_pauses_an_engine_that_is_replaced(start):
    """Operators call the current engine; this one does not report its pause."""
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1], 3))
    engine.expect(front_end, EngineCoreOutputs, lambda each: each.accepted)
    engine.supervisor.send(Paused("freeze"))
    engine.supervisor.send(Ping())
    engine.expect(engine.supervisor, EngineAlive)
    engine.supervisor.send(Ping())  # the first may be answered before the pause
    assert not engine.expect(engine.supervisor, EngineAlive).has_work
    engine.supervisor.send(Paused(None))
    assert engine.outputs_of(1)[-1].finish_reason is FinishReason.LENGTH
    front_end.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    engine.expect(front_end, AdminReply)
    engine.supervisor.send(Ping())
    answer = engine.expect(
        engine.supervisor, object, lambda each: isinstance(each, Paused | EngineAlive)
    )
    assert isinstance(answer, EngineAlive)
    assert engine.shutdown() == 0


def test_an_engine_that_follows_a_paused_one_is_paused(start):
    """Requests that ran in the previous engine continue."""
    engine = start(boot={"pause_mode": "finish_running"})
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 3))
    outputs = ((*undisturbed([3], 2),),)
    front_end.send(engine.request(2, [3], 4, output_token_ids=outputs, crash_count=1))
    begun = engine.outputs_of(2)
    tokens = [token for each in begun for token in each.new_token_ids]
    assert (begun[0].token_index, tokens) == (2, undisturbed([3], 4)[2:])
    front_end.send(AdminCall(EPOCH, 1, "resume"))
    assert engine.outputs_of(1)[0].token_index == 0
    assert engine.shutdown() == 0


def test_a_request_that_crashed_engines_runs_alone_and_is_finally_refused(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1], 2, crash_count=4))
    front_end.send(engine.request(3, [3], 2, crash_count=2))
    message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.alone)
    assert (message.alone, message.progress) == ([1], [RequestProgress(1, 0, 0)])
    message = engine.expect(front_end, EngineCoreOutputs, lambda each: each.progress)
    assert message.progress == [RequestProgress(1, 0, 1)]
    steps = [engine.run_step() for _ in range(3)]
    sequences = [len(each.new_requests) + len(each.cached_requests.seq_ids) for each in steps]
    front_end.send(engine.request(2, [2], 2, crash_count=5))
    assert sequences == [1, 2, 1], "after a token it may share steps"
    (output,) = engine.expect(
        front_end, EngineCoreOutputs, lambda each: each.outputs and each.outputs[0].error
    ).outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "crashed 5 times" in output.error.message
    assert output.error.to_exception().status == 500


def test_a_worker_of_another_version_is_refused(start):
    engine = start()
    engine.worker.send(engine.worker_ready(protocol_version=PROTOCOL_VERSION + 1))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "protocol" in fatal.error.message
    assert engine.process.wait(20) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_fingerprint": b"h" * 32}, "fingerprint of model and weights"),
        ({"geometry": {"dtype": "int8"}}, "KV dtype float32 and int8"),
    ],
)
def test_workers_with_different_models_are_refused_at_the_start(start, changes, message):
    engine = start(parallel=ParallelConfig(tensor_parallel_size=2))
    second = engine.add_worker(1)
    ready = engine.worker_ready()
    engine.worker.send(ready)
    if geometry := changes.get("geometry"):
        changes = {"geometry": msgspec.structs.replace(ready.geometry, **geometry)}
    second.send(engine.worker_ready(rank=1, **changes))
    fatal = engine.expect(engine.supervisor, Fatal)
    assert f"rank 0 and rank 1 do not fit together: {message}" in fatal.error.message
    assert engine.process.wait(20) == 1
    assert engine.inbox[engine.worker] == engine.inbox[second] == [], "no KV cache was allocated"


def test_two_equal_workers_start(start):
    engine = start(parallel=ParallelConfig(tensor_parallel_size=2))
    second = engine.add_worker(1)
    engine.worker.send(engine.worker_ready())
    second.send(engine.worker_ready(rank=1))
    for rank, link in enumerate((engine.worker, second)):
        engine.expect(link, InitializeCache)
        link.send(CacheReady(EPOCH, rank))
    assert engine.expect(engine.supervisor, EngineReady).num_blocks == 99
    assert engine.shutdown() == 0
