"""A model runner on the fake CUDA device behind a scheduler, and the reference on the host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.request import Request
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.lifecycle import KVGroup
from proto.messages.logit_edits import LogitEdits
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.settings.config import DeviceConfig
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.fake_cuda import (
    CUDA,
    RECURRENCES_WITHOUT_TRITON,
    ExpertsWithoutTriton,
    FakeCuda,
    SameThreadExecutor,
    StatesWithoutTriton,
)
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.stepped_engine import BLOCK, CHUNKS, NUM_BLOCKS
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch, store_by_index
from worker.attention.backend import AttentionBackend
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.batch.input_batch import InputBatch
from worker.cuda import device as cuda_device
from worker.cuda import flashinfer_modules
from worker.cuda.async_runner import AsyncModelRunner
from worker.cuda.runner_builder import (
    DeviceKernels,
    Gpu,
    build_drafter,
    build_runner,
    run_largest_pass,
)
from worker.cuda.states import CudaStates
from worker.device import Device
from worker.layers.layer_progress import LayerProgress
from worker.loader import weights
from worker.loader.formats import WeightFormat
from worker.models.decoder import Decoder
from worker.plan.memory_plan import layer_cache
from worker.reference.attention import ReferenceAttention
from worker.reference.layers import TorchNorm, torch_gate
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle_head import EagleHead
from worker.step.adapter_store import AdapterStore
from worker.step.model_runner import ModelRunner
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
STATE_SIZES: dict[str, dict[str, int]] = {
    "qwen3next": {"head_dim": 64},
    "mamba2": {},
    "lfm2": {"hidden_size": 256},
    "bamba": {"hidden_size": 256, "mamba_d_head": 64},
    "granitehybrid": {"hidden_size": 256, "mamba_d_head": 64},
    "falconh1": {"head_dim": 64},
    "nemotronh-experts": {"head_dim": 64},
    "lfm2moe": {"hidden_size": 256},
}
"""The same of models with recurrent states."""
MAX_LOGGED = 8
NUM_STATE_SLOTS = 40


_IN_FLOAT16 = ("gptoss",)
"""Outputs are rounded before and after the sinks: often another token in bfloat16, and in float16
in one sequence at most."""


class Model:
    """A tiny model that can be loaded on any device."""

    dtype: torch.dtype
    store: AdapterStore | None = None
    """The adapters of the decoder that was loaded last."""

    def __init__(self, name: str, folder: Path) -> None:
        self.dtype = torch.float16 if name in _IN_FLOAT16 else DTYPE
        plain = CONFIGS[name]
        config = type(plain)(**plain.to_dict() | (SIZES | STATE_SIZES)[name])
        self.own = tiny_model(config)
        self.own.save_pretrained(folder)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        self.spec = spec_of(self.prepared)
        self._reference_tokens: dict[int, list[int]] | None = None

    def load(self, device: Device, weight_format: WeightFormat | None = None) -> Decoder:
        return weights.load_model(
            self.prepared, self.spec, self.dtype, device, lambda fraction: None, weight_format
        )

    def cache(self, device: Device, dtype: torch.dtype | None = None) -> KVCache:
        layout, geometry = layer_cache(self.spec, dtype or self.dtype, MAX_LOGGED)
        return KVCache(geometry, layout, NUM_BLOCKS, BLOCK, device.zeros)

    def cache_groups(self) -> tuple[KVGroup, ...]:
        """The groups of the engine, that of states included."""
        return layer_cache(self.spec, self.dtype, MAX_LOGGED)[1].groups

    def rows(self, count: int) -> InputBatch:
        layout, _ = layer_cache(self.spec, self.dtype)
        return InputBatch(
            count,
            self.spec.max_position,
            BLOCK,
            layout.num_groups,
            has_states=layout.states is not None,
        )

    def prompts(self) -> dict[int, list[int]]:
        generator = torch.Generator().manual_seed(1)
        return {
            seq_id: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
            for seq_id, chunks in CHUNKS.items()
        }


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
        self.states: CudaStates | None = None
        if (states := self.cache.layout.states) is not None:
            accelerator: Any = cuda.device
            self.states = StatesWithoutTriton(
                accelerator, states, NUM_STATE_SLOTS, BLOCK, GPU.zeros
            )
            self.states.buffer[:, : sum(states.layer_sizes)] = float("nan")
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
            states=self.states,
            experts=experts,
            drafter=drafter,
            adapters=model.store,
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


def compute_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load in one thread, and let torch compute what Triton does."""
    monkeypatch.setattr(weights, "ThreadPoolExecutor", SameThreadExecutor)
    monkeypatch.setattr(cuda_device, "triton_gate", torch_gate)
    monkeypatch.setattr(cuda_device, "TritonNorm", TorchNorm)
    monkeypatch.setattr(cuda_device, "TritonExperts", ExpertsWithoutTriton)
    monkeypatch.setattr(cuda_device, "TRITON_RECURRENCES", RECURRENCES_WITHOUT_TRITON)
    monkeypatch.setattr(cuda_device, "CudaStates", StatesWithoutTriton)
    for module in (cuda_device, flashinfer_modules):
        monkeypatch.setattr(module, "is_hopper", lambda device: False)
    monkeypatch.setattr(cuda_device, "usable_flashinfer", lambda: None)


def host_runner(model: Model, num_rows: int, returns_experts: bool = False) -> ModelRunner:
    """A reference runner of the same model; it rounds like the device, by torch alone."""
    decoder, cache = model.load(REFERENCE), model.cache(REFERENCE)
    experts = None
    if returns_experts:
        record = record_experts(decoder, STEP_TOKENS, REFERENCE.torch_device)
        experts = RoutedExpertsCache(decoder.spec, cache, record)
    attention: AttentionBackend = ReferenceAttention(cache, model.spec.attention_shape)
    if (states := cache.layout.states) is not None:
        slots = StateCache(states, NUM_STATE_SLOTS, BLOCK)
        slots.buffer[:, : sum(states.layer_sizes)] = float("nan")
        attention = AttentionWithStates(attention, slots)
    rows, sampler, transfers = model.rows(num_rows), REFERENCE.sampler(), REFERENCE.transfers()
    return ModelRunner(
        decoder, attention, sampler, rows, cache, transfers, experts=experts, adapters=model.store
    )


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

    awaiting_mask: set[int] = set()

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
