"""Whole steps with adapters on a fake CUDA device: the tokens of the reference, and no waits.

Graphs are captured without any adapter; then adapters are loaded, evicted and replaced between
replays, while steps are in flight.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.busy_loop import OVERLAPPED
from engine_core.request import Request
from proto.codec import changed
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import LoRAConfig
from tests.fakes.adapters import Served, make_adapter
from tests.fakes.cuda_runner import (
    DTYPE,
    NUM_ROWS,
    VOCAB_SIZE,
    Harness,
    Model,
    OnFakeCuda,
    compute_by_torch,
    host_runner,
    num_cascades,
)
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.fake_cuda import FakeCuda, SlotsWithoutTriton
from tests.fakes.fake_device import on_host
from tests.fakes.lora import AdapterWorkers, lora_request
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.step_messages import StepMessages
from tests.fakes.tiny_checkpoints import save_tiny
from tests.worker.reference.low_rank import expected
from worker.cuda.runner_builder import run_largest_step
from worker.device import Device
from worker.layers.adapters import AdapterRows, LowRankUpdate, StepAdapters
from worker.loader.formats import WeightFormat
from worker.models.decoder import Decoder
from worker.parallel.group import RankGroup
from worker.step.adapter_store import AdapterStore
from worker.step.model_runner import ModelRunner, SyncModelRunner
from worker.step.runner_parts import Runner

pytestmark = pytest.mark.suite("devices")

RANKS = (4, 16, 64, 9)
DORA = 5
"""The number of the adapter with factors of outputs."""
MAX_LORAS = 2


class AdaptedModel(Model):
    """A tiny model with adapters of several ranks, the last one with DoRA, and biases."""

    cuda: FakeCuda
    max_loras = MAX_LORAS

    def __init__(self, folder: Path) -> None:
        super().__init__("llama", folder)
        settings: list[dict[str, Any]] = [{"r": rank, "lora_alpha": 2 * rank} for rank in RANKS]
        settings[3]["target_modules"] = ["k_proj", "down_proj"]
        settings.append({"r": 6, "use_dora": True})
        self.paths = [
            make_adapter(self.own, folder / f"a{number}", number, **each)
            for number, each in enumerate(settings, 1)
        ]

    def load(self, device: Device, weight_format: WeightFormat | None = None) -> Decoder:
        step: StepAdapters = InFloat64()
        if device is GPU:
            accelerator: Any = self.cuda.device
            step = SlotsWithoutTriton(lambda: accelerator)
        self.served = Served(
            self.prepared,
            self.dtype,
            weight_format,
            device=device,
            step=step,
            max_loras=self.max_loras,
        )
        self.store = self.served.store
        return self.served.decoder


class InFloat64(StepAdapters):
    """The adapters of the reference device, summed as on the fake device: sums have ties."""

    def add_update(
        self, update: LowRankUpdate, group: AdapterRows, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        rows = group.rows
        y[rows] = expected(update, x[rows], y[rows], group.scales).to(y.dtype)


class LoadingWorkers(AdapterWorkers):
    """Workers that load and drop real adapters, as the scheduler says."""

    def __init__(
        self, gate: object, load: Callable[[int], object], drop: Callable[[int], object]
    ) -> None:
        super().__init__(gate)
        self._load = load
        self._drop = drop

    def carry_out(self) -> None:
        before = set(self.held)
        num_loads = len(self.loads)
        super().carry_out()
        for number in before - self.held:
            self._drop(number)
        for number in self.loads[num_loads:]:
            self._load(number)


def harness_with(
    runner: Any, load: Callable[[int], object], drop: Callable[[int], object], **settings: Any
) -> Harness:
    """Return an engine whose workers load and drop the adapters of these numbers."""
    lora = LoRAConfig(enable_lora=True, max_loras=MAX_LORAS, max_cpu_loras=3)
    harness = Harness(runner, settings.pop("num_blocks", 81), lora=lora, **settings)
    harness.adapters = LoadingWorkers(harness.scheduler.adapters, load, drop)
    return harness


def harness_of(runner: Any, model: AdaptedModel, **settings: Any) -> Harness:
    served = model.served
    return harness_with(
        runner,
        lambda number: served.load(model.paths[number - 1], number),
        served.store.drop,
        **settings,
    )


def serve(harness: Harness, ids: tuple[int, ...], **params: Any) -> list[list[int]]:
    """Serve requests with these adapters, which arrive one after the other; 0: without."""
    generator = torch.Generator().manual_seed(3)
    requests = []
    for index, number in enumerate(ids):
        prompt = torch.randint(0, 96, (3 + 5 * index % 17,), generator=generator).tolist()
        lora = {"lora_request": lora_request(number)} if number else {}
        requests.append(
            harness.add_one(
                prompt, 10 + index, eos_token_ids=(7,), **{"temperature": 0.0} | params | lora
            )
        )
        harness.step()
    harness.run()
    return [harness.tokens_of(each) for each in requests]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return AdaptedModel(tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def model(loaded: AdaptedModel, cuda: FakeCuda) -> AdaptedModel:
    loaded.cuda = cuda
    return loaded


def reference(model: AdaptedModel, ids: tuple[int, ...]) -> list[list[int]]:
    runner = SyncModelRunner(host_runner(model, NUM_ROWS))
    return serve(harness_of(runner, model), ids)


MIXED = (1, 0, 2, 3, 1, 4, 0, 2, 4, 3)


@pytest.mark.parametrize(
    ("num_blocks", "eager"), [(81, False), (15, False), (81, True)], ids=["", "preempted", "eager"]
)
def test_tokens_are_those_of_the_reference(
    num_blocks: int, eager: bool, model: AdaptedModel, cuda: FakeCuda
) -> None:
    """Two of four adapters at a time, replaced in their slots while steps are in flight."""
    host = harness_of(SyncModelRunner(host_runner(model, NUM_ROWS)), model, num_blocks=num_blocks)
    wanted = serve(host, MIXED) + serve(host, (1, 2))
    worker = OnFakeCuda(model, cuda, NUM_ROWS, enforce_eager=eager)
    ahead = harness_of(worker.runner, model, num_blocks=num_blocks, async_scheduling=True)
    assert serve(ahead, MIXED) + serve(ahead, (1, 2)) == wanted
    assert isinstance(ahead.adapters, LoadingWorkers)
    assert len(ahead.adapters.loads) > len(set(ahead.adapters.loads)), "none was loaded again"
    assert ahead.worker.most_unknown == OVERLAPPED
    assert (ahead.worker.num_preempted > 0) == (num_blocks < 81)
    assert (cuda.device.num_replays > 20) == (not eager)
    plain = reference(model, (0,) * len(MIXED))
    differs = [one != other for one, other in zip(wanted, plain, strict=False)]
    assert differs == [number > 0 for number in MIXED]


def test_no_step_waits_for_an_adapter(
    model: AdaptedModel, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy into a slot is queued behind the steps that read the adapter before it.

    Nothing is copied for the steps after it, nor for a step with the rows of the one before.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    monkeypatch.setattr(ModelRunner, "finish_on_host", refuse)
    monkeypatch.setattr(cuda.device, "fetch", refuse)
    step = model.served.targets.step
    assert isinstance(step, SlotsWithoutTriton)
    slots = on_host(step._reserved.slots)
    copied: list[tuple[int, int]] = []
    queue_copy = cuda.device.queue_copy

    def note_copy(source: torch.Tensor, non_blocking: bool) -> None:
        if len(source) > 4096:
            copied.append((cuda.device.completed, cuda.device.queued))
        queue_copy(source, non_blocking)

    monkeypatch.setattr(cuda.device, "queue_copy", note_copy)
    ahead = harness_of(worker.runner, model, async_scheduling=True)
    serve(ahead, MIXED)
    assert MAX_LORAS < len(RANKS) <= len(copied) < 20
    assert any(completed < queued for completed, queued in copied), "no step was in flight"
    assert slots.any(1).all()


def test_steps_in_flight_read_an_adapter_that_is_dropped(
    model: AdaptedModel, cuda: FakeCuda
) -> None:
    """Its slot goes to another adapter while they are queued."""
    found = []
    for on_gpu in (False, True):
        runner: Runner
        if on_gpu:
            runner = OnFakeCuda(model, cuda, NUM_ROWS).runner
        else:
            runner = SyncModelRunner(host_runner(model, NUM_ROWS))
        served, messages = model.served, StepMessages(1, num_pages=6)
        for number in (1, 2):
            served.load(model.paths[number - 1], number)
        prompts = {1: range(5, 12), 2: range(20, 25)}
        pending = [runner.launch(with_adapters(messages.next_step(prompts), {1: 1, 2: 2}))]
        if not on_gpu:
            pending[0].result()
        pending.append(runner.launch(messages.next_step()))
        if on_gpu:
            pending[0].result()
        assert cuda.device.completed < cuda.device.queued or not on_gpu
        served.store.drop(1)
        gc.collect()
        served.load(model.paths[2], 3)
        last = messages.next_step({3: range(30, 39)}, finished=(1,))
        before = cuda.device.completed
        pending.append(runner.launch(with_adapters(last, {3: 3})))
        assert cuda.device.completed == before, "the host waits for the device"
        found.append([each.result().sampled_token_ids for each in pending[1:]])
    assert found[0] == found[1]


def with_adapters(step: SchedulerOutput, ids: dict[int, int]) -> SchedulerOutput:
    """Return a step whose new requests have these adapters."""
    new = [changed(each, lora_int_id=ids[each.seq_id]) for each in step.new_requests]
    return changed(step, new_requests=new)


def test_graphs_of_steps_without_adapters_have_no_kernel_of_them(
    model: AdaptedModel, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs of each size are captured; the second adds one launch for each product."""
    captured: list[int] = []
    capture = cuda.device.capture

    def note(run: Callable[[], torch.Tensor]) -> Any:
        graph, result = capture(run)
        captured.append(len(graph._calls))
        return graph, result

    monkeypatch.setattr(cuda.device, "capture", note)
    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    num_products = len(model.served.targets.weights)
    assert num_products == 4 * len(model.spec.layers)
    without, with_adapters = captured[::2], captured[1::2]
    assert len(without) == len(with_adapters) == len(worker.progress)
    assert [more - fewer for fewer, more in zip(without, with_adapters, strict=True)] == [
        num_products
    ] * len(without)


