"""The measuring client and the figures it reads, without a daemon."""

import json
import os

import httpx
import pytest

from deploy.loadtest import __main__ as loadtest
from deploy.loadtest.client import Timing, complete
from deploy.loadtest.daemon import cpu_seconds, resident_bytes


async def test_a_completion_is_timed_and_counted() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        chunks = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
        chunks.append({"choices": [], "usage": {"completion_tokens": 2}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines))

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://daemon") as client:
        timing = await complete(client, [5, 6], 2)
    assert timing.num_tokens == 2
    assert 0.0 < timing.first <= timing.last
    assert (asked[0]["prompt"], asked[0]["max_tokens"]) == ([5, 6], 2)
    assert asked[0]["ignore_eos"] is True


async def test_a_refusal_is_an_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(503, json={"error": {}}))
    async with httpx.AsyncClient(transport=transport, base_url="http://daemon") as client:
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            await complete(client, [5], 2)


def test_time_per_token_leaves_the_first_out() -> None:
    assert Timing(first=1.0, last=3.0, num_tokens=5).per_token == pytest.approx(0.5)


def test_prompts_share_no_prefix() -> None:
    made = loadtest.prompts(16, seed=2)
    assert len({tuple(prompt[:16]) for prompt in made}) == 16
    assert {len(prompt) for prompt in made} == {loadtest.PROMPT_TOKENS}


def test_figures_of_a_process() -> None:
    assert resident_bytes(os.getpid()) > 1 << 20
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))
    assert cpu_seconds(os.getpid()) > before > 0.0
