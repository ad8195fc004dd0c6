"""Greedy tokens of the packaged model in float32 equal transformers' on the same file.

22 prompts are completed concurrently, with preemption by priority; with a budget of 64 tokens a
step; and while half of them are aborted. Every third is completed alone, over prefix hits, and with
preemption.
"""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import NUM_OUTPUT_TOKENS, prompts
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("daemons")

Outputs = list[list[int]]


@pytest.fixture
def daemon(exact_daemon: Daemon) -> Daemon:
    return exact_daemon


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


async def complete_concurrently(
    daemon: Daemon, token_prompts: list[list[int]], **changes: Any
) -> Outputs:
    async with client_of(daemon) as client:
        return await asyncio.gather(
            *(complete(client, prompt, **changes) for prompt in token_prompts)
        )


async def complete_half(daemon: Daemon, token_prompts: list[list[int]]) -> Outputs:
    """Every second client disconnects after its first tokens; the others must be unaffected."""

    async def disconnect_early(client: httpx.AsyncClient, prompt: list[int]) -> None:
        request = body(prompt, stream=True, max_tokens=5000)
        async with client.stream("POST", "/v1/completions", json=request) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")
                if seen == 3:
                    return

    async with client_of(daemon) as client:
        pending = [
            disconnect_early(client, prompt) if i % 2 else complete(client, prompt)
            for i, prompt in enumerate(token_prompts)
        ]
        return (await asyncio.gather(*pending))[::2]


def assert_greedy_tokens(
    reference: Reference, token_prompts: list[list[int]], outputs: Outputs
) -> None:
    reference.assert_greedy(list(zip(token_prompts, outputs, strict=True)))


async def test_single_requests_equal_transformers(
    daemon: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    async with client_of(daemon) as client:
        outputs = [await complete(client, prompt) for prompt in token_prompts[::3]]
    assert_greedy_tokens(reference, token_prompts[::3], outputs)


async def test_concurrent_requests_cold_and_over_prefix_hits(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    """The first pass of a new daemon is cold; the second hits every full block."""
    some = token_prompts[::3]
    with Daemon("--dtype", "float32") as daemon:

        async def complete_all() -> float:
            hits = daemon.metric("vllm:prefix_cache_hits_total")
            outputs = await complete_concurrently(daemon, some)
            assert_greedy_tokens(reference, some, outputs)
            return daemon.metric("vllm:prefix_cache_hits_total") - hits

        shared = await complete_all()
        found = await complete_all()
    full_blocks = sum((len(prompt) - 1) // 16 * 16 for prompt in some)
    assert found == full_blocks > shared


@pytest.mark.suite("parity")
async def test_aborting_half_of_the_requests_does_not_change_others(
    daemon: Daemon, reference: Reference, token_prompts: list[list[int]]
) -> None:
    outputs = await complete_half(daemon, token_prompts)
    assert eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0
    assert_greedy_tokens(reference, token_prompts[::2], outputs)


@pytest.mark.suite("parity")
async def test_a_small_token_budget_does_not_change_tokens(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    with Daemon("--dtype", "float32", "--max-num-batched-tokens", "64") as daemon:
        outputs = await complete_concurrently(daemon, token_prompts)
    assert_greedy_tokens(reference, token_prompts, outputs)


async def test_preemption_does_not_change_tokens(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    """The prompts and their outputs need 143 blocks."""
    some = token_prompts[::3]
    with Daemon("--dtype", "float32", "--num-gpu-blocks-override", "100") as daemon:
        outputs = await complete_concurrently(daemon, some)
        preemptions = daemon.metric("vllm:num_preemptions_total")
    assert preemptions > 0
    print(f"{preemptions:.0f} preemptions")
    assert_greedy_tokens(reference, some, outputs)


@pytest.mark.suite("parity")
async def test_preemption_by_priority_does_not_change_tokens(
    reference: Reference, token_prompts: list[list[int]]
) -> None:
    """Early requests have the lowest priority, so victims are anywhere among the running ones."""
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
    assert_greedy_tokens(reference, token_prompts, outputs)
