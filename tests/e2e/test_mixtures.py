"""A mixture of experts through the daemon gives transformers' tokens.

Requests are concurrent, prompts are computed in chunks, the pool is too small for all, and a worker
is killed between two rounds; the second round finds prefixes.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference, packaged_model
from tests.e2e.test_parity import assert_greedy_tokens, complete_concurrently

pytestmark = pytest.mark.suite("models")

TIGHT = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64")
PROMPTS = [list(range(1000 + 300 * i, 1000 + 300 * i + 7 * (2 + 3 * i))) for i in range(9)]


def save_mixture(folder: Path) -> torch.nn.Module:
    """Save a tiny random Qwen2-MoE with the packaged model's tokenizer; returns it in float32."""
    torch.manual_seed(0)
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
    model = Qwen2MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return model


@pytest.mark.parametrize(
    "flags", [(), ("--tensor-parallel-size", "2", "--enable-expert-parallel")], ids=["one", "two"]
)
async def test_tokens_of_transformers_under_pressure_and_after_a_death(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    reference = Reference(save_mixture(tmp_path), None)
    with Daemon(str(tmp_path), "--dtype", "float32", *TIGHT, *flags) as daemon:
        assert_greedy_tokens(reference, PROMPTS, await complete_concurrently(daemon, PROMPTS))
        assert daemon.metric("vllm:num_preemptions_total") > 0
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        some = PROMPTS[:2]
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0
