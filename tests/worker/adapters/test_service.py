"""A worker over its sockets: adapters are loaded while steps go on, dropped, and loaded again."""

import select
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from proto import PROTOCOL_VERSION
from proto.errors import ProtocolError
from proto.messages.lifecycle import (
    CacheReady,
    InitializeCache,
    NewEngine,
    Shutdown,
    ToSupervisor,
    WorkerReady,
)
from proto.messages.lora import AdapterLoaded, DropAdapter, LoadAdapter
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import PreparedModel
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from proto.runtime.sockets import Link, Poller
from proto.settings.config import CacheConfig, LoRAConfig, ModelConfig, ServeConfig
from tests.fakes import lifecycle_messages
from tests.fakes.adapters import SEVEN, Served, make_adapter, merged
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.started_worker import started_worker
from tests.fakes.tiny_checkpoints import save_tiny
from worker.layers.adapters import Adapter, StepAdapters
from worker.loader.adapters.files import Slices
from worker.plan.memory_plan import plan_memory
from worker.step.adapter_store import AdapterStore
from worker.worker import FromEngine

LIMIT_SECONDS = 30.0
PROMPT = list(range(20, 43))


class Model:
    """A tiny model with two adapters."""

    def __init__(self, folder: Path) -> None:
        self.own = save_tiny("llama", folder)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        self.paths = [make_adapter(self.own, folder / f"a{seed}", seed) for seed in (1, 2)]

    def first_token(self, number: int) -> int:
        """Return the best token after the prompt with an adapter; 0: without."""
        model = merged(self.own, self.paths[number - 1]) if number else self.own
        with torch.no_grad():
            return int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


class Running:
    """A worker in a thread; the test is its supervisor and its engines."""

    def __init__(self, prepared: PreparedModel, run_dir: str, **lora: Any) -> None:
        config = ServeConfig(
            model=ModelConfig(dtype="float32"),
            cache=CacheConfig(kv_cache_memory=1 << 20),
            lora=LoRAConfig(**{"enable_lora": True, **lora}),
        )
        self._run_dir = run_dir
        self.supervisor = Link.bind(f"{run_dir}/s", ToSupervisor)
        self.links = [self.supervisor]
        self.errors: list[BaseException] = []
        boot = lifecycle_messages.boot("worker", config=config, model=prepared)
        own = Link.connect(f"{run_dir}/s", NewEngine | Shutdown)
        worker = started_worker(
            boot, lambda epoch: Link.connect(f"{run_dir}/e{epoch}", FromEngine), own
        )
        self.worker = worker
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except ProtocolError as error:
            self.errors.append(error)

    def engine(self, epoch: int) -> "Engine":
        answers = WorkerReady | CacheReady | ModelRunnerOutput | AdapterLoaded
        link = Link.bind(f"{self._run_dir}/e{epoch}", answers)
        self.links.append(link)
        return Engine(link, epoch)

    def stop(self) -> None:
        self.supervisor.send(Shutdown())
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()
        for link in self.links:
            link.close()


