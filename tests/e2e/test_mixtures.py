"""A mixture of experts through the daemon gives transformers' tokens.

Requests are concurrent, prompts are computed in chunks, the pool is too small for all, and a worker
is killed between two rounds; then requests come alone and find prefixes.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen2MoeConfig, Qwen2MoeForCausalLM

from deploy.models import gguf_header
from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference, packaged_model
from tests.e2e.test_parity import assert_greedy_tokens, complete_concurrently
from tests.fakes.gguf_files import write
from tests.fakes.tiny_checkpoints import save_mxfp4, tiny_model
from tests.fakes.tiny_ggufs import tiny

pytestmark = pytest.mark.suite("models")

TIGHT = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64")
PROMPTS = [list(range(1000 + 300 * i, 1000 + 300 * i + 7 * (2 + 3 * i))) for i in range(9)]
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}


def qwen2_moe(folder: Path) -> tuple[torch.nn.Module, Path]:
    """Save a tiny random Qwen2-MoE; return it in float32, and what to serve."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        **SIZES,
        intermediate_size=128,
        num_experts=6,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
    )
    model = Qwen2MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return model, folder


def gpt_oss_config() -> GptOssConfig:
    return GptOssConfig(
        **SIZES,
        intermediate_size=96,
        head_dim=16,
        num_local_experts=6,
        sliding_window=24,
        rope_parameters=ROPE | {"original_max_position_embeddings": 128},
    )


def gpt_oss(folder: Path) -> tuple[torch.nn.Module, Path]:
    """The same of a gpt-oss with experts in MXFP4."""
    model = tiny_model(gpt_oss_config())
    save_mxfp4(model, folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return model, folder


def gpt_oss_gguf(folder: Path) -> tuple[torch.nn.Module, Path]:
    """The same in a GGUF file."""
    with torch.no_grad():
        kinds = {"experts": "MXFP4"}
        model, tensors = tiny("F32", gpt_oss_config(), permuted=False, kinds=kinds)
    packaged = gguf_header.read(packaged_model().source).values
    own = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "expert_feed_forward_length": 96,
        "expert_count": 6,
        "expert_used_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 24,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    tokenizer = {key: packaged[key] for key in packaged if key.startswith("tokenizer.ggml.")}
    metadata = {f"gpt-oss.{key}": value for key, value in own.items()}
    write(folder / "tiny.gguf", tensors, "gpt-oss", metadata | tokenizer)
    return model, folder / "tiny.gguf"


@pytest.mark.parametrize(
    ("save", "flags"),
    [
        (qwen2_moe, ()),
        (qwen2_moe, ("--tensor-parallel-size", "2", "--enable-expert-parallel")),
        (gpt_oss, ()),
        (gpt_oss, ("--tensor-parallel-size", "2", "--enable-expert-parallel")),
        (gpt_oss_gguf, ("--tensor-parallel-size", "2")),
    ],
    ids=["qwen2moe", "qwen2moe-two", "gptoss", "gptoss-two", "gptoss-gguf-two"],
)
async def test_tokens_of_transformers_under_pressure_and_after_a_death(
    save: Callable[[Path], tuple[torch.nn.Module, Path]], flags: tuple[str, ...], tmp_path: Path
) -> None:
    model, path = save(tmp_path)
    reference = Reference(model, None)
    with Daemon(str(path), "--dtype", "float32", *TIGHT, *flags) as daemon:
        assert_greedy_tokens(reference, PROMPTS, await complete_concurrently(daemon, PROMPTS))
        assert daemon.metric("vllm:num_preemptions_total") > 0
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        some = PROMPTS[1:3]
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        for prompt in reversed(some):
            alone = await complete_concurrently(daemon, [prompt])
            assert_greedy_tokens(reference, [prompt], alone)
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0
