"""Latent attention over pages: the size of its KV, one order of sums, and refusals."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.errors import ConfigError, ModelError
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, tiny_model
from tests.fakes.tiny_ggufs import config_of
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import KVCache, resolve_kv_dtype
from worker.cpu.attention import CpuAttention
from worker.cpu.formats import Bf16Format
from worker.cpu.kernels import load_kernels
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.plan.memory_plan import layer_cache

BLOCK = 16
TOKENS = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A DeepSeek-V3 whose sizes suit the products and the attention of bfloat16."""
    config = copy.deepcopy(CONFIGS["deepseek3"])
    config.kv_lora_rank, config.qk_nope_head_dim = 64, 32
    config.qk_rope_head_dim = config.head_dim = 32
    config.qk_head_dim, config.v_head_dim = 64, 32
    folder = tmp_path_factory.mktemp("latent")
    tiny_model(config).save_pretrained(folder)
    prepared = prepare_checkpoint(folder, folder / "prepared")
    return load_model(
        prepared,
        spec_of(prepared),
        torch.bfloat16,
        CPU,
        lambda fraction: None,
        Bf16Format(load_kernels()),
    )


def hidden_states(decoder: Decoder, cuts: list[int], neighbour: int = 0) -> torch.Tensor:
    """Compute TOKENS in chunks that end at `cuts`, each beside a prompt of `neighbour` tokens."""
    layout, geometry = layer_cache(decoder.spec, torch.bfloat16)
    cache = KVCache(geometry, layout, 16, BLOCK)
    attention = CpuAttention(load_kernels(), cache, decoder.spec.attention_shape)
    tables = np.array([[3, 1, 7, 2, 9], [4, 5, 6, 8, 10]], dtype=np.int32)
    outputs = []
    for start, stop in pairwise(cuts):
        parts = [(0, start, stop), (1, 0, neighbour)][: 1 + (neighbour > 0)]
        positions = np.concatenate([np.arange(first, end) for _, first, end in parts])
        rows = np.repeat([row for row, _, _ in parts], [end - first for _, first, end in parts])
        inputs = AttentionInputs(
            query_start=np.cumsum([0, *(end - first for _, first, end in parts)], dtype=np.int32),
            seq_lens=np.array([end for _, _, end in parts], dtype=np.int32),
            block_table=tables[: len(parts)],
            slot_mapping=tables[rows, positions // BLOCK].astype(np.int64) * BLOCK
            + positions % BLOCK,
        )
        attention.plan([inputs])
        tokens = torch.cat((TOKENS[start:stop], TOKENS[:neighbour].flip(0)))
        found = decoder.forward(tokens, torch.from_numpy(positions), attention)
        outputs.append(found[: stop - start].clone())
    return torch.cat(outputs)


def test_a_token_is_the_same_in_any_chunk_and_batch(decoder: Decoder) -> None:
    whole = hidden_states(decoder, [0, 70])
    assert whole.isfinite().all()
    assert whole.float().std() > 0.1
    assert torch.equal(hidden_states(decoder, [0, 1, 2, 33, 40, 68, 69, 70]), whole)
    assert torch.equal(hidden_states(decoder, [0, 50, 51, 70], neighbour=23), whole)


def test_the_cache_has_a_latent_and_a_rotated_part_of_each_token(decoder: Decoder) -> None:
    _, geometry = layer_cache(decoder.spec, torch.bfloat16)
    assert geometry.bytes_per_token == 3 * (64 + 32) * 2
    layout, geometry = layer_cache(decoder.spec, torch.float32)
    assert KVCache(geometry, layout, 2, BLOCK).buffer[0].nbytes == BLOCK * 3 * (64 + 32) * 4


@pytest.mark.parametrize("setting", ["int8", "fp8"])
def test_pages_of_eight_bits_are_refused(setting: Any) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {setting} is not supported with lat"):
        resolve_kv_dtype(setting, torch.bfloat16, 576, latent_dim=512)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek3", {"kv_lora_rank": None}, "kv_lora_rank = None"),
        ("deepseek3", {"q_lora_rank": 0}, "q_lora_rank = 0"),
        ("deepseek3", {"qk_rope_head_dim": 15, "head_dim": 15}, "qk_head_dim = 40: supported: 39"),
        ("deepseek3", {"v_head_dim": "8"}, "v_head_dim = '8'"),
        ("deepseek3", {"num_key_value_heads": 2}, "num_key_value_heads = 2: supported: 4"),
        ("deepseek3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek3", {"quantization_config": {"fmt": "e4m3"}}, "quantization_config = "),
        ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek2-groups", {"n_group": 3}, "n_group = 3"),
        ("glm4moelite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types = "),
    ],
)
def test_what_is_not_supported_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config_of(CONFIGS[name]) | change)
    assert message in str(caught.value)


def test_a_missing_weight_of_all_heads_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model(CONFIGS["deepseek3"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    del tensors[name]
    save_file(tensors, path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    with pytest.raises(ModelError, match=rf"{name} of shape \[256, 32\] is missing"):
        load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)
