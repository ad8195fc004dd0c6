"""Bidirectional models through scheduler and runner against transformers, in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proto.errors import ConfigError, ModelError
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import CacheConfig, DeviceConfig, SchedulerConfig, ServeConfig
from tests.fakes.devices import CPU
from tests.fakes.pooling_engine import PoolingEngine, prepare
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_encoders import CONFIGS, save_encoder, write_encoder_gguf
from tests.fakes.tiny_pooling import dense, pooled, save_causal, save_modules
from tests.worker.kernel_variants import LOADABLE, load_variant
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import KVCache
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.commands.plan import TextEstimate, estimate_times
from worker.cpu.attention import CpuAttention
from worker.cpu.device import CpuDevice
from worker.cpu.formats import Bf16Format
from worker.cpu.stack import KernelStack
from worker.loader.formats import DenseFormat
from worker.loader.weights import load_model
from worker.models.layer_stack import EagerLayers
from worker.models.registry import model_spec
from worker.plan.memory_plan import layer_cache, plan_memory
from worker.step.pooling import PoolingRunner

PROMPTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (23, 40, 11, 1, 57, 128)
]
_KINDS = ("cls_token", "mean_tokens", "weightedmean_tokens", "lasttoken")


@torch.inference_mode()
def hidden_states(model: torch.nn.Module, prompt: list[int], **inputs: object) -> torch.Tensor:
    hidden: torch.Tensor = model(torch.tensor([prompt]), **inputs).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(
    ("name", "overlapped"), [*((name, False) for name in CONFIGS), ("bert", True)]
)
def test_embeddings_of_packed_texts(name: str, overlapped: bool, tmp_path: Path) -> None:
    """All pooling types, joined, and a Dense module; texts of several steps, none padded."""
    folder = tmp_path / "model"
    model = save_encoder(name, folder)
    save_modules(folder, model.config.hidden_size, *_KINDS, dense=24)
    engine = PoolingEngine(prepare(folder), async_scheduling=overlapped)
    requests = [engine.add(prompt) for prompt in (*PROMPTS, *PROMPTS)]
    short = engine.add(PROMPTS[0], dimensions=8)
    engine.harness.run()
    assert engine.harness.kv_cache.usage == 0
    for request in requests:
        hidden = hidden_states(model, request.prompt_token_ids)
        joined = torch.cat([pooled(hidden, kind) for kind in _KINDS])
        want = F.normalize(dense(folder, joined), dim=0)
        torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)
        assert request.num_cached_tokens == 0
    first = engine.result(requests[0])
    torch.testing.assert_close(engine.result(short), F.normalize(first[:8], dim=0))


SIX_LAYERS = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}
"""Files of EmbeddingGemma do not say which layers have a window: five of six."""


def window_of(folder: Path) -> dict[str, int]:
    """Return the window of an EmbeddingGemma as files have it, which counts both sides."""
    config = json.loads((folder / "config.json").read_text())
    is_gemma = config.get("use_bidirectional_attention", False)
    return {"attention.sliding_window": config["sliding_window"]} if is_gemma else {}


@pytest.mark.parametrize(
    ("name", "kind", "pooling_type", "pooling"),
    [
        ("bert", "F32", 2, "cls_token"),
        ("bert", "Q8_0", 1, "mean_tokens"),
        ("xlm-roberta", "F16", 2, "cls_token"),
        ("roberta", "F32", None, "mean_tokens"),
        ("modernbert", "F32", 1, "mean_tokens"),
        ("embedding gemma", "F32", 1, "mean_tokens"),
    ],
)
def test_vectors_of_gguf_files(
    name: str, kind: str, pooling_type: int | None, pooling: str, tmp_path: Path
) -> None:
    """Those of transformers with the same numbers; of RoBERTa files have the used positions."""
    changes = SIX_LAYERS if name == "embedding gemma" else {}
    model = save_encoder(name, tmp_path / "folder", **changes)
    path = tmp_path / "model.gguf"
    metadata = {"pooling_type": pooling_type} | window_of(tmp_path / "folder")
    with torch.no_grad():
        write_encoder_gguf(name, model, path, kind, metadata=metadata)
    prepared = prepare(path)
    assert not prepared.generates
    assert prepared.max_position == (129 if name == "roberta" else 128)
    engine = PoolingEngine(prepared)
    requests = [engine.add(prompt) for prompt in PROMPTS]
    engine.harness.run()
    for request in requests:
        hidden = hidden_states(model, request.prompt_token_ids)
        want = F.normalize(pooled(hidden, pooling), dim=0)
        torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)


def test_layers_behind_pooling_in_a_gguf_file(tmp_path: Path) -> None:
    """Both of EmbeddingGemma."""
    model = save_encoder("embedding gemma", tmp_path / "folder", **SIX_LAYERS)
    path, draw = tmp_path / "model.gguf", np.random.default_rng(3)
    layers = {
        "dense_2.weight": draw.standard_normal((96, 64), np.float32),
        "dense_3.weight": draw.standard_normal((48, 96), np.float32),
    }
    sizes = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96}
    metadata = {"pooling_type": 1} | window_of(tmp_path / "folder") | sizes
    write_encoder_gguf("embedding gemma", model, path, metadata=metadata, tensors=layers)
    engine = PoolingEngine(prepare(path))
    request = engine.add(PROMPTS[0])
    engine.harness.run()
    vector = hidden_states(model, PROMPTS[0]).mean(0)
    for weight in layers.values():
        vector = torch.from_numpy(weight) @ vector
    want = F.normalize(vector, dim=0)
    torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"pooling_type": 4}, r"bert\.pooling_type"),
        ({"classifier.output_labels": "x"}, r"bert\.classifier\.output_labels"),
        ({"attention.causal": True}, r"bert\.attention\.causal"),
        ({"attention.head_count_kv": 2}, r"attention\.head_count_kv"),
        ({"attention.max_alibi_bias": 8.0}, r"bert\.attention\.max_alibi_bias"),
    ],
)
def test_what_a_gguf_file_of_an_encoder_cannot_have(
    metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = save_encoder("bert", tmp_path / "folder")
    write_encoder_gguf("bert", model, path, metadata=metadata)
    with pytest.raises(ModelError, match=named):
        prepare(path)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_pairs(name: str, num_labels: int, tmp_path: Path) -> None:
    """The head of each family; of BERT, the second text of a pair has other token types."""
    folder = tmp_path / "model"
    model = save_encoder(name, folder, num_labels=num_labels)
    engine = PoolingEngine(prepare(folder))
    requests = [engine.add(prompt, task="classify", second_start=9) for prompt in PROMPTS]
    single = engine.add(PROMPTS[0], task="classify")
    engine.harness.run()
    for request in [*requests, single]:
        prompt = request.prompt_token_ids
        types = torch.zeros(1, len(prompt), dtype=torch.long)
        if request is not single and name == "bert":
            types[:, 9:] = 1
        inputs = {} if name == "modernbert" else {"token_type_ids": types}
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), torch.ones(1, len(prompt)), **inputs).logits[0]
        want = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
        torch.testing.assert_close(engine.result(request), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (
            ServeConfig(cache=CacheConfig(num_gpu_blocks_override=9)),
            "num-gpu-blocks-override: .* it keeps no KV cache",
        ),
        (
            ServeConfig(cache=CacheConfig(kv_cache_dtype="int8")),
            "kv-cache-dtype: .* it keeps no KV cache",
        ),
        (
            ServeConfig(
                cache=CacheConfig(kv_transfer_config='{"kv_connector": "OffloadingConnector"}')
            ),
            "kv-transfer-config: .* it keeps no KV cache",
        ),
        (
            ServeConfig(cache=CacheConfig(kv_events_config='{"enable_kv_cache_events": true}')),
            "kv-events-config: .* it keeps no KV cache",
        ),
        (ServeConfig(scheduler=SchedulerConfig(max_num_batched_tokens=127)), "at least 128"),
        (ServeConfig(scheduler=SchedulerConfig(max_num_scheduled_tokens=127)), "at least 128"),
        (
            ServeConfig(scheduler=SchedulerConfig(long_prefill_token_threshold=64)),
            "long-prefill-token-threshold: .* it keeps no KV cache",
        ),
        (
            ServeConfig(device=DeviceConfig(cascade_attention_from=2)),
            "cascade-attention-from: .* it keeps no KV cache",
        ),
    ],
)
def test_settings_that_an_encoder_cannot_have(
    setting: ServeConfig, named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    save_encoder("bert", folder)
    prepared = prepare(folder)
    plan = plan_memory(ServeConfig(), prepared, CpuDevice(DeviceConfig()))
    assert (plan.fits, plan.pool_bytes) == (True, 0)
    with pytest.raises(ConfigError, match=named):
        plan_memory(setting, prepared, CpuDevice(DeviceConfig()))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_one_call_of_all_layers_gives_the_bits_of_each_part_by_itself(
    name: str, tmp_path: Path
) -> None:
    """In bfloat16, on scratch pages that hold NaN before."""
    save_encoder(name, tmp_path / "model")
    prepared, kernels = prepare(tmp_path / "model"), load_variant(LOADABLE[0])
    spec, dtype = model_spec(prepared, ServeConfig()), torch.bfloat16
    cpu, form = CPU, Bf16Format(kernels)
    model = load_model(prepared, spec, dtype, cpu, lambda part: None, form)
    layout, geometry = layer_cache(spec, dtype)
    lengths = np.array([len(prompt) for prompt in PROMPTS], dtype=np.int32)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    num_tokens = int(starts[-1])
    empty = np.zeros((len(lengths), 1), dtype=np.int32), np.zeros(num_tokens, dtype=np.int64)
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    token_ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    outputs = []
    stacks = model._stacks
    assert [type(stack) for stack in stacks] == [KernelStack, EagerLayers]
    for stack in stacks:
        num_blocks = num_scratch_blocks(num_tokens, len(lengths))
        cache = KVCache(geometry, layout, num_blocks, SCRATCH_BLOCK)
        cache.buffer.fill_(float("nan"))
        attention = CpuAttention(kernels, cache, spec.attention_shape)
        attention.plan([AttentionInputs(starts, lengths, *empty)])
        assert stack.takes(num_tokens, attention)
        model._stacks = (stack,)
        outputs.append(model.forward(token_ids, positions, attention).clone())
    assert outputs[0].isfinite().all()
    assert outputs[0].float().std() > 0.1
    assert torch.equal(*outputs)


@pytest.mark.parametrize("is_older", [False, True])
def test_the_activation_of_a_cross_encoder(is_older: bool, tmp_path: Path) -> None:
    identity = "torch.nn.modules.linear.Identity"
    changes: dict[str, object] = {"sentence_transformers": {"activation_fn": identity}}
    if is_older:
        changes = {"sbert_ce_default_activation_function": identity}
    save_encoder("bert", tmp_path / "model", num_labels=1, **changes)
    prepared = prepare(tmp_path / "model")
    assert prepared.pooler is not None
    assert prepared.pooler.activation == "none"
    model_spec(prepared, ServeConfig())  # refuses keys that it does not know


class RankedEngine(PoolingEngine):
    """A PoolingEngine whose model is divided among ranks, which must agree bit by bit."""

    def __init__(self, prepared: PreparedModel, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(prepared)

    def new_runner(self) -> PoolingRunner:
        whole, runners = self.decoder, []
        spec, cpu = whole.spec, CPU
        for group in self._ranks.groups:
            form = DenseFormat(torch.float32)
            self.decoder = load_model(
                self.prepared, spec, torch.float32, cpu, lambda part: None, form, group
            )
            runners.append(super().new_runner())
        self.decoder = whole
        ranked: Any = PooledLockstep(self._ranks, runners)
        return ranked


class PooledLockstep:
    """The runners of all ranks, used like one."""

    def __init__(self, ranks: Ranks, runners: list[PoolingRunner]) -> None:
        self._ranks = ranks
        self._runners = runners

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        first, other = self._ranks.run_on_all(lambda rank: self._runners[rank].execute(step))
        assert first.pooler_outputs == other.pooler_outputs
        return first


@pytest.mark.parametrize("name", [*CONFIGS, "causal"])
def test_two_ranks_compute_the_embeddings_of_one(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_causal(folder) if name == "causal" else save_encoder(name, folder)
    save_modules(folder, model.config.hidden_size, "mean_tokens")
    prepared = prepare(folder)
    alone = PoolingEngine(prepared)
    with Ranks(2) as ranks:
        both = RankedEngine(prepared, ranks)
        for engine in (alone, both):
            requests = [engine.add(prompt) for prompt in PROMPTS[:4]]
            engine.harness.run()
            results = torch.stack([engine.result(request) for request in requests])
            if engine is alone:
                expected = results
    torch.testing.assert_close(results, expected, atol=1e-6, rtol=0)


def test_the_plan_of_an_encoder_is_about_texts(tmp_path: Path) -> None:
    """It has no KV, and no tokens that follow each other."""
    save_encoder("modernbert", tmp_path / "model")
    prepared, config = prepare(tmp_path / "model"), ServeConfig()
    device = CpuDevice(DeviceConfig())
    plan = plan_memory(config, prepared, device)
    times = estimate_times(config, prepared, device, plan)
    assert isinstance(times, TextEstimate)
    printed = "\n".join((*plan.table(), *times.lines()))
    assert "128 tokens (" in printed
    assert "texts a second" in printed
    for word in ("KV", "per token", "first token", "context"):
        assert word not in printed
    figures = plan.to_dict() | times.to_dict()
    assert not [name for name in figures if "kv" in name or "token" in name]
    assert figures["seconds_per_text"]["128"] > 0
