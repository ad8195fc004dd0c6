"""The packaged hybrid model, with windows of 512 tokens in 15 of 18 layers, through the daemon.

Prompts are longer than the window. Greedy tokens in float32 equal transformers' on the same file:
cold, over prefix hits and preempted. A long request holds fewer blocks than full attention in every
layer would.
"""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.daemon import Daemon, DaemonPool, eventually
from tests.e2e.prompts import source_text
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("models")

MODEL = "gemma3-270m"
BLOCK = 16
WINDOW = 512
NUM_GROUPS = 6
LENGTHS = [600, 900, 1300, 1800, 2400, 3000]
NUM_OUTPUT_TOKENS = 48
MOST_TOKENS_OF_A_DECODE = 500
"""Of a request that its client leaves early."""

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def gemma() -> Reference:
    return Reference.load(MODEL)


@pytest.fixture
def daemon(daemons: DaemonPool) -> Iterator[Daemon]:
    with daemons.borrow(MODEL, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def token_prompts(gemma: Reference) -> Prompts:
    """Prompts from different places in a text, so that they share no prefix."""
    token_ids = gemma.tokenizer.encode(source_text())
    return [token_ids[331 * i : 331 * i + length] for i, length in enumerate(LENGTHS)]


def body(prompt: list[int], **changes: object) -> dict[str, object]:
    request = {
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return request | changes


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    response = await client.post("/v1/completions", json=body(prompt))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"]


async def complete_concurrently(daemon: Daemon, prompts: Prompts) -> Prompts:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as client:
        return await asyncio.gather(*(complete(client, prompt) for prompt in prompts))


def assert_greedy_tokens(gemma: Reference, prompts: Prompts, outputs: Prompts) -> None:
    assert [len(output) for output in outputs] == [NUM_OUTPUT_TOKENS] * len(prompts)
    gemma.assert_greedy(list(zip(prompts, outputs, strict=True)))


async def test_tokens_are_the_same_cold_and_over_prefix_hits(
    daemon: Daemon, gemma: Reference, token_prompts: Prompts
) -> None:
    """The second time only tokens after the last full block of a prompt are computed."""
    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as client:
        cold = [await complete(client, prompt) for prompt in token_prompts]
    assert daemon.metric("vllm:prefix_cache_hits_total") == 0
    warm = await complete_concurrently(daemon, token_prompts)
    hits = daemon.metric("vllm:prefix_cache_hits_total")
    assert hits == sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
    assert_greedy_tokens(gemma, token_prompts, cold)
    assert_greedy_tokens(gemma, token_prompts, warm)


async def test_a_longer_prompt_uses_the_cached_prefix_of_another(
    daemon: Daemon, gemma: Reference, token_prompts: Prompts
) -> None:
    """More than a window follows the hit, computed in steps of a few hundred tokens."""
    shared, other = token_prompts[3], token_prompts[1]
    await complete_concurrently(daemon, [shared])
    hits = daemon.metric("vllm:prefix_cache_hits_total")
    outputs = await complete_concurrently(daemon, [shared + other])
    found = daemon.metric("vllm:prefix_cache_hits_total") - hits
    assert found == len(shared) // BLOCK * BLOCK
    assert_greedy_tokens(gemma, [shared + other], outputs)


async def test_aborted_requests_do_not_change_others(
    daemon: Daemon, gemma: Reference, token_prompts: Prompts
) -> None:
    """Every second client disconnects; the tokens of the others are unchanged."""

    async def disconnect_early(client: httpx.AsyncClient, prompt: list[int]) -> None:
        request = body(prompt, stream=True, max_tokens=MOST_TOKENS_OF_A_DECODE)
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    return
        pytest.fail("the stream ended without a token")

    async with httpx.AsyncClient(base_url=daemon.url, timeout=600) as client:
        pending = [
            disconnect_early(client, prompt) if i % 2 else complete(client, prompt)
            for i, prompt in enumerate(token_prompts)
        ]
        outputs = (await asyncio.gather(*pending))[::2]
    assert eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0
    assert_greedy_tokens(gemma, token_prompts[::2], outputs)


async def test_a_token_budget_smaller_than_the_window(
    gemma: Reference, token_prompts: Prompts
) -> None:
    """The window fills in the middle of a prompt, many steps after its start."""
    with Daemon(MODEL, "--dtype", "float32", "--max-num-batched-tokens", "64") as narrow:
        outputs = await complete_concurrently(narrow, token_prompts[:3])
    assert_greedy_tokens(gemma, token_prompts[:3], outputs)


def test_chat_needs_a_template(daemon: Daemon) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(f"{daemon.url}/v1/chat/completions", json=request)
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]


async def test_a_long_request_in_a_pool_too_small_for_full_attention(
    gemma: Reference, token_prompts: Prompts
) -> None:
    """Concurrent requests preempt each other; alone, the longest frees most of its blocks."""
    num_blocks = 600
    longest = token_prompts[-1]
    full_attention = NUM_GROUPS * len(longest) // BLOCK
    assert full_attention > num_blocks
    # Blocks of a group with a window: the window, and a partial block at each end.
    num_tokens = len(longest) + MOST_TOKENS_OF_A_DECODE
    hybrid = num_tokens // BLOCK + 1 + (NUM_GROUPS - 1) * (WINDOW // BLOCK + 2)
    with Daemon(MODEL, "--dtype", "float32", "--num-gpu-blocks-override", str(num_blocks)) as small:
        used = [usage * (num_blocks - 1) for usage in usages_of_a_decode(small, longest)]
        print(f"{used[-1]:.0f} of {full_attention} blocks, at most {max(used):.0f}")
        assert max(used) < full_attention / 2, "while the prompt is computed"
        assert len(longest) // BLOCK < used[-1] <= hybrid
        assert eventually(lambda: small.metric("vllm:kv_cache_usage_perc") == 0)
        outputs = await complete_concurrently(small, token_prompts)
        preemptions = small.metric("vllm:num_preemptions_total")
    assert preemptions > 0
    assert_greedy_tokens(gemma, token_prompts, outputs)


def usages_of_a_decode(daemon: Daemon, prompt: list[int]) -> list[float]:
    """KV cache usage after every output token of a prompt."""
    request = body(prompt, stream=True, max_tokens=MOST_TOKENS_OF_A_DECODE)
    usages: list[float] = []
    with httpx.stream("POST", f"{daemon.url}/v1/completions", json=request, timeout=600) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                usages.append(daemon.metric("vllm:kv_cache_usage_perc"))
            if len(usages) == 10:
                break
    return usages


async def test_two_workers_replicate_a_single_kv_head(
    gemma: Reference, token_prompts: Prompts
) -> None:
    """Query heads are split, the KV head is on both workers; tokens equal transformers'."""
    some = token_prompts[:3]
    with Daemon(MODEL, "--dtype", "float32", "--tensor-parallel-size", "2") as two:
        assert_greedy_tokens(gemma, some, await complete_concurrently(two, some))
        assert two.text.count("INFO worker 1: weights:") == 1
