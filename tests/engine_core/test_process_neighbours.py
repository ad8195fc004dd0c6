"""The engine process, whose workers and front ends die, restart, or send invalid messages."""

import os
import pickle

import pytest

from proto.errors import ErrorInfo
from proto.messages.engine_io import Abort, AdminCall, AdminReply, EngineCoreOutputs
from proto.messages.lifecycle import (
    CacheReady,
    EngineAlive,
    EngineReady,
    Fatal,
    Heartbeat,
    InitializeCache,
    NewFrontEnd,
    NewWorkers,
    Ping,
    ProtocolViolation,
    WorkersReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import FrontEndConfig
from tests.fakes.engine_process import EPOCH, EngineProcess
from tests.fakes.paged_runner import undisturbed


def test_requests_outlive_their_worker(start):
    """The old worker has reported that it failed, and a step is lost with it."""
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 6))
    front_end.send(engine.request(2, [3], 1000))
    for _ in range(3):
        engine.run_step()
    step = engine.expect(engine.worker, SchedulerOutput)
    error = ErrorInfo("internal", "ValueError: nan", rank=0, traceback="Traceback: in forward()")
    engine.worker.send(ModelRunnerOutput(EPOCH, step.step, [], [], error=error))
    engine.restart_workers(EPOCH + 4)
    assert engine.expect(engine.worker, InitializeCache).epoch == EPOCH + 4
    front_end.send(Abort(EPOCH, 2, "disconnect"))
    front_end.send(engine.request(3, [9], 1))
    engine.expect(front_end, EngineCoreOutputs, lambda each: each.accepted == [3])
    engine.worker.send(CacheReady(EPOCH + 4, 0))
    assert engine.expect(engine.supervisor, WorkersReady, is_of(EPOCH + 4))
    step = engine.run_step()
    assert step.epoch == EPOCH + 4
    assert [len(new.output_token_ids) for new in step.new_requests] == [3, 0]
    assert step.cached_requests.seq_ids == step.finished_seq_ids == []
    engine.expect(engine.supervisor, Heartbeat, is_of(EPOCH + 4))
    for _ in range(2):
        engine.run_step()
    outputs = []
    while not outputs or outputs[-1].finish_reason is None:
        message = engine.expect(front_end, EngineCoreOutputs)
        outputs += [each for each in message.outputs if each.request_id == 1]
    tokens = {}
    for each in outputs:
        for index, token in enumerate(each.new_token_ids, each.token_index):
            assert index not in tokens, "a token was sent twice"
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
    engine.restart_workers(EPOCH + 1, **changes)
    fatal = engine.expect(engine.supervisor, Fatal)
    assert f"ModelError: rank 0 came back with another {what}" in fatal.error.message


def test_a_worker_may_die_while_the_engine_waits_for_it(start):
    engine = start()
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    engine.restart_workers(EPOCH + 1)
    engine.expect(engine.worker, InitializeCache, lambda each: each.epoch == EPOCH + 1)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    engine.expect(engine.supervisor, EngineReady)
    engine.front_ends[0].send(engine.request(1, [1], 2))
    assert engine.run_step().epoch == EPOCH + 1


def test_a_front_end_that_takes_over_begins_with_nothing(start):
    engine = start()
    ready = engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1], 1000))
    engine.run_step()
    under_way = engine.expect(engine.worker, SchedulerOutput)
    engine.supervisor.send(NewFrontEnd(0, 1))
    following = engine.add_front_end(0, incarnation=1)
    assert engine.expect(following, EngineReady) == ready
    following.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    assert engine.expect(following, AdminReply).value == 0
    engine.worker.send(engine.runner.execute(under_way))
    following.send(engine.request(1 << 40, [4], 2))
    engine.run_step()
    engine.run_step()
    message = engine.expect(following, EngineCoreOutputs, lambda each: each.outputs)
    assert message.outputs[0].request_id == 1 << 40
    assert engine.shutdown() == 0


@pytest.mark.parametrize("tokens", [[[1000]], [[]], []])
def test_a_worker_with_an_impossible_result_is_dropped(start, tokens):
    engine = start()
    engine.start()
    engine.front_ends[0].send(engine.request(1, [1], 10))
    step = engine.expect(engine.worker, SchedulerOutput)
    engine.worker.send(ModelRunnerOutput(EPOCH, step.step, [0], tokens))
    assert "rank 0" in engine.expect(engine.supervisor, ProtocolViolation).reason
    assert engine.shutdown() == 0


