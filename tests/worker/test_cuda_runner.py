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
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.engine_io import EngineCoreOutput
from proto.messages.logit_edits import LogitEdits
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import CachedRequestData, GrammarOutput, SchedulerOutput
from proto.settings.config import DeviceConfig
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.fake_cuda import CUDA, ExpertsWithoutTriton, FakeCuda, SameThreadExecutor
from tests.fakes.fake_device import DeviceError, FakeDevice, FakeEvent, on_host
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_paged_wrapper import PagedWrapper
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from tests.fakes.tiny_transformers import save_tiny_transformers
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch, store_by_index
from tests.worker.test_model_runner import BLOCK, CHUNKS, NUM_BLOCKS, Engine, new_request
from worker.attention.kv_cache import KVCache, kv_layout
from worker.batch.input_batch import InputBatch
from worker.cuda import device as cuda_device
from worker.cuda import flashinfer_modules
from worker.cuda.async_runner import AsyncModelRunner
from worker.cuda.flashinfer_library import HEAD_DIMS
from worker.cuda.formats import FixedRowsFormat
from worker.cuda.layer_progress import EventProgress
from worker.cuda.runner_builder import (
    DeviceKernels,
    Gpu,
    build_drafter,
    build_runner,
    run_largest_pass,
    run_largest_step,
)
from worker.cuda.sampling.device_kernels import RowEditArrays
from worker.device import Device
from worker.layers.layer_progress import LayerProgress
from worker.loader import weights
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.transformers_weights import load_transformers
from worker.models.decoder import Decoder
from worker.models.transformers_model import spec_of_transformers
from worker.plan.memory_plan import layer_cache
from worker.reference.attention import ReferenceAttention
from worker.reference.layers import TorchNorm, torch_gate
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle_head import EagleHead
from worker.step.model_runner import ModelRunner, SyncModelRunner
from worker.step.routed_experts import RoutedExpertsCache, record_experts
from worker.step.runner_parts import DrafterParts, PendingStep, Runner, RunnerParts

DTYPE = torch.bfloat16
STEP_TOKENS = 64
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 88, "head_dim": 64}
NUM_ROWS = 5
VOCAB_SIZE = 96
SIZES: dict[str, dict[str, int]] = {
    "llama": {"head_dim": 64},
    "mistral-window": {"head_dim": 128},
    "gemma3-pattern-untied": {"head_dim": 256},
    "gptoss": {"head_dim": 64, "num_experts_per_tok": 6},
    "mixtral": {"head_dim": 64},
    "deepseek2": _LATENTS,
    "deepseek3": _LATENTS,
    "glm4moelite": _LATENTS | {"num_attention_heads": 5, "num_key_value_heads": 5},
}
"""Sizes of tiny models for which there are GPU kernels."""
IN_REHEARSAL = pytest.mark.suite("rehearsal")
_IN_QUICK = ("llama", "gptoss", "deepseek3")
"""One of each kind of attention and MLP; the others are in the rehearsal."""
_IN_FLOAT16 = ("gptoss",)
"""Outputs are rounded before and after the sinks: often another token in bfloat16, and in float16
in one sequence at most."""


class SyncRunner:
    """A runner whose caller waits for every step."""

    def __init__(self, runner: AsyncModelRunner) -> None:
        self._runner = runner

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.launch(step).result()


class Model:
    """A tiny model that can be loaded on any device."""

    dtype: torch.dtype

    def __init__(self, name: str, folder: Path) -> None:
        self.dtype = torch.float16 if name in _IN_FLOAT16 else DTYPE
        plain = CONFIGS[name]
        config = type(plain)(**plain.to_dict() | SIZES[name])
        tiny_model(config).save_pretrained(folder)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        self.spec = spec_of(self.prepared)
        self._reference_tokens: dict[int, list[int]] | None = None

    def load(self, device: Device, weight_format: WeightFormat | None = None) -> Decoder:
        return weights.load_model(
            self.prepared, self.spec, self.dtype, device, lambda fraction: None, weight_format
        )

    def cache(self, device: Device, dtype: torch.dtype | None = None) -> KVCache:
        layout, geometry = layer_cache(self.spec, dtype or self.dtype)
        return KVCache(geometry, layout, NUM_BLOCKS, BLOCK, device.zeros)

    def rows(self, count: int) -> InputBatch:
        layout = kv_layout(self.spec.windows)
        return InputBatch(count, self.spec.max_position, BLOCK, layout.num_groups)

    def prompts(self) -> dict[int, list[int]]:
        generator = torch.Generator().manual_seed(1)
        return {
            seq_id: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
            for seq_id, chunks in CHUNKS.items()
        }