def test_a_request_without_an_adapter_keeps_its_bits(model: AdaptedModel, cuda: FakeCuda) -> None:
    """Its log-probabilities are those of a daemon without --enable-lora."""
    params: dict[str, Any] = {"logprobs": 3}
    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    mixed = harness_of(worker.runner, model, async_scheduling=True)
    serve(mixed, MIXED, **params)
    plain = Model.__new__(Model)
    plain.__dict__ |= {"prepared": model.prepared, "spec": model.spec, "dtype": DTYPE}
    alone = Harness(OnFakeCuda(plain, cuda, NUM_ROWS).runner, 81, async_scheduling=True)
    serve(alone, (0,) * len(MIXED), **params)
    count = 0
    for index, key in enumerate(alone.outputs):
        if MIXED[index] == 0:
            one, other = (
                [each.logprobs.logprobs for each in harness.outputs[key] if each.logprobs]
                for harness in (mixed, alone)
            )
            assert one == other
            count += len(one)
    assert count > 10


def test_factors_of_outputs_run_without_graphs(model: AdaptedModel, cuda: FakeCuda) -> None:
    """DoRA beside other adapters and none; steps without it are replayed."""
    ids = (DORA, 0, 1, DORA, 1, 0)
    wanted = reference(model, ids)
    worker = OnFakeCuda(model, cuda, NUM_ROWS)
    ahead = harness_of(worker.runner, model, async_scheduling=True)
    replays: list[tuple[bool, bool]] = []
    launch = ahead.worker.launch
    dora: set[int] = set()

    def note(step: SchedulerOutput) -> None:
        dora.update(new.seq_id for new in step.new_requests if new.lora_int_id == DORA)
        before = cuda.device.num_replays
        launch(step)
        has_dora = not dora.isdisjoint(step.cached_requests.seq_ids)
        if not step.new_requests and step.total_num_scheduled_tokens:
            replays.append((has_dora, cuda.device.num_replays > before))

    ahead.worker.launch = note  # type: ignore[method-assign]
    assert serve(ahead, ids) == wanted
    assert (True, False) in replays
    assert (True, True) not in replays
    assert (False, True) in replays