class Engine:
    """The engine's end of the link of an epoch, with its steps."""

    def __init__(self, link: Link, epoch: int) -> None:
        self.link = link
        self.epoch = epoch
        self._received: list[Any] = []
        self._step = 0
        self.expect(WorkerReady)
        link.send(InitializeCache(PROTOCOL_VERSION, epoch, 40, 16, 100))
        self.expect(CacheReady)

    def expect(self, kind: type) -> Any:
        """Return the next message of a kind; others are kept."""
        poller = Poller([self.link])
        while True:
            for number, message in enumerate(self._received):
                if isinstance(message, kind):
                    return self._received.pop(number)
            assert poller.wait(LIMIT_SECONDS), f"no {kind.__name__}"
            self._received += self.link.receive()

    def load(self, number: int, path: Path, digest: bytes = b"") -> AdapterLoaded:
        self.link.send(LoadAdapter(self.epoch, number, str(path), digest))
        answer = self.expect(AdapterLoaded)
        assert isinstance(answer, AdapterLoaded)
        assert (answer.epoch, answer.rank, answer.lora_int_id) == (self.epoch, 0, number)
        return answer

    def begin_step(self, *ids: int) -> None:
        """Send a step with the prompt for each of these adapters, which then ends."""
        self._step += 1
        first = 10 * self._step
        new = [
            NewRequestData(
                seq_id=first + place,
                prompt_token_ids=PROMPT,
                output_token_ids=[],
                sampling_params=SamplingParams(max_tokens=2, temperature=0.0),
                seed=0,
                choice=0,
                block_ids=[[1 + 2 * place, 2 + 2 * place]],
                num_computed_tokens=0,
                num_scheduled_tokens=len(PROMPT),
                lora_int_id=number,
            )
            for place, number in enumerate(ids)
        ]
        self.link.send(
            SchedulerOutput(
                epoch=self.epoch,
                step=self._step,
                new_requests=new,
                cached_requests=CachedRequestData(),
                total_num_scheduled_tokens=len(ids) * len(PROMPT),
                finished_seq_ids=[first - 10 + each for each in range(self._last)],
                preempted_seq_ids=[],
            )
        )
        self._last = len(ids)

    _last = 0

    def tokens(self) -> list[int]:
        output = self.expect(ModelRunnerOutput)
        assert output.error is None, output.error
        return [tokens[0] for tokens in output.sampled_token_ids]


@pytest.fixture
def running(model: Model) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(model.prepared, run_dir)
        yield worker
        worker.stop()


def test_steps_name_the_adapters_that_were_loaded(model: Model, running: Running) -> None:
    engine = running.engine(1)
    answers = [engine.load(number, path) for number, path in zip((7, 3), model.paths, strict=True)]
    assert [each.error for each in answers] == [None, None]
    assert answers[0].digest != answers[1].digest
    assert all(each.effect > 0.1 and each.num_bytes > 0 for each in answers)
    engine.begin_step(3, 0, 7)
    wanted = [model.first_token(each) for each in (2, 0, 1)]
    assert engine.tokens() == wanted
    assert len(set(wanted)) > 1, "a difference would not be visible"
    engine.link.send(DropAdapter(1, 7))
    again = engine.load(8, model.paths[0], answers[0].digest)
    assert again.digest == answers[0].digest
    engine.begin_step(8, 3)
    assert engine.tokens() == [wanted[2], wanted[0]]


def test_an_adapter_is_loaded_while_steps_go_on(model: Model, running: Running) -> None:
    engine = running.engine(1)
    base = model.first_token(0)
    engine.link.send(LoadAdapter(1, 1, str(model.paths[0])))
    for _ in range(5):
        engine.begin_step(0)
        assert engine.tokens() == [base]
    assert engine.expect(AdapterLoaded).error is None
    engine.begin_step(1)
    assert engine.tokens() == [model.first_token(1)]


def test_an_adapter_that_cannot_be_read_harms_no_step(
    model: Model, running: Running, tmp_path: Path
) -> None:
    engine = running.engine(1)
    error = engine.load(1, tmp_path / "nowhere").error
    assert error is not None
    assert (error.kind, error.param) == ("invalid_request", "lora_path")
    assert "nowhere" in error.message
    other = engine.load(2, model.paths[0], b"\x07" * 32)
    assert other.error is not None
    assert "other content" in other.error.message
    engine.begin_step(0)
    assert engine.tokens() == [model.first_token(0)]


class HangingLoader:
    """A loader whose disk does not give the adapter "/gone" until it is released."""

    def __init__(self) -> None:
        self.reads, self.is_released = threading.Event(), threading.Event()

    def load(self, path: str, digest: bytes) -> Slices[Adapter]:
        if path == "/gone":
            self.reads.set()
            assert self.is_released.wait(LIMIT_SECONDS)
        yield
        return Adapter(products={})