class Models(dict[str, Model]):
    """Models by name, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Model]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Model:
        self[name] = self._make(name)
        return self[name]


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


class OnFakeCuda:
    """A runner on a fake CUDA device, with its library, cache and input batch."""

    def __init__(
        self,
        model: Model,
        cuda: FakeCuda,
        num_rows: int,
        kv_dtype: torch.dtype | None = None,
        library: FakeFlashInfer | None = None,
        returns_experts: bool = False,
        weight_format: WeightFormat | None = None,
        make_drafter: "Callable[[OnFakeCuda, Decoder], Drafter] | None" = None,
        progress: LayerProgress | None = None,
        **settings: Any,
    ) -> None:
        self.settings = settings
        self.cuda = cuda
        self.library = library or FakeFlashInfer(cuda.device)
        with cuda.loading():
            decoder = model.load(GPU, weight_format)
            self.cache = model.cache(GPU, kv_dtype)
        decoder.track_layers(progress)
        self.rows = model.rows(num_rows)
        self.progress: list[float] = []
        experts = None
        if returns_experts:
            record = record_experts(decoder, STEP_TOKENS, CUDA)
            experts = RoutedExpertsCache(decoder.spec, self.cache, record, GPU.zeros)
        drafter = make_drafter(self, decoder) if make_drafter else None
        self.gpu = gpu_of(cuda, self.library)
        self.parts = RunnerParts(
            config=DeviceConfig(**settings),
            model=decoder,
            dtype=model.dtype,
            kv_cache=self.cache,
            batch=self.rows,
            experts=experts,
            drafter=drafter,
            show_captured=self.progress.append,
        )
        runner = build_runner(self.gpu, self.parts)
        assert isinstance(runner, AsyncModelRunner)
        self.runner = runner

    def build_drafter(
        self, model: Decoder | EagleHead, dtype: torch.dtype, cache: KVCache, target: DraftedModel
    ) -> Drafter:
        """Run the largest pass of a drafter; return another one."""
        gpu = gpu_of(self.cuda, self.library)
        parts = DrafterParts(
            config=DeviceConfig(**self.settings),
            model=model,
            dtype=dtype,
            kv_cache=cache,
            target=target,
            show_captured=self.progress.append,
        )
        run_largest_pass(gpu, parts, 12, 3)
        return build_drafter(gpu, parts)


def gpu_of(cuda: FakeCuda, library: FakeFlashInfer) -> Gpu:
    kernels = DeviceKernels(lambda: library, store_by_index, draw_by_torch, TorchEdits())
    return Gpu(cuda.device, kernels, Sampler(TorchBackend()))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


def compute_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load in one thread, and let torch compute what Triton does."""
    monkeypatch.setattr(weights, "ThreadPoolExecutor", SameThreadExecutor)
    monkeypatch.setattr(cuda_device, "triton_gate", torch_gate)
    monkeypatch.setattr(cuda_device, "TritonNorm", TorchNorm)
    monkeypatch.setattr(cuda_device, "TritonExperts", ExpertsWithoutTriton)
    for module in (cuda_device, flashinfer_modules):
        monkeypatch.setattr(module, "is_hopper", lambda device: False)
    monkeypatch.setattr(cuda_device, "usable_flashinfer", lambda: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(lambda name: Model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(
    params=[pytest.param(each, marks=() if each in _IN_QUICK else IN_REHEARSAL) for each in SIZES]
)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models[request.param]


@pytest.fixture
def llama(models: Models) -> Model:
    return models["llama"]


def host_runner(model: Model, num_rows: int, returns_experts: bool = False) -> ModelRunner:
    """A reference runner of the same model; it rounds like the device, by torch alone."""
    decoder, cache = model.load(REFERENCE), model.cache(REFERENCE)
    experts = None
    if returns_experts:
        record = record_experts(decoder, STEP_TOKENS, REFERENCE.torch_device)
        experts = RoutedExpertsCache(decoder.spec, cache, record)
    attention = ReferenceAttention(cache, model.spec.attention_shape)
    rows, sampler, transfers = model.rows(num_rows), REFERENCE.sampler(), REFERENCE.transfers()
    return ModelRunner(decoder, attention, sampler, rows, cache, transfers, experts=experts)


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


class LaunchingRunner:
    """A runner for EngineHarness that launches steps when they are sent.

    most_unknown: the most launched steps whose tokens the host did not know yet.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launched: dict[int, PendingStep] = {}
        self._results: dict[int, ModelRunnerOutput] = {}
        self.compute_seconds: list[float] = []
        self._outputs: dict[int, list[int]] = {}
        self._last_seen = 0
        self.rows: dict[int, object] = {}
        self.most_at_once = 0
        self.most_unknown = 0
        self.num_preempted = 0
        self.num_masked = 0

    def launch(self, step: SchedulerOutput) -> None:
        self.num_preempted += len(step.preempted_seq_ids)
        self._launched[step.step] = self._runner.launch(step, self.make_masks)
        self.most_at_once = max(self.most_at_once, len(self._launched))
        unknown = sum(number > self._last_seen for number in self._launched)
        self.most_unknown = max(self.most_unknown, unknown)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._see(step.step)
        del self._launched[step.step]
        result = self._results.pop(step.step)
        self.compute_seconds.append(result.compute_seconds)
        return result

    def make_masks(self, step: SchedulerOutput) -> GrammarOutput:
        """Allow three of four tokens, depending on the last one, which is waited for."""
        self._see(step.step)
        self.num_masked += 1
        seq_ids, last, drafts = [], [], step.drafts
        for each in step.constrained_seq_ids:
            before = [(self._outputs.get(each) or [0])[-1], *drafts.get(each, ())]
            seq_ids += [each] * len(before)
            last += before
        tokens = np.arange(VOCAB_SIZE)
        bits = np.array([(tokens + each) % 4 != 0 for each in last])
        masks = np.packbits(bits, axis=1, bitorder="little").tobytes()
        return GrammarOutput(1, step.step, seq_ids, masks)

    def _see(self, last: int) -> None:
        """Collect the tokens of steps launched up to step `last`, once."""
        for number, launched in self._launched.items():
            if self._last_seen < number <= last:
                self._last_seen = number
                result = self._results[number] = launched.result()
                for seq_id, tokens in zip(result.seq_ids, result.sampled_token_ids, strict=True):
                    self._outputs.setdefault(seq_id, []).extend(tokens)


class ConstrainedThirds:
    """Grammars: every third sequence has one; none waits for it."""

    held: set[int] = set()

    def is_blocked(self, request: Request) -> bool:
        return False

    def forget_request(self, request: Request) -> None: ...

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        return len(token_ids)

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        pairs = [
            *zip(plan.continued, plan.continued_tokens, strict=True),
            *zip(plan.admitted, plan.admitted_tokens, strict=True),
        ]
        return [
            each.seq_id
            for each, count in pairs
            if each.seq_id % 3 == 0
            and each.num_computed_tokens + count
            >= len(each.all_token_ids) + each.num_output_placeholders
        ]


class Harness(EngineHarness):
    """The scheduler over a LaunchingRunner."""

    def __init__(
        self, runner: Runner, num_blocks: int, num_rows: int = NUM_ROWS, **settings: Any
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=128,
            max_num_batched_tokens=16,
            max_num_seqs=num_rows,
            **settings,
        )
        self.worker = LaunchingRunner(runner)
        self.runner: Any = self.worker

    def send(self) -> SchedulerOutput:
        step = super().send()
        self.worker.launch(step)
        return step


REQUEST_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (5, 6)},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7},
    {"temperature": 0.0, "edits": LogitEdits(frequency_penalty=1.5)},
    {"temperature": 0.0},
]


EDITS: list[dict[str, Any]] = [
    {"temperature": 0.0, "edits": LogitEdits(frequency_penalty=1.5, presence_penalty=0.5)},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.0, "edits": LogitEdits(repetition_penalty=1.7), "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": tuple(range(40))},
    {"temperature": 0.9, "edits": LogitEdits(allowed_token_ids=tuple(range(0, 96, 5)))},
    {
        "temperature": 0.0,
        "edits": LogitEdits(
            allowed_token_ids=(3, 4, 5), bad_words=((4, 4), (5,), (3, 3, 3), (3, 4, 3))
        ),
    },
    {
        "temperature": 0.7,
        "edits": LogitEdits(bias_token_ids=(1, 2, 3), bias_values=(5.0, -9.0, 4.5)),
        "top_p": 0.9,
    },
    {"temperature": 0.0, "logprobs": 1, "logprob_token_ids": (8, 2)},
    {"temperature": 0.0},
    {"temperature": 1.1, "edits": LogitEdits(repetition_penalty=0.8, frequency_penalty=-0.2)},
]


def serve(
    harness: EngineHarness,
    requests_params: list[dict[str, Any]] = REQUEST_PARAMS,
    *,
    num_shared: int = 0,
) -> list[list[int]]:
    """Serve requests that arrive while others run, with mixed lengths and parameters.

    num_shared: tokens with which all prompts begin.
    """
    generator = torch.Generator().manual_seed(3)
    shared = list(range(num_shared))
    requests = []
    for index, params in enumerate(requests_params):
        count = 3 + 5 * index % 17
        prompt = shared + torch.randint(0, 96, (count,), generator=generator).tolist()
        requests.append(
            harness.add_one(prompt, 12 + index, seed=index, eos_token_ids=(7,), **params)
        )
        harness.step()
    harness.run()
    return [harness.tokens_of(each) for each in requests]


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


SHARED = 5 * BLOCK
"""Tokens of a prefix that cascade attention reads once."""


def assert_mostly_equal(found: list[list[int]], expected: list[list[int]]) -> None:
    """Merging attention over a prefix with the rest rounds once more, and bfloat16 has ties."""
    pairs = [
        pair
        for one, other in zip(found, expected, strict=True)
        for pair in zip(one, other, strict=False)
    ]
    same = sum(one == other for one, other in pairs)
    assert same > 0.8 * len(pairs)


def num_cascades(worker: OnFakeCuda) -> int:
    """Return how many steps read a shared prefix once."""
    return sum(each.num_plans for each in worker.library.wrappers if each.for_all_queries)


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
