"""Models on transformers' code through the daemon give transformers' tokens.

One has sliding windows and sinks; the other has windows, heads of two sizes and layers that share
keys and values. Requests are concurrent, prompts are computed in chunks, the pool is too small for
all, and a worker is killed between two rounds; the second round finds prefixes.
"""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.reference import Reference, packaged_model
from tests.e2e.test_parity import assert_greedy_tokens, complete_concurrently
from tests.fakes.adapters import make_adapter, merged
from tests.fakes.tiny_transformers import save_tiny_transformers

pytestmark = pytest.mark.suite("models")

TIGHT = ("--num-gpu-blocks-override", "60", "--max-num-batched-tokens", "64")
PROMPTS = [list(range(1000 + 300 * i, 1000 + 300 * i + 7 * (2 + 3 * i))) for i in range(9)]


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4_text"])
async def test_tokens_of_transformers_under_pressure_and_after_a_death(
    model_type: str, tmp_path: Path
) -> None:
    model = save_tiny_transformers(
        model_type,
        tmp_path,
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 49152),
        max_position_embeddings=512,
        sliding_window=40,
    )
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", tmp_path)
    reference = Reference(model, None)
    targets = ["q_proj", "o_proj"]
    path = make_adapter(model, tmp_path / "adapter", size=2.0, target_modules=targets)
    adapted = Reference(merged(model, path), None)
    adapters = ("--served-model-name", "base", "--enable-lora", "--lora-modules", f"mine={path}")
    flags = ("--dtype", "float32", "--model-impl", "transformers", *TIGHT, *adapters)
    with Daemon(str(tmp_path), *flags) as daemon:
        assert "which is slower than a family of tokend's own" in daemon.text
        assert_greedy_tokens(reference, PROMPTS, await complete_concurrently(daemon, PROMPTS))
        assert daemon.metric("vllm:num_preemptions_total") > 0
        found = await complete_concurrently(daemon, PROMPTS, model="mine")
        assert_greedy_tokens(adapted, PROMPTS, found)
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        some = PROMPTS[4:6]
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert_greedy_tokens(reference, some, await complete_concurrently(daemon, some))
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0


async def test_drafts_logprobs_of_prompts_and_eight_bits(tmp_path: Path) -> None:
    """int8 KV gives the same tokens cold, cached and with drafts."""
    model = save_tiny_transformers(
        "gpt_oss", tmp_path, vocab_size=49152, max_position_embeddings=512
    )
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", tmp_path)
    reference = Reference(model, None)
    drafts = ("--speculative-config", '{"method": "suffix"}')
    flags = (str(tmp_path), "--dtype", "float32", "--model-impl", "transformers")
    repeating = [prompt * 3 for prompt in PROMPTS[:5]]
    with Daemon(*flags, *drafts) as daemon:
        assert_greedy_tokens(reference, repeating, await complete_concurrently(daemon, repeating))
        assert daemon.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
        body = {"prompt": repeating[0], "max_tokens": 1, "prompt_logprobs": 0}
        response = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)
        (choice,) = response.json()["choices"]
        found = [
            entry[str(token)]["logprob"]
            for entry, token in zip(choice["prompt_logprobs"][1:], repeating[0][1:], strict=True)
        ]
        assert found == pytest.approx(reference.logprobs(repeating[0]), abs=1e-3)
    with Daemon(*flags, "--kv-cache-dtype", "int8") as daemon:
        cold = await complete_concurrently(daemon, repeating)
        assert await complete_concurrently(daemon, repeating) == cold
        assert daemon.metric("vllm:prefix_cache_hits_total") > 0
    with Daemon(*flags, "--kv-cache-dtype", "int8", *drafts) as daemon:
        assert await complete_concurrently(daemon, repeating) == cold


def test_two_workers_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny_transformers("gpt_oss", tmp_path, vocab_size=49152)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", tmp_path)
    flags = ("--model-impl", "transformers", "--tensor-parallel-size", "2")
    daemon = Daemon(str(tmp_path), *flags)
    assert daemon.wait_exit(60.0) != 0
    assert "--tensor-parallel-size 2: GptOssForCausalLM runs on transformers' code" in daemon.text
