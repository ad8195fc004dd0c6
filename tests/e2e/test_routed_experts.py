"""The experts that computed each token, through the daemon: those of transformers' routers.

Requests are concurrent, prompts are computed in chunks, the pool is too small for all, and a worker
is killed between two rounds; the last round finds prefixes. tests/e2e/test_families.py compares the
tokens of every mixture.
"""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import MixtralConfig, Qwen2MoeConfig

from tests.e2e.daemon import Daemon
from tests.e2e.reference import save_random
from tests.fakes.gguf_files import write
from tests.fakes.tiny_ggufs import SIZES, tiny
from tests.fakes.tiny_model_files import TOKENS, add_tokenizer

pytestmark = pytest.mark.suite("models")

TIGHT = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64")
PROMPTS = [list(range(1000 + 300 * i, 1000 + 300 * i + 7 * (2 + 3 * i))) for i in range(9)]


def save_mixture(folder: Path) -> torch.nn.Module:
    """Save a tiny random Qwen2-MoE with the packaged model's tokenizer; returns it in float32."""
    return save_random(
        Qwen2MoeConfig,
        folder,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
    )


async def complete_with_experts(
    daemon: Daemon, prompts: list[list[int]], **fields: object
) -> list[dict[str, Any]]:
    """Return the first choice of each answer, to requests at the same time."""
    common = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    common |= {"return_routed_experts": True} | fields

    async def complete(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
        response = await client.post("/v1/completions", json=common | {"prompt": prompt})
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return dict(choice)

    async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
        return await asyncio.gather(*(complete(client, prompt) for prompt in prompts))


def experts_of(choice: dict[str, Any]) -> torch.Tensor:
    field = choice["routed_experts"]
    data = np.frombuffer(base64.b64decode(field["data"]), dtype=field["dtype"])
    return torch.from_numpy(data.reshape(field["shape"]).astype(np.int64))


@torch.inference_mode()
def assert_experts_of_transformers(
    model: torch.nn.Module, prompts: list[list[int]], choices: list[dict[str, Any]]
) -> None:
    """Every token but the last has its experts; order and ties among close scores may differ."""
    for prompt, choice in zip(prompts, choices, strict=True):
        tokens = [*prompt, *choice["token_ids"]][:-1]
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        found = experts_of(choice)
        assert found.shape == (len(tokens), 3, 2)
        for layer, scores in enumerate(logits):
            chosen = scores.gather(1, found[:, layer]).sort(1, descending=True).values
            assert (found[:, layer, 0] != found[:, layer, 1]).all()
            assert (chosen - scores.topk(2).values).abs().max() < 1e-4


@pytest.mark.parametrize(
    "flags", [(), ("--tensor-parallel-size", "2", "--enable-expert-parallel")], ids=["one", "two"]
)
async def test_experts_of_transformers_under_pressure_and_after_a_death(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    model = save_mixture(tmp_path)
    flags = ("--enable-return-routed-experts", *flags)
    with Daemon(str(tmp_path), "--dtype", "float32", *TIGHT, *flags) as daemon:
        first = await complete_with_experts(daemon, PROMPTS)
        assert daemon.metric("vllm:num_preemptions_total") > 0
        assert_experts_of_transformers(model, PROMPTS, first)
        os.kill(daemon.processes()["worker"].pid, signal.SIGKILL)
        some = PROMPTS[-2:]
        second = await complete_with_experts(daemon, some)
        assert_experts_of_transformers(model, some, second)
        hits = daemon.metric("vllm:prefix_cache_hits_total")
        third = await complete_with_experts(daemon, some)
        assert daemon.metric("vllm:prefix_cache_hits_total") > hits
        assert [each["token_ids"] for each in third] == [each["token_ids"] for each in second]
        assert_experts_of_transformers(model, some, third)


def save_mixture_in_blocks(path: Path) -> None:
    """Save a tiny random Mixtral as a GGUF file of Q4_K blocks."""
    config = MixtralConfig(
        **SIZES | {"vocab_size": len(TOKENS), "max_position_embeddings": 512},
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with torch.no_grad():
        _, tensors = tiny("Q4_K", config, permuted=True)

    def add_metadata(writer: Any) -> None:
        writer.add_context_length(512)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(len(TOKENS))
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        add_tokenizer(writer)

    write(path, tensors, add_metadata)


@pytest.mark.parametrize("weights", ["bf16", "int8", "Q4_K"])
async def test_the_mixture_kernel_answers_alike_alone_and_in_a_batch(
    weights: str, tmp_path: Path
) -> None:
    """With the same experts, too; the log names the kernel."""
    prompts, flags = PROMPTS, ("--enable-return-routed-experts", "--no-enable-prefix-caching")
    if weights == "Q4_K":
        model = tmp_path / "model.gguf"
        save_mixture_in_blocks(model)
        prompts = [[token % 89 for token in prompt] for prompt in PROMPTS]
    else:
        model = tmp_path
        save_mixture(tmp_path)
        flags += ("--cpu-weights", weights)
    with Daemon(str(model), *flags) as daemon:
        alone = [(await complete_with_experts(daemon, [each]))[0] for each in prompts]
        together = await complete_with_experts(daemon, prompts)
        implementations = {
            line.rpartition(" run on ")[2] for line in daemon.output if "mixtures of" in line
        }
    assert implementations == {"the mixture kernel"}
    assert len({tuple(each["token_ids"]) for each in alone}) > 1
    for one, other in zip(alone, together, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert torch.equal(experts_of(one), experts_of(other))


async def test_chats_streams_and_choices_return_experts(tmp_path: Path) -> None:
    model = save_mixture(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    flags = ("--dtype", "float32", "--enable-return-routed-experts", "--chat-template", template)
    with Daemon(str(tmp_path), *map(str, flags), "--max-response-bytes", "100000") as daemon:
        fields = {"max_tokens": 6, "return_token_ids": True, "return_routed_experts": True}
        chat = fields | {"messages": [{"role": "user", "content": "The sea"}], "n": 2, "seed": 1}
        body = httpx.post(f"{daemon.url}/v1/chat/completions", json=chat, timeout=60).json()
        prompt = body["prompt_token_ids"]
        assert_experts_of_transformers(model, [prompt] * 2, body["choices"])
        stream = fields | {"prompt": PROMPTS[0], "temperature": 0, "stream": True}
        text = httpx.post(f"{daemon.url}/v1/completions", json=stream, timeout=60).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert [choice for choice in choices if "routed_experts" in choice] == choices[-1:]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        assert_experts_of_transformers(model, [PROMPTS[0]], [choices[-1] | {"token_ids": tokens}])
        beams = fields | {"prompt": PROMPTS[0], "n": 2, "use_beam_search": True}
        refused = httpx.post(f"{daemon.url}/v1/completions", json=beams, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "return_routed_experts"
        many = {"prompt": PROMPTS[0], "max_tokens": 200, "n": 128, "return_routed_experts": True}
        refused = httpx.post(f"{daemon.url}/v1/completions", json=many, timeout=60)
        assert refused.status_code == 400
        assert "--max-response-bytes" in refused.json()["error"]["message"]
