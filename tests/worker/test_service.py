"""The worker's links: its start, its wait for another engine, one that cannot be understood."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from proto import PROTOCOL_VERSION
from proto.config import CacheConfig, CpuWeights, ModelConfig, SchedulerConfig, ServeConfig
from proto.errors import ConfigError, TokendError
from proto.lifecycle import (
    CacheReady,
    ComputeShape,
    InitializeCache,
    NewEngine,
    Notice,
    ProtocolViolation,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import CachedRequestData, SchedulerOutput
from proto.sockets import Link, Poller, worker_path
from tests.fakes import boots
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker import loaded_model
from worker import worker as engine_wait
from worker import worker as service
from worker.kv_connector.base import NO_CONNECTOR
from worker.loader.formats import DenseFormat
from worker.model_runner import FinishedStep, GrammarMaskSource
from worker.runner_builder import RunnerBuilder

LIMIT_SECONDS = 20.0


def test_a_kv_pool_beyond_the_memory_is_refused_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model = Mock()
    monkeypatch.setattr(loaded_model, "load_model", load_model)
    config = ServeConfig(cache=CacheConfig(kv_cache_memory=1 << 60))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        service.Worker(boots.boot("worker", config=config), Mock(), Mock())
    load_model.assert_not_called()


def pretend_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = SimpleNamespace(num_kv_heads=1, head_dim=8)
    spec = SimpleNamespace(
        windows=(None,), attention_shape=heads, vocab_size=10, compute_shape=ComputeShape()
    )
    monkeypatch.setattr(loaded_model, "load_model", lambda *_: SimpleNamespace(spec=spec))
    monkeypatch.setattr(loaded_model, "spec_from_config", Mock())
    monkeypatch.setattr(loaded_model, "read_index", Mock())
    monkeypatch.setattr(loaded_model, "choose_format", lambda *_: DenseFormat(torch.float32))
    monkeypatch.setattr(loaded_model, "read_config", lambda _: {})


def test_more_blocks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_load(monkeypatch)
    config = ServeConfig(cache=CacheConfig(num_gpu_blocks_override=1 << 50))
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
        service.Worker(boots.boot("worker", config=config), Mock(), Mock())


class Running:
    """A worker with a tiny model in a thread; the test is its supervisor and its engines."""

    def __init__(
        self,
        folder: Path,
        run_dir: str,
        weights: CpuWeights = "auto",
        max_num_seqs: int = 256,
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
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        )
        boot = boots.boot("worker", config=config, model=model)
        worker = service.Worker(boot, self._meet, link)
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(worker,), daemon=True)
        self.thread.start()

    def engine(self, epoch: int) -> Link:
        """One that meets the worker at the path of this epoch."""
        self.links.append(Link.bind(f"{self._run_dir}/e{epoch}", WorkerReady | CacheReady))
        return self.links[-1]

    def expect(self, link: Link, kind: type) -> None:
        poller = Poller(self.links)
        while not any(isinstance(each, kind) for each in link.receive()):
            assert poller.wait(LIMIT_SECONDS), f"no {kind.__name__}"

    def _meet(self, epoch: int) -> Link:
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


def test_a_worker_waits_for_another_engine_and_not_for_ever(
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
    assert running.thread.is_alive(), "it has an engine, if one without work"
    running.supervisor.send(NewEngine(3, 3))
    running.thread.join(LIMIT_SECONDS)
    assert [str(each) for each in running.errors] == ["no engine has connected for 0.5 s"]


def test_messages_of_another_epoch_are_dropped(running: Running) -> None:
    engine = running.engine(1)
    running.expect(engine, WorkerReady)
    for epoch in (7, 1):
        engine.send(InitializeCache(PROTOCOL_VERSION, epoch, 4, 16, 32))
    assert [each.epoch for each in heard(engine)] == [1]
    running.supervisor.send(Shutdown())
    running.thread.join(LIMIT_SECONDS)
    assert engine.receive() == []


def first_words(folder: Path, weights: CpuWeights) -> tuple[WorkerReady, list[str]]:
    """What a worker with this form of the weights tells its engine, and its notices."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(folder, run_dir, weights)
        (ready,) = heard(worker.engine(1))
        notices = [each.message for each in worker.supervisor.receive() if isinstance(each, Notice)]
        worker.supervisor.send(Shutdown())
        worker.thread.join(LIMIT_SECONDS)
        for link in worker.links:
            link.close()
    return ready, notices