@pytest.mark.parametrize("eager", [False, True])
def test_drafts_are_verified_with_the_adapter(
    eager: bool, model: AdaptedModel, cuda: FakeCuda
) -> None:
    """The rows of a draft are rows of its sequence, also in graphs."""
    host = harness_of(SyncModelRunner(host_runner(model, NUM_ROWS)), model)
    tokens = serve(host, MIXED)

    def answer(request: Request, num_tokens: int) -> list[int]:
        recorded = host.tokens[request.request_id, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    drafting = SyntheticDrafts(0.7, answer, vocab_size=VOCAB_SIZE)
    worker = OnFakeCuda(model, cuda, NUM_ROWS, enforce_eager=eager)
    found = harness_of(worker.runner, model, async_scheduling=True, drafting=drafting)
    assert serve(found, MIXED) == tokens
    assert drafting.num_accepted > 5
    assert drafting.num_accepted < drafting.num_drafted


def test_steps_that_read_a_shared_prefix_once_have_adapters(
    model: AdaptedModel, cuda: FakeCuda
) -> None:
    worker = OnFakeCuda(model, cuda, NUM_ROWS, cascade_attention_from=2)
    found = harness_of(worker.runner, model, num_blocks=200, async_scheduling=True)
    host = harness_of(SyncModelRunner(host_runner(model, NUM_ROWS)), model, num_blocks=200)
    prompt = list(range(40))
    tokens = []
    for harness in (found, host):
        rows = []
        for index in range(4):
            rows.append(
                harness.add_one([*prompt, index], 12, temperature=0.0, lora_request=lora_request(1))
            )
            harness.step()
        harness.run()
        tokens.append([harness.tokens_of(each) for each in rows])
    same = [
        one == other
        for pair in zip(*tokens, strict=True)
        for one, other in zip(*pair, strict=False)
    ]
    assert sum(same) > 0.8 * len(same)
    assert num_cascades(worker) > 5


def test_the_largest_step_has_adapters_in_every_row(
    model: AdaptedModel, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its memory is counted; later steps find all slots free."""
    there = OnFakeCuda(model, cuda, 3, enforce_eager=True)
    launched: list[int] = []
    launch = SlotsWithoutTriton._launch

    def note(self: Any, product: Any, step: Any, *tensors: torch.Tensor) -> None:
        launched.append(len(step.rows))
        launch(self, product, step, *tensors)

    monkeypatch.setattr(SlotsWithoutTriton, "_launch", note)
    with torch.inference_mode():
        run_largest_step(there.gpu, there.parts, 12, 3)
    assert launched == [12] * len(model.served.targets.weights)
    step = model.served.targets.step
    assert isinstance(step, SlotsWithoutTriton)
    assert [held() for held in step._reserved.adapters.values()] == [None] * MAX_LORAS


def test_each_rank_adds_its_part(model: AdaptedModel, cuda: FakeCuda) -> None:
    """Two ranks' outputs stand side by side where rows are divided, and are summed elsewhere."""
    accelerator: Any = cuda.device
    served = []
    for group in (RankGroup(), RankGroup(0, 2), RankGroup(1, 2)):
        with cuda.loading():
            one = Served(
                model.prepared,
                DTYPE,
                group=group,
                device=GPU,
                step=SlotsWithoutTriton(lambda: accelerator),
            )
        one.load(model.paths[1], 1)
        served.append(one)
    whole, *ranks = served
    generator = torch.Generator().manual_seed(1)
    for product, weights in enumerate(whole.targets.weights):
        shapes = [whole.loader._weights[name].shape for name in weights]
        x = torch.randn(5, shapes[0][1], generator=generator).to(DTYPE)
        wanted = added(cuda, whole, product, x, sum(shape[0] for shape in shapes))
        shards = [rank.loader._shards[weights[0]] for rank in ranks]
        is_summed = shards[0].columns != slice(None)
        parts = []
        for rank, shard in zip(ranks, shards, strict=True):
            sizes = [
                rank.loader._shards[name].shape_of(shape)[0]
                for name, shape in zip(weights, shapes, strict=True)
            ]
            own = x[:, shard.columns] if is_summed else x
            parts.append(added(cuda, rank, product, own, sum(sizes)).split(sizes, 1))
        if is_summed:
            found = parts[0][0] + parts[1][0]
        else:
            found = torch.cat([part for pair in zip(*parts, strict=True) for part in pair], 1)
        assert wanted.abs().max() > 0.1
        assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_dora_of_products_with_biases_is_computed_on_the_host(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """Of weights and biases that are read there, as on any device."""
    own = save_tiny("llama-biases", tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    path = make_adapter(own, tmp_path / "adapter", use_dora=True)
    accelerator: Any = cuda.device
    with cuda.loading():
        slots = SlotsWithoutTriton(lambda: accelerator)
        served = Served(prepared, DTYPE, device=GPU, step=slots)
    found = served.load(path)
    assert found.multiplies_outputs
    wanted = Served(prepared, DTYPE, device=REFERENCE).load(path)
    assert (found.effect, found.rank, found.digest) == (wanted.effect, wanted.rank, wanted.digest)


def added(
    cuda: FakeCuda, served: Served, product: int, x: torch.Tensor, num_outputs: int
) -> torch.Tensor:
    """Return what adapter 1 adds to zeros."""
    y = cuda.device.adopt(torch.zeros(len(x), num_outputs, dtype=x.dtype))
    with served.running([1] * len(x)):
        served.targets.step.add(product, cuda.device.adopt(x.contiguous()), y)
    return on_host(y).float()


def test_stores_hold_adapters_of_the_host(model: AdaptedModel, cuda: FakeCuda) -> None:
    """A dropped adapter leaves its slot to the next one at once."""
    with cuda.loading():
        model.load(GPU)
    store, step = model.served.store, model.served.targets.step
    assert isinstance(store, AdapterStore)
    assert isinstance(step, SlotsWithoutTriton)
    x = cuda.device.adopt(torch.ones(2, 64, dtype=DTYPE))
    y = cuda.device.adopt(torch.zeros(2, 512, dtype=DTYPE))
    places = []
    for number in (1, 2, 3):
        model.served.load(model.paths[number - 1], number)
        with model.served.running([number] * 2):
            step.add(0, x, y[:, :512])
        places.append([slot for slot, held in step._reserved.adapters.items() if held()])
        if number == 2:
            store.drop(2)
    assert places[2][-1] == places[1][-1] != places[0][-1]
    assert REFERENCE.step_adapters().changes_layers_only is False
