"""Parsing of streams: any malformed stream is reported as broken."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deploy.bench.chaos.streams import CompletionStream, InvalidStreamError

BODY = {"prompt": "The sea", "return_token_ids": True}
DONE = "data: [DONE]\n\n"


def event(token_ids: list[int], finish_reason: str | None = None, **fields: Any) -> str:
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": finish_reason} | fields
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


async def run(stream: CompletionStream, text: str, status: int = 200) -> CompletionStream:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    async with httpx.AsyncClient(base_url="http://tokend", transport=transport) as client:
        return await stream.receive(client)


async def test_tokens_finish_reasons_and_usage_are_recorded() -> None:
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n\n'
    begin = event([1, 2], prompt_token_ids=[7, 8])
    stream = await run(CompletionStream(BODY), begin + event([3], "length") + usage + DONE)
    assert (stream.choices, stream.reasons) == ({0: [1, 2, 3]}, {0: "length"})
    assert (stream.prompt_token_ids, stream.usage) == ([7, 8], {"prompt_tokens": 2})
    assert stream.ended
    assert not stream.mid_generation


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (event([1], "length"), 200),
        (event([1]) + DONE, 200),
        (event([1]) + 'data: {"error": {"message": "no"}}\n\n' + DONE, 200),
        ("busy", 503),
    ],
    ids=["no [DONE]", "no reason", "error event", "status"],
)
async def test_malformed_streams_are_broken(text: str, status: int) -> None:
    stream = CompletionStream(BODY)
    with pytest.raises(InvalidStreamError):
        await run(stream, text, status)
    assert stream.ended, "waiting for tokens of a broken stream must end"


async def test_waiting_for_tokens_ends_with_the_stream() -> None:
    stream = CompletionStream(BODY)
    waiting = asyncio.create_task(stream.wait_for_tokens(100))
    await run(stream, event([1], "stop") + DONE)
    await asyncio.wait_for(waiting, 5)


def test_first_token_after_a_given_time() -> None:
    stream = CompletionStream(BODY, token_times=[1.0, 2.0, 3.0])
    assert [stream.first_token_after(moment) for moment in (0.5, 1.0, 2.5, 3.0)] == [
        1.0,
        2.0,
        3.0,
        None,
    ]
