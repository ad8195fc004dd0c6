"""The worker process: its start, changes of the engine, and messages that cannot be decoded."""

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from proto import PROTOCOL_VERSION
from proto.errors import ConfigError, TokendError
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    Notice,
    ProcessBoot,
    ProtocolViolation,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from proto.runtime.run_directory import TORCH_FOLDER_VARIABLE
from proto.runtime.sockets import Link, Poller, worker_path
from proto.settings.config import CacheConfig, CpuWeights, ModelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.links import receive
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.started_worker import started_worker
from tests.fakes.tiny_checkpoints import save_tiny
from worker import loaded_model
from worker import worker as engine_wait
from worker import worker as service
from worker.host.device import HostDevice
from worker.kv_connector.base import NO_CONNECTOR
from worker.kv_connector.steps import StepConnector
from worker.runner_builder import RunnerBuilder
from worker.step.model_runner import FinishedStep, GrammarMaskSource

LIMIT_SECONDS = 20.0


def boot_of_tiny_model(folder: Path, cache: CacheConfig) -> ProcessBoot:
    save_tiny("llama", folder)
    model = prepare_checkpoint(folder, folder / "prepared")
    return lifecycle_messages.boot("worker", config=ServeConfig(cache=cache), model=model)


@pytest.mark.parametrize(
    "cache", [CacheConfig(kv_cache_memory=1 << 60), CacheConfig(num_gpu_blocks_override=1 << 50)]
)
def test_a_kv_pool_beyond_the_memory_is_refused_before_the_weights_are_loaded(
    cache: CacheConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = Mock()
    monkeypatch.setattr(loaded_model, "load_model", load_model)
    with pytest.raises(ConfigError, match="does not fit into the memory") as raised:
        service.PreparedWorker(boot_of_tiny_model(tmp_path, cache), Mock())
    assert raised.value.param is not None
    assert getattr(cache, raised.value.param) is not None
    load_model.assert_not_called()


def test_a_standby_worker_plans_the_memory_that_is_free_when_it_gets_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start the KV of the worker that it replaces was in use."""
    free = [4 << 30]
    monkeypatch.setattr(HostDevice, "free_bytes", lambda *_: free[0])
    boot = boot_of_tiny_model(tmp_path, CacheConfig())
    without_place = msgspec.structs.replace(boot, epoch=0, worker_epoch=0)
    standby = service.PreparedWorker(without_place, Mock())
    cold = service.PreparedWorker(boot, Mock())
    free[0] = 6 << 30
    assert standby.take_place().plan.free == 6 << 30
    assert standby.take_place().plan.pool_bytes > cold.take_place().plan.pool_bytes
    assert cold.take_place().plan.free == 4 << 30, "the plan from before its own weights"


@pytest.mark.parametrize("given", [None, "/mine"])
def test_what_torch_leaves_ends_with_the_daemon(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TORCH_FOLDER_VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(TORCH_FOLDER_VARIABLE)
    monkeypatch.setattr(service, "PreparedWorker", Mock())
    boot = msgspec.structs.replace(lifecycle_messages.boot("worker"), run_dir=str(tmp_path))
    service.prepare(boot, Mock())
    assert os.environ[TORCH_FOLDER_VARIABLE] == (given or str(tmp_path / "torch"))


class Running:
    """A worker with a tiny model in a thread; the test acts as its supervisor and engines."""

    def __init__(
        self,
        folder: Path,
        run_dir: str,
        weights: CpuWeights = "auto",
    ) -> None:
        save_tiny("llama", folder)
        model = prepare_checkpoint(folder, folder / "prepared")
        self._run_dir = run_dir
        self.supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        self.links = [self.supervisor]
        link = Link.connect(f"{run_dir}/s", NewEngine | Shutdown)
        config = ServeConfig(
            model=ModelConfig(cpu_weights=weights),
            cache=CacheConfig(kv_cache_memory=1 << 20),
        )
        boot = lifecycle_messages.boot("worker", config=config, model=model)
        worker = started_worker(boot, self._connect_engine, link)
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(worker,), daemon=True)
        self.thread.start()

    def engine(self, epoch: int) -> Link:
        """Bind the engine's end of the link of this epoch."""
        self.links.append(Link.bind(f"{self._run_dir}/e{epoch}", WorkerReady | CacheReady))
        return self.links[-1]

    def expect(self, link: Link, kind: type) -> None:
        poller = Poller(self.links)
        while not any(isinstance(each, kind) for each in link.receive()):
            assert poller.wait(LIMIT_SECONDS), f"no {kind.__name__}"

    def _connect_engine(self, epoch: int) -> Link:
        return Link.connect(f"{self._run_dir}/e{epoch}", InitializeCache | SchedulerOutput)

    def _run(self, worker: Any) -> None:
        try:
            worker.run()
        except TokendError as error:
            self.errors.append(error)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(tmp_path, run_dir)
        yield worker
        for link in worker.links:
            link.close()


def test_a_worker_waits_for_the_next_engine_with_a_limit(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.expect(running.engine(1), WorkerReady)
    monkeypatch.setattr(engine_wait, "ENGINE_SECONDS", 0.5)
    engine = running.engine(2)
    running.supervisor.send(NewEngine(2, 2))
    running.expect(engine, WorkerReady)
    engine.send(InitializeCache(PROTOCOL_VERSION, 2, 4, 16, 32))
    running.expect(engine, CacheReady)
    running.thread.join(1.0)
    assert running.thread.is_alive(), "an idle engine is connected"
    running.supervisor.send(NewEngine(3, 3))
    running.thread.join(LIMIT_SECONDS)
    assert [str(each) for each in running.errors] == ["no engine has connected for 0.5 s"]


def test_messages_of_another_epoch_are_dropped(running: Running) -> None:
    engine = running.engine(1)
    running.expect(engine, WorkerReady)
    for epoch in (7, 1):
        engine.send(InitializeCache(PROTOCOL_VERSION, epoch, 4, 16, 32))
    assert [each.epoch for each in receive(engine)] == [1]
    running.supervisor.send(Shutdown())
    running.thread.join(LIMIT_SECONDS)
    assert engine.receive() == []


def ready_and_notices(folder: Path, weights: CpuWeights) -> tuple[WorkerReady, list[str]]:
    """The ready message and the notices of a worker with this weight format."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(folder, run_dir, weights)
        (ready,) = receive(worker.engine(1))
        notices = [each.message for each in worker.supervisor.receive() if isinstance(each, Notice)]
        worker.supervisor.send(Shutdown())
        worker.thread.join(LIMIT_SECONDS)
        for link in worker.links:
            link.close()
    return ready, notices


def test_the_weight_format_is_reported_and_changes_the_kv_fingerprint(tmp_path: Path) -> None:
    """The MLP's inner size of this model is 112, not a multiple of 32."""
    blocks, notices = ready_and_notices(tmp_path / "blocks", "int8")
    dense, no_notices = ready_and_notices(tmp_path / "dense", "f32")
    forms = {each.form: each.num_bytes for each in blocks.weights}
    assert min(forms.values()) > 0
    assert "int8" in forms
    assert len(notices) == 1
    assert notices[0].startswith("3 weights are dense")
    assert no_notices == []
    assert [each.form for each in dense.weights] == ["f32"]
    assert dense.weights[0].num_bytes > sum(forms.values())
    assert blocks.fingerprint != dense.fingerprint
    assert [each.what for each in blocks.phases] == ["imports", "weights"]
    assert all(each.seconds > 0 for each in blocks.phases)
    again, _ = ready_and_notices(tmp_path / "blocks", "int8")
    assert again.fingerprint == blocks.fingerprint


def receive_violations(supervisor: Link) -> list[ProtocolViolation]:
    """Wait for reports of invalid messages, among those of progress."""
    found: list[ProtocolViolation] = []
    while not found:
        found = [each for each in receive(supervisor) if isinstance(each, ProtocolViolation)]
    return found


def test_an_undecodable_message_is_reported_once_and_the_next_engine_is_served(
    tmp_path: Path,
) -> None:
    boot = boot_of_tiny_model(tmp_path, CacheConfig(kv_cache_memory=1 << 20))
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:

        def connect(epoch: int) -> Link:
            return Link.connect(worker_path(run_dir, epoch, 0), InitializeCache | SchedulerOutput)

        answers = WorkerReady | CacheReady | ModelRunnerOutput
        supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        engine = Link.bind(worker_path(run_dir, 1, 0), answers)
        own = Link.connect(f"{run_dir}/s", Shutdown | NewEngine)
        worker = started_worker(boot, connect, own)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        assert receive(engine)[0].epoch == 1
        engine.zmq_socket.send(b"\xc1")
        assert receive_violations(supervisor) == [
            ProtocolViolation("engine_core", 0, 1, "it sent an undecodable message")
        ]
        engine.zmq_socket.send(b"\xc1")
        engine.send(InitializeCache(PROTOCOL_VERSION, 1, 10, 16, 100))
        following = Link.bind(worker_path(run_dir, 8, 0), answers)
        supervisor.send(NewEngine(7, 8))
        assert receive(following)[0].epoch == 8
        assert engine.receive() == [], "messages after the undecodable one are ignored"
        following.zmq_socket.send(b"\xc1")
        assert [each.epoch for each in receive_violations(supervisor)] == [7]
        supervisor.send(Shutdown())
        thread.join(20.0)
        assert not thread.is_alive()
        for link in (supervisor, engine, following, own):
            link.close()


def test_the_output_of_a_step_is_sent_before_the_next_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both steps arrive together: the engine schedules a third one meanwhile."""
    first_received = threading.Event()

    class Runner:
        def launch(self, step: SchedulerOutput, get_grammars: GrammarMaskSource) -> FinishedStep:
            assert step.step == 1 or first_received.wait(LIMIT_SECONDS)
            return FinishedStep(lambda: ModelRunnerOutput(step.epoch, step.step, [], []))

    boot = boot_of_tiny_model(tmp_path, CacheConfig(kv_cache_memory=1 << 20))
    monkeypatch.setattr(
        RunnerBuilder, "build_model_runner", lambda *_: (Runner(), StepConnector(NO_CONNECTOR))
    )
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:

        def connect(epoch: int) -> Link:
            return Link.connect(f"{run_dir}/e", InitializeCache | SchedulerOutput)

        supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        engine = Link.bind(f"{run_dir}/e", WorkerReady | CacheReady | ModelRunnerOutput)
        own = Link.connect(f"{run_dir}/s", Shutdown | NewEngine)
        worker = started_worker(boot, connect, own)
        engine.send(InitializeCache(PROTOCOL_VERSION, 1, 10, 16, 100))
        for step in (1, 2):
            nothing = CachedRequestData([], [], [], [], [], [])
            engine.send(
                SchedulerOutput(
                    epoch=1,
                    step=step,
                    new_requests=[],
                    cached_requests=nothing,
                    total_num_scheduled_tokens=0,
                    finished_seq_ids=[],
                    preempted_seq_ids=[],
                )
            )
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        *_, first = receive(engine, 3)
        first_received.set()
        (second,) = receive(engine)
        assert (first.step, second.step) == (1, 2)
        supervisor.send(Shutdown())
        thread.join(LIMIT_SECONDS)
        for link in (supervisor, engine, own):
            link.close()