def test_a_worker_that_sends_garbage_is_replaced_and_requests_continue(start):
    engine = start()
    engine.start()
    (front_end,) = engine.front_ends
    front_end.send(engine.request(1, [1, 2], 5))
    engine.run_step()
    engine.worker.zmq_socket.send(b"\xc1 not a message")
    distrust = engine.expect(engine.supervisor, ProtocolViolation)
    assert (distrust.role, distrust.index, distrust.epoch) == ("worker", 0, EPOCH)
    front_end.send(AdminCall(EPOCH, 1, "get_num_unfinished"))
    assert engine.expect(front_end, AdminReply).value == 1
    engine.supervisor.send(NewWorkers(EPOCH + 1))
    engine.replace_worker(EPOCH + 1)
    engine.worker.send(engine.worker_ready(epoch=EPOCH + 1))
    engine.expect(engine.worker, InitializeCache)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    assert engine.expect(engine.supervisor, WorkersReady) == WorkersReady(EPOCH + 1)
    tokens = [token for each in engine.outputs_of(1) for token in each.new_token_ids]
    assert tokens == undisturbed([1, 2], 5)[-len(tokens) :]
    assert engine.shutdown() == 0


def test_garbage_from_a_worker_that_was_never_ready_ends_the_engine(start):
    """Workers that cannot start are not replaced, because new ones would fail, too."""
    engine = start()
    engine.worker.zmq_socket.send(b"\xc1 not a message")
    fatal = engine.expect(engine.supervisor, Fatal)
    assert "rank 0" in fatal.error.message
    assert engine.process.wait(20) == 1


def test_garbage_from_a_front_end_is_dropped_and_others_are_served(start):
    engine = start(frontend=FrontEndConfig(api_server_count=2))
    engine.start()
    bad, good = engine.front_ends
    for frame in (b"", b"\xc1", b"\x91" * 100_000, pickle.dumps(print), os.urandom(5000)):
        bad.zmq_socket.send(frame)
    good.send(engine.request(1 << 55, [1, 2], 3))
    tokens = [
        token for each in engine.outputs_of(1 << 55, front_end=1) for token in each.new_token_ids
    ]
    assert tokens == undisturbed([1, 2], 3)
    bad.send(AdminCall(EPOCH, 1, "check_integrity"))
    assert engine.expect(bad, AdminReply).ok
    assert engine.shutdown() == 0


def ask(engine: EngineProcess) -> EngineAlive:
    engine.supervisor.send(Ping())
    return engine.expect(engine.supervisor, EngineAlive)


def test_the_engine_reports_which_process_it_waits_for(start):
    engine = start()
    waits = EngineAlive(EPOCH, 0, (0,), catches_up=True)
    assert ask(engine) == waits, "the worker has not sent a message"
    engine.worker.send(engine.worker_ready())
    engine.expect(engine.worker, InitializeCache)
    assert ask(engine) == waits, "its cache does not exist"
    engine.worker.send(CacheReady(EPOCH, 0))
    engine.expect(engine.supervisor, EngineReady)
    assert ask(engine) == EngineAlive(EPOCH, 0, (), ready=True)
    engine.front_ends[0].send(engine.request(1, [1, 2], 2))
    step = engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine) == EngineAlive(EPOCH, 0, (0,), ready=True, has_work=True)
    engine.worker.send(engine.runner.execute(step))
    engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine) == EngineAlive(EPOCH, 1, (0,), ready=True, has_work=True)
    engine.restart_workers(EPOCH + 1)
    engine.expect(engine.worker, InitializeCache)
    assert ask(engine) == EngineAlive(EPOCH + 1, 0, (0,), has_work=True, catches_up=True)
    engine.worker.send(CacheReady(EPOCH + 1, 0))
    engine.run_step()
    finished = engine.expect(engine.worker, SchedulerOutput)
    assert ask(engine).awaits == (0,), "the answer to an empty step counts"
    engine.worker.send(engine.runner.execute(finished))
    while ask(engine).awaits:
        pass
    idle = ask(engine)
    assert idle == EngineAlive(EPOCH + 1, idle.num_steps, (), ready=True)
    assert engine.shutdown() == 0
