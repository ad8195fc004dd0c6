"""Greedy outputs alone and in a batch of eight, for every weight format.

With blocks of a GGUF and with bfloat16 also in batches of other sizes, in chunks, from cached
prefixes and after preemptions.
"""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.prompts import prompts
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("parity")

NUM_TOKENS = 96
AT_ONCE = 8


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def first_difference(alone: list[int], together: list[int]) -> int | None:
    pairs = zip(alone, together, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)


@pytest.mark.parametrize(
    ("flags", "max_different"),
    [
        pytest.param(("--cpu-weights", "int8"), 0, id="int8"),
        pytest.param(("--cpu-weights", "bf16"), 0, id="bf16"),
        pytest.param(("--cpu-weights", "f32"), 0, id="f32"),
        pytest.param((), 0, id="default"),
        pytest.param(("--cpu-weights", "packed+int8"), None, id="packed+int8"),
    ],
)
async def test_greedy_outputs_alone_and_in_a_batch_of_eight(
    flags: tuple[str, ...], max_different: int | None, reference: Reference
) -> None:
    """With two formats the number of rows decides which is used: this is only measured."""
    token_prompts = [each[:120] for each in prompts(reference.tokenizer.encode)]
    differences = []
    with Daemon(*flags, "--no-enable-prefix-caching") as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            alone = [await complete(client, each) for each in token_prompts]
            for first in range(0, len(token_prompts), AT_ONCE):
                chunk = token_prompts[first : first + AT_ONCE]
                together = await asyncio.gather(*(complete(client, each) for each in chunk))
                differences += map(first_difference, alone[first : first + AT_ONCE], together)
    where = sorted(each for each in differences if each is not None)
    print(f"{len(where)} of {len(differences)} answers differ, first at tokens {where}")
    if max_different is not None:
        assert len(where) <= max_different


@pytest.mark.parametrize(
    "weights", [(), ("--cpu-weights", "bf16")], ids=["default", "as a bf16 folder"]
)
async def test_greedy_outputs_do_not_depend_on_how_they_are_computed(
    weights: tuple[str, ...], reference: Reference
) -> None:
    """In batches of 1 to 64, odd chunks, with cached prefixes, after preemptions.

    The answers of all requests are compared with those that each has alone, in whole prompts.
    """
    token_prompts = [each[:400] for each in prompts(reference.tokenizer.encode)]
    with Daemon(
        *weights, "--no-enable-prefix-caching", "--max-num-batched-tokens", "512"
    ) as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            alone = [await complete(client, each) for each in token_prompts]
    # 6,000 tokens in the pool: 64 sequences do not fit.
    flags = ("--max-num-batched-tokens", "67", "--num-gpu-blocks-override", "376")
    with Daemon(*weights, *flags, "--max-num-seqs", "64") as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300) as client:
            for at_once in (1, 5, 64):
                requests = [each % len(alone) for each in range(max(at_once, len(alone)))]
                for first in range(0, len(requests), at_once):
                    numbers = requests[first : first + at_once]
                    coming = (complete(client, token_prompts[each]) for each in numbers)
                    for number, answer in zip(numbers, await asyncio.gather(*coming), strict=True):
                        assert first_difference(alone[number], answer) is None, (at_once, number)
        assert daemon.metric("vllm:num_preemptions_total") > 0
        assert daemon.metric("vllm:prefix_cache_hits_total") > 1000
