"""Idle streams send empty lines as keep-alive, between events and never within one."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest

from api_server.generation.encoders.base import KEEP_ALIVE
from api_server.generation.request_stream import StreamNotifier
from api_server.generation.response import KeepAlive
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig

OFTEN = FrontEndConfig(sse_keep_alive=0.02)
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_empty_lines_are_sent_between_events(start, tokenizer, path):
    ids = tokenizer.encode("the quick fox").ids
    async with start(accepts=True, config=OFTEN) as front_end:
        body = {**BODIES[path], "stream": True, "max_tokens": len(ids), "logprobs": 1}
        if "messages" in body:
            body["logprobs"] = True
        text, place = "", 0
        async with front_end.http.stream("POST", path, json=body) as response:
            request = await front_end.engine.requests.get()
            async for piece in response.aiter_text():
                text += piece
                if piece.endswith(KEEP_ALIVE) and not piece.strip() and place < len(ids):
                    last = FinishReason.LENGTH if place + 1 == len(ids) else None
                    front_end.engine.emit(request, [ids[place]], finish=last)
                    place += 1
        parts = text.removesuffix("\n\n").split("\n\n")
        events = [part for part in parts if part]
        assert len(parts) - len(events) >= len(ids)
        assert events[-1] == "data: [DONE]"
        shown = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events[:-1]]
        texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in shown]
        assert "".join(texts) == "the quick fox"


async def test_non_streaming_answers_have_no_empty_lines(start):
    async with start(accepts=True, config=OFTEN) as front_end:
        answer = asyncio.create_task(front_end.complete(max_tokens=1))
        request = await front_end.engine.requests.get()
        notifier = StreamNotifier()
        KeepAlive(0.1, notifier, KEEP_ALIVE)
        await notifier.wait()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["finish_reason"] == "length"


async def openai_client(url: str) -> str:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    stream = await client.completions.create(model="toy", prompt="hello", max_tokens=2, stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def benchmark_client(url: str) -> str:
    """Parse events like vLLM's `bench serve`.

    Each chunk of the body is stripped and appended to the buffer, and ends an event if it is
    complete JSON; comments are recognised only as whole events.
    """
    text = buffer = ""
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    async with (
        httpx.AsyncClient(verify=False) as http,
        http.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        async for piece in response.aiter_text():
            buffer += piece.strip()
            *events, buffer = buffer.split("\n\n")
            with contextlib.suppress(ValueError):
                json.loads(buffer.removeprefix("data: "))
                events, buffer = [*events, buffer], ""
            for event in events:
                if not event.startswith(":") and event != "data: [DONE]":
                    text += json.loads(event.removeprefix("data: "))["choices"][0]["text"]
    assert buffer in ("", "data: [DONE]")
    return text


async def splitting_client(url: str) -> str:
    """Split at empty lines, skip empty parts, and parse any other part as an event with data."""
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    async with httpx.AsyncClient(verify=False) as http:
        response = await http.post(f"{url}/v1/completions", json=body)
    *events, done = [part for part in response.text.split("\n\n") if part]
    assert done == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return "".join([json.loads(event[6:])["choices"][0]["text"] for event in events])


@pytest.mark.parametrize("read", [openai_client, benchmark_client, splitting_client])
async def test_clients_ignore_keep_alive_lines(start, tokenizer, read):
    """Empty lines before the first token and between two tokens."""
    ids = tokenizer.encode("the quick").ids[:2]
    async with start(accepts=True, config=OFTEN) as front_end:
        answer = asyncio.create_task(read(front_end.url))
        request = await front_end.engine.requests.get()
        for token_id, finish in zip(ids, (None, FinishReason.LENGTH), strict=True):
            notifier = StreamNotifier()
            KeepAlive(0.1, notifier, KEEP_ALIVE)
            await notifier.wait()
            front_end.engine.emit(request, [token_id], finish=finish)
        assert await answer == tokenizer.decode(ids)


async def test_keep_alive_lines_continue_during_an_engine_restart(start):
    async with start(accepts=True, config=OFTEN) as front_end:
        body = {"prompt": "hello", "stream": True, "max_tokens": 2}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            await front_end.engine.requests.get()
            engine = await front_end.lose_engine()
            lines = response.aiter_lines()
            assert not await anext(lines)
            engine.announce()
            engine.emit(await engine.requests.get(), [40, 41], finish=FinishReason.LENGTH)
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def test_a_write_restarts_the_keep_alive_timer():
    """A stream has a single timer, which is rescheduled to the interval after the last write."""
    loop = asyncio.get_running_loop()
    notifier = StreamNotifier()
    keep_alive = KeepAlive(3600.0, notifier, KEEP_ALIVE)
    first = keep_alive._timer
    keep_alive._last_write = loop.time() - 3599.0
    keep_alive.record_write()
    keep_alive._check_silence()
    assert not notifier._pending
    assert keep_alive.due_event() == ""
    keep_alive._last_write -= 3601.0
    keep_alive._check_silence()
    await asyncio.wait_for(notifier.wait(), 5)
    assert keep_alive.due_event() == KEEP_ALIVE
    keep_alive.record_write()
    assert keep_alive.due_event() == ""
    first.cancel()
    keep_alive.close()
    assert keep_alive._timer.cancelled()


async def test_keep_alive_can_be_disabled(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", None, raising=False)
    keep_alive = KeepAlive(0.0, StreamNotifier(), KEEP_ALIVE)
    assert keep_alive.due_event() == ""
    keep_alive.close()
