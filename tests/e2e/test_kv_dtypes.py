"""int8 K and V are quantised once when written, so cache hits read the same values.

In float32, where a row depends on its batch only by rounding.
"""

import asyncio

import httpx
import pytest

from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("media")

FLAGS = ("--dtype", "float32", "--kv-cache-dtype", "int8")
NUM_OUTPUT_TOKENS = 40
PROMPTS = [
    "The capital of France is",
    "Write a short story about a fox and a lighthouse. Once upon a time",
    "def fibonacci(n):\n    ",
    "Water boils because " + "the pressure of the vapour is then equal to that of the air. " * 12,
    "The quick brown fox jumps over the lazy dog. " * 20 + "Then",
]


async def complete(client: httpx.AsyncClient, prompt: str) -> str:
    request = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0}
    response = await client.post("/v1/completions", json=request | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"]


async def test_int8_kv_gives_the_same_text_cold_cached_and_preempted() -> None:
    with Daemon(*FLAGS) as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            cold = [await complete(client, prompt) for prompt in PROMPTS]
            hits = daemon.metric("vllm:prefix_cache_hits_total")
            found = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
            assert daemon.metric("vllm:prefix_cache_hits_total") >= hits + 300
    with Daemon(*FLAGS, "--num-gpu-blocks-override", "30") as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            preempted = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
        assert daemon.metric("vllm:num_preemptions_total") > 0
    assert cold[0].startswith(" Paris")
    assert "return" in cold[2]
    assert found == cold
    assert preempted == cold
