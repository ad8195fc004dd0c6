"""The whole model runner on a fake CUDA device: tokens equal those of the reference on a CPU.

Weights, cache, attention by the strict fake FlashInfer, graphs, sampling and pending tokens are on
a fake device, which refuses calls that would wait or race.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from api_server.generation.request_stream import ExpertRows
from engine_core.busy_loop import OVERLAPPED
from engine_core.request import Request
from proto.messages.engine_io import EngineCoreOutput
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from tests.fakes.cuda_runner import (
    DTYPE,
    EDITS,
    NUM_ROWS,
    REQUEST_PARAMS,
    SHARED,
    SIZES,
    VOCAB_SIZE,
    ConstrainedThirds,
    Harness,
    Model,
    OnFakeCuda,
    assert_mostly_equal,
    compute_by_torch,
    host_runner,
    num_cascades,
    serve,
)
from tests.fakes.devices import REFERENCE
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_device import DeviceError, FakeDevice, FakeEvent, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import PagedWrapper
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.stepped_engine import CHUNKS, Engine, new_request
from tests.fakes.tiny_transformers import save_tiny_transformers
from worker.cuda import device as cuda_device
from worker.cuda.async_runner import AsyncModelRunner
from worker.cuda.flashinfer_library import HEAD_DIMS
from worker.cuda.formats import FixedRowsFormat
from worker.cuda.layer_progress import EventProgress
from worker.cuda.runner_builder import (
    run_largest_step,
)
from worker.cuda.sampling.device_kernels import RowEditArrays
from worker.device import Device
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.transformers_weights import load_transformers
from worker.models.decoder import Decoder
from worker.models.transformers_model import spec_of_transformers
from worker.step.model_runner import ModelRunner, SyncModelRunner

pytestmark = pytest.mark.suite("devices")

IN_REHEARSAL = pytest.mark.suite("rehearsal")
_OF_EACH_KIND = ("llama", "gptoss", "deepseek3")
"""One of each kind of attention and MLP; the others are in the rehearsal."""


class Models(dict[str, Model]):
    """Models by name, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Model]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Model:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(lambda name: Model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(
    params=[
        pytest.param(each, marks=() if each in _OF_EACH_KIND else IN_REHEARSAL) for each in SIZES
    ]
)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models[request.param]


@pytest.fixture
def llama(models: Models) -> Model:
    return models["llama"]


class SyncRunner:
    """A runner whose caller waits for every step."""

    def __init__(self, runner: AsyncModelRunner) -> None:
        self._runner = runner

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.launch(step).result()


class TransformersModel(Model):
    """A tiny model on transformers' code; its heads are narrower than those of the kernels."""

    dtype = torch.float16

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        save_tiny_transformers(name, folder, **changes)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        config = json.loads((folder / "config.json").read_text())
        self.spec: Any = spec_of_transformers(config, head_dims=HEAD_DIMS)
        self._reference_tokens = None

    def load(self, device: Device, weight_format: WeightFormat | None = None) -> Decoder:
        form = DenseFormat(self.dtype)
        return load_transformers(
            self.prepared, self.spec, self.dtype, device, lambda fraction: None, form
        )


def move_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Do what Module.to does, without its checks, which fake tensors do not pass."""
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else tensor.detach().to(device)
    return module


def reference_tokens(model: Model) -> dict[int, list[int]]:
    """Reference tokens of a model's prompts, computed once, under `compute_by_torch`."""
    if model._reference_tokens is None:
        runner = host_runner(model, len(CHUNKS))
        engine = Engine(runner, runner.kv_cache)
        model._reference_tokens = engine.generate(model.prompts())
    return model._reference_tokens


def test_tokens_equal_the_reference(model: Model, cuda: FakeCuda) -> None:
    worker = OnFakeCuda(model, cuda, len(CHUNKS))
    engine: Any = Engine(SyncRunner(worker.runner), worker.cache)
    found, expected = engine.generate(model.prompts()), reference_tokens(model)
    same = [found[each] == expected[each] for each in expected]
    assert sum(same) >= len(same) - (model.dtype != DTYPE)
    assert cuda.device.num_replays > 30


class WaitsForLayers(SyncRunner):
    """A runner whose caller first waits for each layer of a step, and looks at the device then."""

    def __init__(self, runner: AsyncModelRunner, device: FakeDevice, progress: EventProgress):
        super().__init__(runner)
        self._device, self._progress = device, progress
        self.seen: list[tuple[int, ...]] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        begun = self._device.queued
        pending = self._runner.launch(step)
        if step.total_num_scheduled_tokens:
            completed = []
            for layer in range(len(self._progress._events)):
                self._progress.wait_computed(layer)
                completed.append(self._device.completed)
            assert begun < completed[0]
            assert completed == sorted(set(completed)), "one layer after the other"
            assert completed[-1] < self._device.queued, "before the sampling"
            self.seen.append(tuple(completed))
        return pending.result()


def test_layers_of_steps_are_published_also_by_graphs(llama: Model, cuda: FakeCuda) -> None:
    progress = EventProgress(cuda.device, len(llama.spec.layers))
    worker = OnFakeCuda(llama, cuda, len(CHUNKS), progress=progress)
    runner = WaitsForLayers(worker.runner, cuda.device, progress)
    engine: Any = Engine(runner, worker.cache)
    assert engine.generate(llama.prompts()) == reference_tokens(llama)
    assert cuda.device.num_replays > 30
    assert len(runner.seen) > cuda.device.num_replays, "chunks run without a graph"


def test_an_event_for_the_host_is_refused_inside_a_graph_unless_it_is_external() -> None:
    device = FakeDevice()
    memory = device.zeros(1, torch.float32)

    def run(event: FakeEvent) -> torch.Tensor:
        event.record()
        return memory.add_(1)

    with pytest.raises(DeviceError, match="nothing outside can wait"):
        device.capture(lambda: run(device.event()))
    device.capture(lambda: run(device.external_event()))


def test_prompts_as_embeddings_give_the_tokens_of_their_ids(llama: Model, cuda: FakeCuda) -> None:
    """In chunks beside decodes, without graphs where a prompt's last token is alone in a step."""
    worker = OnFakeCuda(llama, cuda, len(CHUNKS))
    engine: Any = Engine(SyncRunner(worker.runner), worker.cache)
    found = engine.generate(llama.prompts(), llama.load(REFERENCE))
    assert found == reference_tokens(llama)


@pytest.mark.parametrize("cascade_from", [0, pytest.param(2, marks=IN_REHEARSAL)])
def test_transformers_code_gives_the_tokens_of_the_reference(
    cascade_from: int, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs, with windows and sinks; no operation of a step waits for the device."""
    monkeypatch.setattr(torch.nn.Module, "to", move_module)
    model = TransformersModel("granite_swa", tmp_path, attention_multiplier=0.25)
    worker = OnFakeCuda(model, cuda, len(CHUNKS), cascade_attention_from=cascade_from)
    if cascade_from:
        windows = worker.cache.layout.windows
        host = Harness(
            SyncModelRunner(host_runner(model, len(CHUNKS))), 200, len(CHUNKS), windows=windows
        )
        found = Harness(worker.runner, 200, len(CHUNKS), windows=windows, async_scheduling=True)
        params = REQUEST_PARAMS[:5]
        tokens = serve(found, params, num_shared=SHARED)
        assert_mostly_equal(tokens, serve(host, params, num_shared=SHARED))
        assert num_cascades(worker) > 20
    else:
        engine: Any = Engine(SyncRunner(worker.runner), worker.cache)
        assert engine.generate(model.prompts()) == reference_tokens(model)
    assert cuda.device.num_replays == 0


@pytest.mark.parametrize("kv_dtype", [DTYPE, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_fork_copies_its_block_without_waiting(
    kv_dtype: torch.dtype, num_tokens: int, cuda: FakeCuda, tmp_path: Path
) -> None:
    """Also in a step without tokens to compute."""
    model = Model("llama", tmp_path)
    worker = OnFakeCuda(model, cuda, 2, kv_dtype=kv_dtype, enforce_eager=True)
    content = on_host(worker.cache.buffer)
    content[5] = 3
    new = [new_request(1, [7], [[9]], 1)] if num_tokens else []
    worker.runner.launch(
        SchedulerOutput(
            epoch=1,
            step=1,
            new_requests=new,
            cached_requests=CachedRequestData([], [], [], [], [], []),
            total_num_scheduled_tokens=num_tokens,
            finished_seq_ids=[],
            preempted_seq_ids=[],
            block_copies=[5, 6, 5, 8],
        )
    )
    assert [int(content[block].float().mean()) for block in (5, 6, 7, 8)] == [3, 3, 0, 3]
    assert cuda.device.completed < cuda.device.queued


@pytest.mark.parametrize(("num_blocks", "eager"), [(81, True), (24, False)])
def test_tokens_kept_on_the_device_equal_those_of_the_host(
    num_blocks: int, eager: bool, cuda: FakeCuda, llama: Model
) -> None:
    """Also if rows are preempted and reused while a token of theirs is in flight."""
    worker = OnFakeCuda(llama, cuda, NUM_ROWS, enforce_eager=eager)
    ahead = Harness(worker.runner, num_blocks, async_scheduling=True)
    found = serve(ahead)
    assert ahead.worker.most_unknown == OVERLAPPED
    assert (ahead.worker.num_preempted > 0) == (num_blocks < 81)
    assert (cuda.device.num_replays > 0) == (not eager)
    assert found == serve(Harness(SyncModelRunner(host_runner(llama, NUM_ROWS)), num_blocks))


@pytest.mark.parametrize(
    "kv_dtype",
    [DTYPE, pytest.param(torch.float8_e4m3fn, marks=IN_REHEARSAL)],
    ids=str,
)
def test_a_batch_invariant_step_has_decodes_alone(
    kv_dtype: torch.dtype, cuda: FakeCuda, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts too; no sequence is split, and no step is a graph, whose sequences always are.

    Tokens are those of the reference, with pages of 8 bits those that each request has alone.
    """
    plans: list[bool] = []
    plan = PagedWrapper._plan

    def note_plan(wrapper: PagedWrapper, qo_indptr: torch.Tensor, *args: Any) -> None:
        settings: dict[str, Any] = args[4]
        assert (qo_indptr.diff() == 1).all()
        plans.append(settings["disable_split_kv"])
        plan(wrapper, qo_indptr, *args)

    monkeypatch.setattr(PagedWrapper, "_plan", note_plan)
    products = FixedRowsFormat(llama.dtype)
    settings: dict[str, Any] = {"weight_format": products, "batch_invariant": True}
    worker = OnFakeCuda(llama, cuda, NUM_ROWS, kv_dtype, **settings)
    params = REQUEST_PARAMS if kv_dtype == DTYPE else REQUEST_PARAMS[:5]
    found = serve(Harness(worker.runner, 24, async_scheduling=True), params)
    assert plans
    assert all(plans)
    assert cuda.device.num_replays == 0
    if kv_dtype == DTYPE:
        expected = Harness(SyncModelRunner(host_runner(llama, NUM_ROWS)), 24)
    else:
        expected = Harness(OnFakeCuda(llama, cuda, 1, kv_dtype, **settings).runner, 81, 1)
    assert found == serve(expected, params)


@pytest.mark.suite("rehearsal")
@pytest.mark.parametrize("acceptance", [None, 0.7])
def test_whole_steps_read_a_shared_prefix_once(
    acceptance: float | None, cuda: FakeCuda, llama: Model
) -> None:
    """With drafts, too, which are several rows of a sequence."""
    num_rows = 10
    expected = Harness(SyncModelRunner(host_runner(llama, num_rows)), 200, num_rows)
    tokens = serve(expected, num_shared=SHARED)

    def answer(request: Request, num_tokens: int) -> list[int]:
        recorded = expected.tokens[request.request_id, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    drafting = (
        None if acceptance is None else SyntheticDrafts(acceptance, answer, vocab_size=VOCAB_SIZE)
    )
    worker = OnFakeCuda(llama, cuda, num_rows, cascade_attention_from=2)
    found = Harness(worker.runner, 200, num_rows, async_scheduling=True, drafting=drafting)
    assert_mostly_equal(serve(found, num_shared=SHARED), tokens)
    assert num_cascades(worker) > 20
    assert drafting is None or drafting.num_accepted > 5


@pytest.mark.suite("rehearsal")
def test_beams_are_those_of_the_reference(cuda: FakeCuda, llama: Model) -> None:
    """With overlapped steps, graphs and preemptions, beside other requests."""
    worker = OnFakeCuda(llama, cuda, 2 * NUM_ROWS)
    ahead = Harness(worker.runner, 40, 2 * NUM_ROWS, async_scheduling=True)
    host = Harness(SyncModelRunner(host_runner(llama, 2 * NUM_ROWS)), 40, 2 * NUM_ROWS)
    answers = []
    for harness in (ahead, host):
        rows = [
            row
            for width in (2, 3)
            for row in harness.add(
                list(range(width, 23)), 16, n=width, beam_width=width, eos_token_ids=(7,)
            )
        ]
        answers.append([*serve(harness), *(harness.tokens_of(row) for row in rows)])
    assert answers[0] == answers[1]
    assert ahead.worker.num_preempted > 0
    assert cuda.device.num_replays > 0


def test_experts_of_tokens_need_no_wait_for_the_device(
    cuda: FakeCuda, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of overlapped steps, with graphs and after preemptions, are those of the host."""
    model = models["mixtral"]
    params = [{"temperature": 0.0, "return_routed_experts": index % 3 != 2} for index in range(8)]
    params[1]["logprobs"] = 2
    worker = OnFakeCuda(model, cuda, NUM_ROWS, returns_experts=True)
    ahead = Harness(worker.runner, 24, async_scheduling=True)
    host = Harness(SyncModelRunner(host_runner(model, NUM_ROWS, returns_experts=True)), 24)
    expected = serve(host, params)

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(ModelRunner, "finish_on_host", refuse)
    assert serve(ahead, params) == expected
    assert ahead.worker.num_preempted > 0
    assert cuda.device.num_replays > 0
    for number, key in enumerate(host.outputs):
        found, wanted = (experts_of(each.outputs[key]) for each in (ahead, host))
        assert (found.num_layers > 0) == (number % 3 != 2)
        assert found == wanted


def experts_of(outputs: list[EngineCoreOutput]) -> ExpertRows:
    """Experts of all tokens but the last, and those of earlier outputs are replaced."""
    rows = ExpertRows()
    for output in outputs:
        if output.routed_experts is not None:
            rows.store(output.routed_experts)
    return rows


def test_overlapping_steps_do_not_count_time_twice(cuda: FakeCuda, llama: Model) -> None:
    """Two steps are in flight; some are sampled on the host (prompt log-probabilities)."""
    worker = OnFakeCuda(llama, cuda, NUM_ROWS)
    harness = Harness(worker.runner, 81, async_scheduling=True)
    started = time.monotonic()
    serve(harness, [*REQUEST_PARAMS[:4], {"temperature": 0.0, "prompt_logprobs": 1}])
    passed = time.monotonic() - started
    assert harness.worker.most_at_once == OVERLAPPED
    assert 0 < sum(harness.worker.compute_seconds) <= passed


@pytest.mark.parametrize("num_blocks", [81, 24])
def test_logits_edits_and_logprobs_need_no_wait_for_the_device(
    num_blocks: int, cuda: FakeCuda, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, biases, bad words, min_tokens, grammars and log-probabilities in mixed batches."""
    worker = OnFakeCuda(llama, cuda, NUM_ROWS)
    expected = Harness(
        SyncModelRunner(host_runner(llama, NUM_ROWS)), num_blocks, grammars=ConstrainedThirds()
    )
    tokens = serve(expected, EDITS)

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(ModelRunner, "finish_on_host", refuse)
    monkeypatch.setattr(cuda.device, "fetch", refuse)
    found = Harness(worker.runner, num_blocks, grammars=ConstrainedThirds(), async_scheduling=True)
    assert serve(found, EDITS) == tokens
    assert found.worker.most_at_once == OVERLAPPED
    assert (found.worker.num_preempted > 0) == (num_blocks < 81)
    assert found.worker.num_masked > 20
    assert_logprobs_close(found, expected)


def assert_logprobs_close(found: EngineHarness, expected: EngineHarness) -> None:
    """The tokens and ranks are equal, and the log-probabilities close."""
    count = 0
    for key, outputs in expected.outputs.items():
        wanted = [each.logprobs for each in outputs if each.logprobs]
        there = [each.logprobs for each in found.outputs[key] if each.logprobs]
        for one, other in zip(there, wanted, strict=True):
            assert (one.width, one.first_position) == (other.width, other.first_position)
            assert (one.token_ids, one.ranks) == (other.token_ids, other.ranks)
            values = [np.frombuffer(each.logprobs, "<f4") for each in (one, other)]
            assert np.allclose(*values, atol=1e-5)
            count += 1
    assert count > 30


@pytest.mark.parametrize(
    ("acceptance", "is_async", "eager"),
    [(0.3, True, True), (1.0, True, False), (0.7, True, False), (0.7, False, False)],
)
def test_drafts_are_verified_on_the_device(
    acceptance: float,
    is_async: bool,
    eager: bool,
    cuda: FakeCuda,
    llama: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As decodes of several rows over one block table, which graphs replay, too."""
    num_rows = 10
    expected = Harness(
        SyncModelRunner(host_runner(llama, num_rows)), 81, num_rows, grammars=ConstrainedThirds()
    )
    params = EDITS[:6]
    tokens = serve(expected, params)

    def answer(request: Request, num_tokens: int) -> list[int]:
        recorded = expected.tokens[request.request_id, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(ModelRunner, "finish_on_host", refuse)
    worker = OnFakeCuda(llama, cuda, num_rows, enforce_eager=eager)
    drafting = SyntheticDrafts(acceptance, answer, vocab_size=VOCAB_SIZE)
    found = Harness(
        worker.runner,
        81,
        num_rows,
        grammars=ConstrainedThirds(),
        async_scheduling=is_async,
        drafting=drafting,
    )
    replays = 0
    launch = found.worker.launch

    def count_replays(step: SchedulerOutput) -> None:
        nonlocal replays
        before = cuda.device.num_replays
        launch(step)
        replays += bool(step.drafts) and cuda.device.num_replays > before

    monkeypatch.setattr(found.worker, "launch", count_replays)
    assert serve(found, params) == tokens
    assert drafting.num_accepted > 5
    assert (drafting.num_accepted < drafting.num_drafted) == (acceptance < 1.0)
    assert (replays > 3) == (not eager)
    for key, outputs in expected.outputs.items():
        for field in ("token_ids", "ranks"):
            one, other = (
                b"".join(getattr(each.logprobs, field) for each in some if each.logprobs)
                for some in (outputs, found.outputs[key])
            )
            assert one == other


def test_norms_and_gates_use_the_library(
    model: Model, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is installed: in eager steps and in graphs, by calls that keep its contract."""
    tokens = reference_tokens(model)
    library = FakeFlashInfer(cuda.device)
    monkeypatch.setattr(cuda_device, "usable_flashinfer", lambda: library)
    worker = OnFakeCuda(model, cuda, len(CHUNKS))
    found = Engine(SyncRunner(worker.runner), worker.cache).generate(model.prompts())  # type: ignore[arg-type]
    same = [
        one == other
        for each in tokens
        for one, other in zip(tokens[each], found[each], strict=True)
    ]
    # Roundings differ in the last bit, and bfloat16 has many ties.
    assert sum(same) > 0.8 * len(same)
    # Gemma's norm weights include the added 1, in float32.
    norms_and_gates = {
        "Gemma3ForCausalLM": {"gelu_tanh_and_mul"},
        "GptOssForCausalLM": {"rmsnorm"},
    }
    expected = norms_and_gates.get(model.spec.architecture, {"silu_and_mul", "rmsnorm"})
    assert set(library.num_calls) == expected
    assert worker.library.num_calls.keys() == {"rope"}


def test_the_largest_step_edits_and_draws_from_every_row(
    model: Model, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiled step has penalties and masks in every row; later steps allocate no more."""
    there = OnFakeCuda(model, cuda, 3, enforce_eager=True)
    changed: list[tuple[int, ...]] = []

    def edit_rows(logits: torch.Tensor, edits: RowEditArrays, counts: torch.Tensor) -> None:
        changed.append((*logits.shape, len(edits.rows), len(edits.words), *counts.shape))

    monkeypatch.setattr(there.gpu.kernels.edits, "edit_rows", edit_rows)
    with torch.inference_mode():
        run_largest_step(there.gpu, there.parts, 12, 3)
    vocab_size = model.spec.vocab_size
    assert changed == [(3, vocab_size, 3, 3, 3, vocab_size)]