def test_a_disk_that_does_not_answer_delays_no_step_and_no_later_load() -> None:
    """The load behind it goes on when it is given up."""
    loader = HangingLoader()
    store = AdapterStore(loader, StepAdapters())  # type: ignore[arg-type]
    try:
        store.begin_load(LoadAdapter(1, 1, "/gone"))
        store.begin_load(LoadAdapter(1, 2, "/there"))
        assert loader.reads.wait(LIMIT_SECONDS)
        began = time.monotonic()
        with store.computing():
            assert time.monotonic() < began + 1.0
        store.drop(1)
        assert select.select([store.descriptor], [], [], LIMIT_SECONDS)[0]
        assert [answer.lora_int_id for answer in store.take_finished()] == [2]
        loader.is_released.set()
        store.begin_load(LoadAdapter(1, 3, "/there"))
        assert select.select([store.descriptor], [], [], LIMIT_SECONDS)[0]
        assert [answer.lora_int_id for answer in store.take_finished()] == [3]
    finally:
        loader.is_released.set()
        store.close()


@pytest.mark.parametrize(("num_loads", "least", "most"), [(1, 0.1, 0.2), (8, 0.4, 0.6)])
def test_slices_have_a_share_of_the_steps_that_grows_with_the_loads(
    num_loads: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("worker.step.adapter_store.time", Mock(monotonic=lambda: now))
    store = AdapterStore(Mock(), StepAdapters())
    store._wanted = {number: Mock() for number in range(num_loads)}
    with store.computing():
        now += 0.1
    assert least * 0.1 <= store._slice_seconds() <= most * 0.1
    with store.computing():
        now += 0.001
    assert store._slice_seconds() == 0.002


def test_the_next_engine_loads_its_adapters_again(model: Model, running: Running) -> None:
    """By ids of its own; a load that the last engine has begun has no answer."""
    first = running.engine(1)
    assert first.load(1, model.paths[0]).error is None
    first.link.send(LoadAdapter(1, 2, str(model.paths[1])))
    running.supervisor.send(NewEngine(2, 2))
    second = running.engine(2)
    assert second.load(1, model.paths[1]).error is None
    second.begin_step(1)
    assert second.tokens() == [model.first_token(2)]


def test_a_worker_without_adapters_refuses_them(model: Model) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as run_dir:
        worker = Running(model.prepared, run_dir, enable_lora=False)
        assert worker.worker._loaded.adapters is None
        assert worker.worker._loaded.model.adapters is None
        engine = worker.engine(1)
        engine.link.send(LoadAdapter(1, 1, str(model.paths[0])))
        worker.thread.join(LIMIT_SECONDS)
        assert "without --enable-lora" in str(worker.errors[0])
        for link in worker.links:
            link.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ({"r": 5, "use_dora": True}, ()),
        ({"r": 16, "target_modules": ["q_proj", "down_proj"]}, ("q_proj", "down_proj")),
        (
            {"r": 3, "modules_to_save": ["lm_head", "embed_tokens"]},
            (*SEVEN, "lm_head", "embed_tokens"),
        ),
    ],
    ids=["factors", "two modules", "head and embedding"],
)
def test_an_adapter_takes_the_memory_that_the_plan_says(
    settings: dict[str, Any], modules: tuple[str, ...], dtype: Any, model: Model, tmp_path: Path
) -> None:
    """What it lacks of a gain and a shift for each output is what the plan has more."""
    rank = settings["r"]
    path = make_adapter(model.own, tmp_path, **{"lora_alpha": rank, **settings})
    served = Served(model.prepared, getattr(torch, dtype), max_rank=rank)
    loaded = served.load(path)
    lora = LoRAConfig(
        enable_lora=True, max_cpu_loras=7, max_lora_rank=rank, lora_target_modules=modules
    )
    config = ServeConfig(model=ModelConfig(dtype=dtype), lora=lora)
    planned = plan_memory(config, model.prepared, CPU).work["7 adapters"]
    lacking = 0
    for number, update in loaded.products.items():
        names = served.targets.weights[number]
        outputs = sum(served.loader._weights[name].shape[0] for name in names)
        lacking += 4 * outputs * [update.gain, update.shift].count(None)
    assert planned == 7 * (loaded.num_bytes + lacking)