def test_the_form_of_the_weights_is_told_and_sets_its_kv_apart(tmp_path: Path) -> None:
    """The inner size of this model is 112: products over it are no whole blocks."""
    blocks, notices = first_words(tmp_path / "blocks", "int8")
    dense, no_notices = first_words(tmp_path / "dense", "f32")
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
    again, _ = first_words(tmp_path / "again", "int8")
    assert again.fingerprint == blocks.fingerprint


def test_more_rows_than_memory_holds_are_refused_before_they_are_made(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        running = Running(tmp_path, run_dir, max_num_seqs=1 << 40)
        engine = running.engine(1)
        running.expect(engine, WorkerReady)
        engine.send(InitializeCache(PROTOCOL_VERSION, 1, 4, 16, 32))
        running.thread.join(LIMIT_SECONDS)
        (error,) = running.errors
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"--max-num-seqs {1 << 40}: ")
        for link in running.links:
            link.close()


def heard(link: Link, count: int = 1) -> list[Any]:
    messages: list[Any] = []
    poller = Poller([link])
    while len(messages) < count:
        assert poller.wait(20.0)
        messages += link.receive()
    return messages


def test_an_engine_that_sends_garbage_is_told_of_once_and_the_next_one_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_to_load(monkeypatch)
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:

        def meet(epoch: int) -> Link:
            return Link.connect(worker_path(run_dir, epoch, 0), InitializeCache | SchedulerOutput)

        answers = WorkerReady | CacheReady | ModelRunnerOutput
        supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        engine = Link.bind(worker_path(run_dir, 1, 0), answers)
        own = Link.connect(f"{run_dir}/s", Shutdown | NewEngine)
        worker = service.Worker(boots.boot("worker"), meet, own)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        assert heard(engine)[0].epoch == 1
        engine.zmq_socket.send(b"\xc1")
        assert heard(supervisor) == [
            ProtocolViolation("engine_core", 0, 1, "it sent what is no message")
        ]
        engine.zmq_socket.send(b"\xc1")
        engine.send(InitializeCache(PROTOCOL_VERSION, 1, 10, 16, 100))
        following = Link.bind(worker_path(run_dir, 8, 0), answers)
        supervisor.send(NewEngine(7, 8))
        assert heard(following)[0].epoch == 8
        assert engine.receive() == [], "what came after the garbage is not obeyed"
        following.zmq_socket.send(b"\xc1")
        assert [each.epoch for each in heard(supervisor)] == [7]
        supervisor.send(Shutdown())
        thread.join(20.0)
        assert not thread.is_alive()
        for link in (supervisor, engine, following, own):
            link.close()


def test_a_step_is_answered_before_the_next_one_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where both have come at once: the engine schedules a third one meanwhile."""
    first_heard = threading.Event()

    class Runner:
        def launch(self, step: SchedulerOutput, get_grammars: GrammarMaskSource) -> FinishedStep:
            assert step.step == 1 or first_heard.wait(LIMIT_SECONDS)
            return FinishedStep(ModelRunnerOutput(step.epoch, step.step, [], []))

    pretend_to_load(monkeypatch)
    monkeypatch.setattr(RunnerBuilder, "build_model_runner", lambda *_: (Runner(), NO_CONNECTOR))
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:

        def meet(epoch: int) -> Link:
            return Link.connect(f"{run_dir}/e", InitializeCache | SchedulerOutput)

        supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        engine = Link.bind(f"{run_dir}/e", WorkerReady | CacheReady | ModelRunnerOutput)
        own = Link.connect(f"{run_dir}/s", Shutdown | NewEngine)
        worker = service.Worker(boots.boot("worker"), meet, own)
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
        *_, first = heard(engine, 3)
        first_heard.set()
        (second,) = heard(engine)
        assert (first.step, second.step) == (1, 2)
        supervisor.send(Shutdown())
        thread.join(LIMIT_SECONDS)
        for link in (supervisor, engine, own):
            link.close()
