"""The worker's start, and its wait for another engine."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from proto import PROTOCOL_VERSION
from proto.config import CacheConfig, ServeConfig
from proto.errors import ConfigError, ProcessDiedError
from proto.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    ProcessBoot,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.prepared_model import PreparedModel
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Link, Poller
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker import engine_wait, service

LIMIT_SECONDS = 20.0
NO_MODEL = PreparedModel(
    folder="/nowhere",
    name="none",
    source="/nowhere",
    architecture="LlamaForCausalLM",
    vocab_size=10,
    max_position=16,
    weights_sha256="0" * 64,
)


def boot(config: ServeConfig, model: PreparedModel = NO_MODEL) -> ProcessBoot:
    return ProcessBoot(
        protocol_version=PROTOCOL_VERSION,
        role="worker",
        index=0,
        incarnation=0,
        epoch=1,
        worker_epoch=1,
        run_dir="/nowhere",
        death_fd=-1,
        config=config,
        model=model,
    )


def test_a_kv_pool_beyond_the_memory_is_refused_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model = Mock()
    monkeypatch.setattr(service, "load_model", load_model)
    config = ServeConfig(cache=CacheConfig(kv_cache_memory=1 << 60))
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        service.Service(boot(config), Mock(), Mock())
    load_model.assert_not_called()


class Running:
    """A worker with a tiny model in a thread; the test is its supervisor and its engines."""

    def __init__(self, folder: Path, run_dir: str) -> None:
        save_tiny("llama", folder)
        self._run_dir = run_dir
        self.supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        self.links = [self.supervisor]
        link = Link.connect(f"{run_dir}/s", NewEngine | Shutdown)
        config = ServeConfig(cache=CacheConfig(kv_cache_memory=1 << 20))
        worker = service.Service(
            boot(config, prepare_checkpoint(folder, folder / "prepared")), self._meet, link
        )
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
        except ProcessDiedError as error:
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
    assert [str(each) for each in running.errors] == ["no engine has come for 0.5 s"]
