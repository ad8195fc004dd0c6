"""Greedy outputs alone and in a batch of eight, for every weight format."""

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
        pytest.param(("--cpu-weights", "packed"), 0, id="packed"),
        pytest.param(("--cpu-weights", "int8"), 0, id="int8"),
        pytest.param(("--cpu-weights", "bf16"), 0, id="bf16"),
        pytest.param(("--cpu-weights", "f32"), 0, id="f32"),
        pytest.param((), None, id="default"),
    ],
)
async def test_greedy_outputs_alone_and_in_a_batch_of_eight(
    flags: tuple[str, ...], max_different: int | None, reference: Reference
) -> None:
    """The default is only measured: with two formats the number of rows decides which is used."""
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
