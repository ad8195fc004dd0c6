"""Greedy tokens of the packaged model equal transformers' on the same file, in float32.

One set of 24 prompts goes through the daemon all at once, every third also alone, with a budget of
64 tokens a step, over prefix hits, with so few blocks that requests are preempted,
also by priority, and while half of them are aborted.
"""

import asyncio

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import NUM_OUTPUT_TOKENS, prompts
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("daemons")

Outputs = list[list[int]]


@pytest.fixture(scope="module")
def token_prompts(reference: Reference) -> list[list[int]]:
    return prompts(reference.tokenizer.encode)


def body(prompt: list[int], **changes: object) -> dict[str, object]:
    request = {
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return request | changes


async def complete(client: httpx.AsyncClient, prompt: list[int], **changes: object) -> list[int]:
    response = await client.post("/v1/completions", json=body(prompt, **changes))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert len(choice["token_ids"]) == NUM_OUTPUT_TOKENS
    assert choice["finish_reason"] == "length"
    return choice["token_ids"]


def client_of(daemon: Daemon) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=daemon.url, timeout=300)


async def all_at_once(daemon: Daemon, token_prompts: list[list[int]]) -> Outputs:
    async with client_of(daemon) as client:
        return await asyncio.gather(*(complete(client, prompt) for prompt in token_prompts))


async def half_of_them(daemon: Daemon, token_prompts: list[list[int]]) -> Outputs:
    """Every second client goes away after its first tokens; the others should not notice."""

    async def leave_early(client: httpx.AsyncClient, prompt: list[int]) -> None:
        request = body(prompt, stream=True, max_tokens=5000 if len(prompt) < 1000 else 64)
        async with client.stream("POST", "/v1/completions", json=request) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if seen == 3:
                    return

    async with client_of(daemon) as client:
        pending = [
            leave_early(client, prompt) if i % 2 else complete(client, prompt)
            for i, prompt in enumerate(token_prompts)
        ]
        return (await asyncio.gather(*pending))[::2]


def check(reference: Reference, token_prompts: list[list[int]], outputs: Outputs) -> None:
    reference.assert_greedy(list(zip(token_prompts, outputs, strict=True)))


async def test_alone(daemon: Daemon, reference: Reference, token_prompts: list[list[int]]) -> None:
    async with client_of(daemon) as client:
        outputs = [await complete(client, prompt) for prompt in token_prompts[::3]]
    check(reference, token_prompts[::3], outputs)


async def test_all_at_once_and_again_over_prefix_hits(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    """The first pass of a new daemon is cold; the second finds every full block."""
    with Daemon("--dtype", "float32") as daemon:

        async def one_pass() -> float:
            hits = daemon.metric("vllm:prefix_cache_hits_total")
            outputs = await all_at_once(daemon, token_prompts)
            check(reference, token_prompts, outputs)
            return daemon.metric("vllm:prefix_cache_hits_total") - hits

        shared = await one_pass()
        found = await one_pass()
    full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in token_prompts)
    assert found == full_blocks > shared


async def test_half_of_them_aborted(
    daemon: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    outputs = await half_of_them(daemon, token_prompts)
    assert eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0
    check(reference, token_prompts[::2], outputs)


async def test_a_budget_of_64_tokens(reference: Reference, token_prompts: list[list[int]]) -> None:
    with Daemon("--dtype", "float32", "--max-num-batched-tokens", "64") as daemon:
        outputs = await all_at_once(daemon, token_prompts)
    check(reference, token_prompts, outputs)


async def test_preempted_for_want_of_blocks(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    with Daemon("--dtype", "float32", "--num-gpu-blocks-override", "180") as daemon:
        outputs = await all_at_once(daemon, token_prompts)
        preemptions = daemon.metric("vllm:num_preemptions_total")
    assert preemptions > 0
    print(f"{preemptions:.0f} preemptions")
    check(reference, token_prompts, outputs)


@pytest.mark.suite("parity")
async def test_preempted_by_priority(reference: Reference, token_prompts: list[list[int]]) -> None:
    """Those that come first matter least, so that victims stand anywhere among the running."""
    flags = ("--scheduling-policy", "priority", "--num-gpu-blocks-override", "180")
    with Daemon("--dtype", "float32", *flags) as daemon:
        async with client_of(daemon) as client:
            outputs = await asyncio.gather(
                *(complete(client, each, priority=-i % 7) for i, each in enumerate(token_prompts))
            )
        preemptions = daemon.metric("vllm:num_preemptions_total")
        assert daemon.metric("vllm:kv_cache_usage_perc") == 0
    assert preemptions > 0
    print(f"{preemptions:.0f} preemptions")
    check(reference, token_prompts, outputs)
