"""A stream without news says so from time to time, between events and never within one."""

import asyncio
import json

import openai
import pytest

from api_server.protocol.encoder import KEEP_ALIVE_COMMENT as COMMENT
from api_server.request_stream import StreamNotifier
from api_server.response import KeepAlive
from proto.config import FrontEndConfig
from proto.engine_io import FinishReason

OFTEN = FrontEndConfig(sse_keep_alive=0.02)
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_comments_stand_between_events(start, tokenizer, path):
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
                if text.count(COMMENT) > place and place < len(ids):
                    last = FinishReason.LENGTH if place + 1 == len(ids) else None
                    front_end.engine.emit(request, [ids[place]], finish=last)
                    place = text.count(COMMENT)
        parts = text.removesuffix("\n\n").split("\n\n")
        events = [part for part in parts if part != COMMENT.strip()]
        assert len(parts) - len(events) >= len(ids)
        assert events[-1] == "data: [DONE]"
        shown = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events[:-1]]
        texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in shown]
        assert "".join(texts) == "the quick fox"


async def test_an_answer_that_is_sent_as_a_whole_has_none(start):
    async with start(accepts=True, config=OFTEN) as front_end:
        answer = asyncio.create_task(front_end.complete(max_tokens=1))
        request = await front_end.engine.requests.get()
        notifier = StreamNotifier()
        KeepAlive(0.1, notifier, COMMENT)
        await notifier.wait()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["finish_reason"] == "length"


async def test_the_openai_client_takes_no_notice(start):
    async with start(accepts=True, config=OFTEN) as front_end:
        client = openai.AsyncOpenAI(base_url=f"{front_end.url}/v1", api_key="x", max_retries=0)
        stream = await client.completions.create(
            model="toy", prompt="hello", max_tokens=1, stream=True
        )
        request = await front_end.engine.requests.get()
        notifier = StreamNotifier()
        KeepAlive(0.1, notifier, COMMENT)
        await notifier.wait()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        (chunk,) = [chunk async for chunk in stream]
        assert chunk.choices[0].finish_reason == "length"


async def test_while_an_engine_is_restarted_a_stream_shows_that_it_lives(start):
    async with start(accepts=True, config=OFTEN) as front_end:
        body = {"prompt": "hello", "stream": True, "max_tokens": 2}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            await front_end.engine.requests.get()
            engine = await front_end.lose_engine()
            lines = response.aiter_lines()
            assert await anext(lines) == COMMENT.strip()
            engine.announce()
            engine.emit(await engine.requests.get(), [40, 41], finish=FinishReason.LENGTH)
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def test_whoever_speaks_is_not_silent():
    """The one timer of a stream looks again when the silence since the last word is over."""
    loop = asyncio.get_running_loop()
    notifier = StreamNotifier()
    keep_alive = KeepAlive(3600.0, notifier, COMMENT)
    first = keep_alive._timer
    keep_alive._last_write = loop.time() - 3599.0
    keep_alive.record_write()
    keep_alive._check_silence()
    assert not notifier._pending
    assert keep_alive.due_event() == ""
    keep_alive._last_write -= 3601.0
    keep_alive._check_silence()
    await asyncio.wait_for(notifier.wait(), 5)
    assert keep_alive.due_event() == COMMENT
    keep_alive.record_write()
    assert keep_alive.due_event() == ""
    first.cancel()
    keep_alive.close()
    assert keep_alive._timer.cancelled()


async def test_none_where_none_are_wanted(monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", None, raising=False)
    keep_alive = KeepAlive(0.0, StreamNotifier(), COMMENT)
    assert keep_alive.due_event() == ""
    keep_alive.close()
