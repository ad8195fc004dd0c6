"""The worker's links: its start, and an engine that cannot be understood."""

import tempfile
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proto import PROTOCOL_VERSION
from proto.config import CacheConfig, ServeConfig
from proto.errors import ConfigError
from proto.lifecycle import (
    CacheReady,
    Distrust,
    InitializeCache,
    NewEngine,
    ProcessBoot,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.model_runner_output import ModelRunnerOutput
from proto.prepared_model import PreparedModel
from proto.scheduler_output import SchedulerOutput
from proto.sockets import Link, Poller, worker_path
from worker import service


def boot(config: ServeConfig) -> ProcessBoot:
    model = PreparedModel(
        folder="/nowhere",
        name="none",
        source="/nowhere",
        architecture="LlamaForCausalLM",
        vocab_size=10,
        max_position=16,
        weights_sha256="0" * 64,
    )
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
    spec = SimpleNamespace(windows=(None,), num_kv_heads=1, head_dim=8, vocab_size=10)
    monkeypatch.setattr(service, "load_model", lambda *_: SimpleNamespace(spec=spec))
    monkeypatch.setattr(service, "spec_from_config", Mock())
    monkeypatch.setattr(service, "read_config", lambda _: {})
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:

        def meet(epoch: int) -> Link:
            return Link.connect(worker_path(run_dir, epoch, 0), InitializeCache | SchedulerOutput)

        answers = WorkerReady | CacheReady | ModelRunnerOutput
        supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        engine = Link.bind(worker_path(run_dir, 1, 0), answers)
        own = Link.connect(f"{run_dir}/s", Shutdown | NewEngine)
        worker = service.Service(boot(ServeConfig()), meet, own)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        assert heard(engine)[0].epoch == 1
        engine.zmq_socket.send(b"\xc1")
        assert heard(supervisor) == [Distrust("engine_core", 0, 1, "it sent what is no message")]
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
