"""Models on transformers' code, token for token against transformers alone, in a packed batch."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from proto.errors import ConfigError, ModelError
from proto.messages.prepared_model import TensorIndex
from proto.settings.config import ModelConfig, ParallelConfig, ServeConfig
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare, prepare_checkpoint, safetensors_index
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_transformers import save_tiny_transformers, tiny_config
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.cpu.formats import Bf16Format
from worker.cpu.kernels import Kernels
from worker.loader.formats import DenseFormat
from worker.loader.transformers_weights import load_transformers
from worker.models.registry import model_spec
from worker.models.transformers_model import (
    LinearModule,
    TransformersDecoder,
    spec_of_transformers,
)
from worker.reference.attention import ReferenceAttention

BLOCK_SIZE, BLOCKS = 4, 12
PROMPTS = (13, 9)
NUM_TOKENS = 9


def config_json(model_type: str) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    return json.loads(tiny_config(model_type).to_json_string(use_diff=False))


def load(
    checkpoint: Path,
    dtype: torch.dtype = torch.float32,
    weight_format: DenseFormat | None = None,
) -> TransformersDecoder:
    config = json.loads((checkpoint / "config.json").read_text())
    index = safetensors_index(*sorted(checkpoint.glob("*.safetensors")))
    return load_index(checkpoint / "prepared", config, index, dtype, weight_format)


def load_index(
    folder: Path,
    config: dict[str, Any],
    index: TensorIndex,
    dtype: torch.dtype = torch.float32,
    weight_format: DenseFormat | None = None,
) -> TransformersDecoder:
    spec = spec_of_transformers(config)
    known = {"vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_position}
    prepared = prepare(folder, known | config, index)
    return load_transformers(
        prepared,
        spec,
        dtype,
        CPU,
        lambda fraction: None,
        weight_format or DenseFormat(dtype),
    )


class Batch:
    """Two sequences over the pages of one cache."""

    def __init__(self, decoder: TransformersDecoder) -> None:
        shape, layout = decoder.spec.attention_shape, kv_layout(decoder.spec.windows)
        geometry = kv_cache_geometry(layout, shape.num_kv_heads, shape.head_dim, torch.float32)
        num_blocks = 1 + len(PROMPTS) * BLOCKS * layout.num_groups
        self.decoder = decoder
        self.attention = ReferenceAttention(
            KVCache(geometry, layout, num_blocks, BLOCK_SIZE), shape
        )
        self.num_groups = layout.num_groups
        generator = torch.Generator().manual_seed(1)
        self.tokens = [
            torch.randint(3, decoder.spec.vocab_size, (length,), generator=generator).tolist()
            for length in PROMPTS
        ]

    def run(self, *chunks: tuple[int, int, int]) -> torch.Tensor:
        """Compute (sequence, first token, end) of each chunk; return logits of the last tokens."""
        ends = np.cumsum([0, *(end - first for _, first, end in chunks)], dtype=np.int32)
        seq_lens = np.array([end for _, _, end in chunks], dtype=np.int32)
        groups = []
        for group in range(self.num_groups):
            firsts = [1 + BLOCKS * (seq * self.num_groups + group) for seq, _, _ in chunks]
            table = np.array([range(n, n + BLOCKS) for n in firsts], dtype=np.int32)
            slots = [
                int(row[token // BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE
                for row, (_, first, end) in zip(table, chunks, strict=True)
                for token in range(first, end)
            ]
            groups.append(AttentionInputs(ends, seq_lens, table, np.array(slots, dtype=np.int64)))
        self.attention.plan(groups)
        tokens = [token for seq, first, end in chunks for token in self.tokens[seq][first:end]]
        positions = [token for _, first, end in chunks for token in range(first, end)]
        hidden = self.decoder.forward(torch.tensor(tokens), torch.tensor(positions), self.attention)
        return self.decoder.logits(hidden[[int(end) - 1 for end in ends[1:]]])


def assert_agrees(model_type: str, folder: Path) -> None:
    model = save_tiny_transformers(model_type, folder)
    assert_same_tokens(model, load(folder))


def assert_same_tokens(model: Any, decoder: TransformersDecoder) -> None:
    """Check greedy tokens in a batch, one prompt in chunks, against transformers alone."""
    batch = Batch(decoder)
    batch.run((0, 0, 6))
    steps = [batch.run((0, 6, PROMPTS[0]), (1, 0, PROMPTS[1]))]
    for _ in range(NUM_TOKENS - 1):
        for tokens, logits in zip(batch.tokens, steps[-1], strict=True):
            tokens.append(int(logits.argmax()))
        steps.append(batch.run(*((seq, len(t) - 1, len(t)) for seq, t in enumerate(batch.tokens))))
    for seq, (tokens, length) in enumerate(zip(batch.tokens, PROMPTS, strict=True)):
        with torch.inference_mode():
            alone = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        expected, logits = alone[length - 1 :], torch.stack([step[seq] for step in steps])
        assert logits.argmax(1).tolist() == expected.argmax(1).tolist()
        assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    "model_type",
    [
        *("cohere2", "deepseek_v3", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "hunyuan_v1_moe"),
        *("mimo_v2_flash", "minicpm3", "modernbert-decoder", "opt"),
    ],
)
def test_typical_models_agree_with_transformers(model_type: str, tmp_path: Path) -> None:
    assert_agrees(model_type, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "layer_types has linear_attention"),
        ("bloom", "adds ALiBi"),
        ("bart", "takes no position_ids"),
        ("gpt_neox_japanese", "do not call transformers' attention interface"),
        ("gptj", "no attention interface"),
        ("roberta", "positions depend on which tokens are padding"),
        ("doge", "a mask or a bias of its own"),
        ("musicgen", "made of several models"),
    ],
)
def test_what_cannot_run_is_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"\w+ForCausalLM cannot run .*{reason}"):
        spec_of_transformers(config_json(model_type))


def test_code_of_the_model_is_refused() -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    with pytest.raises(ModelError, match=r"Olmo2ForCausalLM cannot run .*auto_map"):
        spec_of_transformers(config_json("olmo2") | code)


def test_longrope_is_refused_where_a_step_would_depend_on_its_longest_request() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config = config_json("llama") | {"rope_parameters": rope}
    with pytest.raises(ModelError, match="use --max-model-len 64"):
        spec_of_transformers(config)
    with pytest.raises(ModelError, match="use --max-model-len 64"):
        spec_of_transformers(config, max_model_len=65)
    assert spec_of_transformers(config, max_model_len=64).max_position == 128
    spec_of_transformers(config | {"rope_parameters": rope | {"long_factor": [1.0] * 8}})


def test_weights_that_a_model_reads_itself_stay(tmp_path: Path) -> None:
    """Linear layers are ours; a router in float32 beside bfloat16 stays what it is."""
    save_tiny_transformers("hunyuan_v1_moe", tmp_path)
    decoder = load(tmp_path, torch.bfloat16)
    layer = decoder._body.layers[0]
    assert isinstance(layer.self_attn.q_proj, LinearModule)
    assert type(layer.mlp.gate.wg) is torch.nn.Linear
    assert layer.mlp.gate.wg.weight.dtype == torch.float32


def test_bfloat16_weights_are_multiplied_by_the_kernels(kernels: Kernels, tmp_path: Path) -> None:
    save_tiny_transformers("stablelm", tmp_path)
    form = Bf16Format(kernels)
    found, dense, exact = (
        Batch(load(tmp_path, dtype, weight_format)).run((0, 0, 13), (1, 0, 9)).float()
        for dtype, weight_format in (
            (torch.bfloat16, form),
            (torch.bfloat16, None),
            (torch.float32, None),
        )
    )
    assert len(form.kernel_weights) > 4
    assert (found - exact).norm() < 1.5 * (dense - exact).norm()


@pytest.mark.parametrize(
    ("fields", "parallel", "message"),
    [
        ({"model_impl": "tokend"}, {}, "--model-impl tokend: OtherForCausalLM is not among"),
        ({"runner": "pooling"}, {}, "--runner pooling: OtherForCausalLM runs on transformers'"),
        ({"cpu_weights": "int8"}, {}, "--cpu-weights int8: OtherForCausalLM runs on"),
        ({}, {"tensor_parallel_size": 2}, "--tensor-parallel-size 2: OtherForCausalLM runs on"),
        ({"source": "x.gguf"}, {}, "--model-impl auto: x.gguf is a GGUF file"),
        ({"enable_return_routed_experts": True}, {}, "code, which reports no experts"),
    ],
)
def test_settings_that_an_unknown_architecture_cannot_have(
    fields: dict[str, Any], parallel: dict[str, int], message: str, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    source, fields = fields.get("source", str(tmp_path)), {**fields}
    fields.pop("source", None)
    prepared = msgspec.structs.replace(
        prepare_checkpoint(tmp_path, tmp_path / "prepared"),
        architecture="OtherForCausalLM",
        source=source,
    )
    config = ServeConfig(model=ModelConfig(**fields), parallel=ParallelConfig(**parallel))
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_spec(prepared, config)
