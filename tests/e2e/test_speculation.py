"""Answers with drafts, the default on a CPU, beside those of a daemon without them."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon, DaemonPool

pytestmark = pytest.mark.suite("daemons")
WITHOUT = ("--speculative-config", '{"method": "none"}')
LINES = "\n".join(
    f"{index}. The {word} is on the table."
    for index, word in enumerate(
        ["cup", "book", "lamp", "clock", "bread", "knife", "map", "letter", "bottle", "key"]
    )
)
COPY = f"A list:\n{LINES}\n\nThe same list again:\n{LINES[:24]}"
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 9}, "is_old": {"type": "boolean"}},
    "required": ["first_name", "is_old"],
    "additionalProperties": False,
}
BODIES: list[dict[str, Any]] = [
    {"prompt": COPY, "max_tokens": 80, "temperature": 0, "logprobs": 2},
    {"prompt": COPY, "max_tokens": 80, "temperature": 0.8, "seed": 5, "n": 2},
    {"prompt": COPY, "max_tokens": 60, "seed": 7, "repetition_penalty": 1.2, "min_tokens": 40},
    {"prompt": COPY, "max_tokens": 200, "temperature": 0, "stop": ["lamp is"]},
    {"prompt": "A person as JSON:", "temperature": 0, "structured_outputs": {"json": SCHEMA}},
    {"prompt": "1 2 3 4 5 6 7 8 9 10 1 2 3", "max_tokens": 50, "temperature": 0, "echo": True},
]


async def answers(daemon: Daemon, victim: str = "") -> list[dict[str, Any]]:
    """Return choices and usage of all requests, sent at once, without their accepted drafts.

    victim: a process to kill once drafts have been accepted.
    """
    async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
        extras = {"return_token_ids": True, "return_accepted_drafts": True}
        bodies = [body | extras for body in BODIES]
        sent = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for body in bodies]
        if victim:
            while daemon.metric("vllm:spec_decode_num_accepted_tokens_total") == 0:
                await asyncio.sleep(0.02)
            os.kill(daemon.processes()[victim].pid, signal.SIGKILL)
        responses = await asyncio.gather(*sent)
    assert not [each.text for each in responses if each.status_code != 200]
    documents = [each.json() for each in responses]
    for each in documents:
        each["usage"].pop("prompt_tokens_details")  # cached tokens depend on what ran before
    choices = [choice for each in documents for choice in each["choices"]]
    flags = [choice.pop("accepted_drafts") for choice in choices]
    assert [len(each) for each in flags] == [len(choice["token_ids"]) for choice in choices]
    has_accepted = daemon.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert any(map(any, flags)) == has_accepted
    return [{"choices": each["choices"], "usage": each["usage"]} for each in documents]


async def test_answers_are_those_without_drafts(daemons: DaemonPool) -> None:
    """Text, tokens, log-probabilities, finish reasons and usage, also of a second round."""
    with daemons.borrow(*WITHOUT) as daemon:
        expected = await answers(daemon)
        assert daemon.metric("vllm:spec_decode_num_drafts_total") == 0
    with daemons.borrow() as daemon:
        assert await answers(daemon) == expected
        accepted = daemon.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted > 0
        assert await answers(daemon) == expected
        assert daemon.metric("vllm:spec_decode_num_accepted_tokens_total") > accepted


@pytest.mark.parametrize(
    "victim", ["worker", pytest.param("engine_core", marks=pytest.mark.suite("settings"))]
)
async def test_answers_survive_a_death(victim: str, daemons: DaemonPool) -> None:
    with daemons.borrow(*WITHOUT) as daemon:
        expected = await answers(daemon)
    with Daemon("--max-num-seqs", "4") as daemon:
        assert await answers(daemon, victim) == expected
