"""A mixture of experts through the daemon gives transformers' tokens.

Requests are concurrent, prompts are computed in chunks, the pool is too small for all, and a worker
is killed between two rounds; the second round finds prefixes.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference, packaged_model
from tests.e2e.test_parity import assert_greedy_tokens, complete_concurrently

pytestmark = pytest.mark.suite("models")

TIGHT = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64")
TWO = ("--tensor-parallel-size", "2")
OFFLOADING = (
    "--kv-transfer-config",
    json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
        }
    ),
)
PROMPTS = [list(range(1000 + 300 * i, 1000 + 300 * i + 7 * (2 + 3 * i))) for i in range(9)]


def make_qwen() -> torch.nn.Module:
    config = Qwen2MoeConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
    )
    return Qwen2MoeForCausalLM(config)


def make_deepseek() -> torch.nn.Module:
    """Latent KV; the weights are large enough for choices that differ."""
    config = DeepseekV3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=2,
        bos_token_id=1,
    )
    return DeepseekV3ForCausalLM(config)


def save_mixture(make: Callable[[], torch.nn.Module], folder: Path) -> torch.nn.Module:
    """Save a tiny random model with the packaged model's tokenizer; returns it in float32."""
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return model


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        pytest.param(make_qwen, (), id="one"),
        pytest.param(make_qwen, (*TWO, "--enable-expert-parallel"), id="two"),
        pytest.param(make_deepseek, OFFLOADING, id="latent-offloaded"),
        pytest.param(make_deepseek, TWO, id="latent-two"),
    ],
)
async def test_tokens_of_transformers_under_pressure_and_after_a_death(
    make: Callable[[], torch.nn.Module], flags: tuple[str, ...], tmp_path: Path
) -> None:
    reference = Reference(save_mixture(make, tmp_path), None)
    with Daemon(str(tmp_path), "--dtype", "float32", *TIGHT, *flags) as daemon:
        assert_greedy_tokens(reference, PROMPTS, await complete_concurrently(daemon, PROMPTS))
        assert daemon.metric("vllm:num_preemptions_total") > 0
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        some = PROMPTS[:2]
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0
