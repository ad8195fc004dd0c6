"""Two tensor-parallel workers in threads; the test acts as their supervisor and engines."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from proto import PROTOCOL_VERSION
from proto.errors import ConfigError
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import PreparedModel
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from proto.runtime.sockets import Link, Poller, worker_path
from proto.settings.config import CacheConfig, ModelConfig, ParallelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.started_worker import started_worker
from tests.fakes.tiny_checkpoints import tiny_model

LIMIT_SECONDS = 60.0
POOL_BYTES = 1 << 20
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 288,
    "intermediate_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
"""Heads as in SmolLM2."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("uneven")
    tiny_model(LlamaConfig(**SIZES)).save_pretrained(folder)
    return prepare_checkpoint(folder, folder / "prepared")


def config_for(size: int) -> ServeConfig:
    return ServeConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(kv_cache_memory=POOL_BYTES),
        parallel=ParallelConfig(tensor_parallel_size=size),
    )


class Workers:
    """The workers of one group, and the links of an engine of epoch 1."""

    def __init__(self, model: PreparedModel, run_dir: str, size: int) -> None:
        self._run_dir = run_dir
        self.supervisors = [Link.bind(f"{run_dir}/s{rank}", ToSupervisor) for rank in range(size)]
        self.links = list(self.supervisors)
        self.engines: list[Link] = []
        workers = [
            started_worker(
                lifecycle_messages.boot(
                    "worker", index=rank, config=config_for(size), model=model, run_dir=run_dir
                ),
                lambda epoch, rank=rank: Link.connect(  # type: ignore[misc]
                    worker_path(run_dir, epoch, rank), InitializeCache | SchedulerOutput
                ),
                Link.connect(f"{run_dir}/s{rank}", NewEngine | Shutdown),
            )
            for rank in range(size)
        ]
        self.bind_engines(1)
        self.threads = [threading.Thread(target=each.run, daemon=True) for each in workers]
        for thread in self.threads:
            thread.start()

    def bind_engines(self, epoch: int) -> None:
        """Bind the links of the engine of this epoch."""
        messages = WorkerReady | CacheReady | ModelRunnerOutput
        self.engines = [
            Link.bind(worker_path(self._run_dir, epoch, rank), messages)
            for rank in range(len(self.supervisors))
        ]
        self.links += self.engines

    def receive_from_all(self) -> list[Any]:
        """The next message of every worker."""
        return [receive(engine) for engine in self.engines]

    def start(self, epoch: int) -> list[WorkerReady]:
        """Initialise the workers; returns their ready messages."""
        ready = self.receive_from_all()
        for engine in self.engines:
            engine.send(InitializeCache(PROTOCOL_VERSION, epoch, 20, 16, 64))
        assert self.receive_from_all() == [
            CacheReady(epoch, rank) for rank in range(len(self.engines))
        ]
        return ready

    def stop(self) -> None:
        for supervisor in self.supervisors:
            supervisor.send(Shutdown())
        for thread in self.threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive()
        for link in self.links:
            link.close()


def receive(link: Link) -> Any:
    poller = Poller([link])
    assert poller.wait(LIMIT_SECONDS)
    (message,) = link.receive()
    return message


def first_step(epoch: int) -> SchedulerOutput:
    """A step that computes the whole prompt of a request."""
    request = NewRequestData(
        seq_id=1,
        prompt_token_ids=[3, 14, 15, 92],
        output_token_ids=[],
        sampling_params=SamplingParams(max_tokens=4, temperature=0.0),
        seed=0,
        choice=0,
        block_ids=[[1]],
        num_computed_tokens=0,
        num_scheduled_tokens=4,
    )
    return SchedulerOutput(
        epoch=epoch,
        step=1,
        new_requests=[request],
        cached_requests=CachedRequestData(),
        total_num_scheduled_tokens=4,
        finished_seq_ids=[],
        preempted_seq_ids=[],
    )


@pytest.fixture
def two(model: PreparedModel) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        workers = Workers(model, run_dir, 2)
        yield workers
        workers.stop()


def weights(ready: WorkerReady) -> int:
    return sum(each.num_bytes for each in ready.weights)


def test_every_worker_reports_its_share_of_weights_and_kv(
    model: PreparedModel, two: Workers
) -> None:
    first, second = two.start(1)
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        alone = Workers(model, run_dir, 1)
        (whole,) = alone.start(1)
        alone.stop()
    assert [each.geometry.num_kv_heads for each in (first, second, whole)] == [2, 1, 3]
    tokens = {each.kv_cache_bytes // each.geometry.bytes_per_token for each in (first, second)}
    in_pool = POOL_BYTES // whole.geometry.bytes_per_token
    block_size = CacheConfig().block_size
    assert tokens == {in_pool // block_size * block_size}, (
        "the pool's blocks are the same on all ranks"
    )
    assert weights(first) + weights(second) == weights(whole)
    assert max(weights(first), weights(second)) <= 0.6 * weights(whole)
    assert len({each.fingerprint for each in (first, second, whole)}) == 3


def test_workers_agree_and_rejoin_after_an_engine_died_between_sending_to_them(
    two: Workers,
) -> None:
    """One worker has a step and waits for the other, which never receives it."""
    two.start(1)
    for engine in two.engines:
        engine.send(first_step(1))
    messages = two.receive_from_all()
    assert messages[0].sampled_token_ids == messages[1].sampled_token_ids
    assert len(messages[0].sampled_token_ids[0]) == 1
    two.engines[0].send(first_step(1))
    two.bind_engines(2)
    for supervisor in two.supervisors:
        supervisor.send(NewEngine(2, 2))
    two.start(2)
    for engine in two.engines:
        engine.send(first_step(2))
    again = two.receive_from_all()
    assert [each.sampled_token_ids for each in again] == [messages[0].sampled_token_ids] * 2
    assert [each.error for each in again] == [None, None]


def test_a_worker_waiting_for_its_group_connects_to_the_next_engine(two: Workers) -> None:
    """The engine died after initialising the cache of one worker only."""
    two.receive_from_all()
    two.engines[0].send(InitializeCache(PROTOCOL_VERSION, 1, 20, 16, 64))
    two.bind_engines(2)
    for supervisor in two.supervisors:
        supervisor.send(NewEngine(2, 2))
    assert [each.rank for each in two.start(2)] == [0, 1]


def test_too_many_workers_for_a_model_are_refused(model: PreparedModel, tmp_path: Path) -> None:
    boot = lifecycle_messages.boot("worker", index=3, config=config_for(10), model=model)
    supervisor = Link.bind(str(tmp_path / "s"), ToSupervisor)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 10: LlamaForCausalLM") as error:
        started_worker(boot, lambda epoch: supervisor, supervisor)
    assert error.value.param == "tensor_parallel_size"
    supervisor.close()
