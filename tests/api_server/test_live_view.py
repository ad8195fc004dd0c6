"""The live view over HTTP: what a watcher is shown, and what is hidden from it."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api_server.live_view import publisher
from api_server.live_view.events import rate
from api_server.live_view.publisher import MAX_UNREAD
from proto.config import FrontEndConfig
from proto.view import (
    CACHED,
    FREE,
    HELD,
    RESERVED,
    RUNNING,
    WAITING,
    BlockMap,
    EngineView,
    RequestView,
)
from tests.api_server.conftest import FrontEnd, StartFrontEnd

HELLO = {
    "model": "toy",
    "num_blocks": 64,
    "block_size": 16,
    "blocks_per_cell": 1,
    "max_num_seqs": 256,
    "max_model_len": 256,
}
CELLS = [[1, RESERVED, 0], [2, HELD, 1], [1, CACHED, 0], [61, FREE, 0]]


def view(epoch: int = 1, requests: tuple[RequestView, ...] = (), **fields: object) -> EngineView:
    lengths, states, owners = zip(*CELLS, strict=True)
    blocks = BlockMap(
        np.array(lengths, "<i4").tobytes(), bytes(states), np.array(owners, "<i4").tobytes()
    )
    facts = {
        "epoch": epoch,
        "timestamp": 100.0,
        "seconds": 0.5,
        "step": 7,
        "num_running": 1,
        "num_waiting": 1,
        "prompt_tokens": 10,
        "generation_tokens": 4,
        "queried_tokens": 20,
        "found_tokens": 16,
        "preemptions": 0,
        "requests": list(requests),
        "more_requests": 0,
        "blocks": blocks,
    }
    return EngineView(**(facts | fields))  # type: ignore[arg-type]


class Stream:
    """The events of one watcher, in order."""

    def __init__(self, lines) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, dict]:
        while not (line := await self.text()).startswith("event: "):
            pass
        data = await self.text()
        return line.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def text(self) -> str:
        """The next line, whatever it is."""
        return await asyncio.wait_for(anext(self._lines), 10)

    async def rest(self) -> list[str]:
        """All lines until the stream ends."""
        return [line async for line in self._lines]


@contextlib.asynccontextmanager
async def watching(front_end: FrontEnd, **headers: str):
    async with front_end.http.stream("GET", "/view/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response.aiter_lines())


async def watches(front_end: FrontEnd) -> bool:
    """What the engine is told next."""
    return (await asyncio.wait_for(front_end.engine.watches.get(), 10)).wanted


async def test_hello_then_views_in_the_form_of_the_feed(start: StartFrontEnd) -> None:
    request = RequestView(1, 0, "cmpl-1", RUNNING, 20, 5, 24, 16, 2)
    async with start() as front_end, watching(front_end) as stream:
        kind, hello = await stream.next()
        assert kind == "hello"
        assert hello.pop("version")
        assert hello == HELLO
        assert await watches(front_end)
        front_end.engine.send_view(view(requests=(request,)))
        kind, shown = await stream.next()
        assert kind == "view"
        assert shown.pop("time_s") == round(100.0 - front_end.app_state.live_view._start, 3)
        assert shown == {
            "step": 7,
            "running": 1,
            "waiting": 1,
            "prompt_tokens_per_s": 20.0,
            "generation_tokens_per_s": 8.0,
            "prefix_cache_queries": 20,
            "prefix_cache_hits": 16,
            "preemptions": 0,
            "requests": [
                {
                    "owner": 1,
                    "id": "cmpl-1",
                    "state": "running",
                    "prompt_tokens": 20,
                    "output_tokens": 5,
                    "computed_tokens": 24,
                    "cached_tokens": 16,
                    "num_blocks": 2,
                }
            ],
            "num_omitted_requests": 0,
            "cells": CELLS,
        }


async def test_one_subscription_for_all_watchers(start: StartFrontEnd) -> None:
    """It begins with the first and ends with the last; who comes later sees what was shown last."""
    async with start() as front_end:
        async with watching(front_end) as first:
            assert (await first.next())[0] == "hello"
            assert await watches(front_end)
            front_end.engine.send_view(view(step=3))
            assert (await first.next())[1]["step"] == 3
            async with watching(front_end) as second:
                assert (await second.next())[0] == "hello"
                assert (await second.next())[1]["step"] == 3
                front_end.engine.send_view(view(step=4))
                assert (await first.next())[1]["step"] == 4
                assert (await second.next())[1]["step"] == 4
            assert front_end.engine.watches.empty()
        assert not await watches(front_end)
        assert not front_end.app_state.live_view.has_subscribers


async def test_the_engine_hears_the_id_of_an_answer(start: StartFrontEnd) -> None:
    async with start(lambda request, choice: [2]) as front_end:
        answer = (await front_end.complete()).json()
        assert (await front_end.engine.requests.get()).label == answer["id"]


@pytest.mark.parametrize("tenant_by", ["api-key", "header", "none"])
async def test_requests_of_other_tenants_are_anonymous(
    start: StartFrontEnd, tmp_path: Path, tenant_by: Any
) -> None:
    """Also where nothing tells tenants apart: then whose key is another one is another."""
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice\nbob key-of-bob\n")
    keys.chmod(0o600)
    config = FrontEndConfig(api_key_file=str(keys), admin_api_key="boss", tenant_by=tenant_by)
    hidden = ("id", "prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens")
    async with start(lambda request, choice: [2], config=config) as front_end:
        readers = {}
        for name in ("alice", "bob"):
            bearer = {"authorization": f"Bearer key-of-{name}"}
            body = {"prompt": "x"}
            await front_end.http.post("/v1/completions", json=body, headers=bearer)
            readers[name] = (await front_end.engine.requests.get()).reader
        shown = view(
            requests=(
                RequestView(1, readers["alice"], "cmpl-a", RUNNING, 20, 5, 24, 16, 2),
                RequestView(2, readers["bob"], "cmpl-b", WAITING, 21, 0, 0, 0, 0),
            )
        )
        seen = {}
        for key in ("key-of-alice", "key-of-bob", "boss"):
            async with watching(front_end, authorization=f"Bearer {key}") as stream:
                await stream.next()
                assert await watches(front_end)
                front_end.engine.send_view(shown)
                seen[key] = (await stream.next())[1]["requests"]
            assert not await watches(front_end)
        for own, other, key in ((0, 1, "key-of-alice"), (1, 0, "key-of-bob")):
            assert all(seen[key][own][name] is not None for name in hidden)
            assert all(seen[key][other][name] is None for name in hidden)
            assert "cmpl" not in json.dumps(seen[key][other])
            assert seen[key][other]["state"] == seen["boss"][other]["state"]
            assert seen[key][other]["num_blocks"] == seen["boss"][other]["num_blocks"]
        assert [each["id"] for each in seen["boss"]] == ["cmpl-a", "cmpl-b"]
        response = await front_end.http.get("/view/events")
        assert response.status_code == 401


async def test_the_stream_goes_on_after_the_engine_died(start: StartFrontEnd) -> None:
    """The next engine is asked anew, and only another shape is told again."""
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        assert await watches(front_end)
        for max_model_len in (256, 128):
            engine = await front_end.lose_engine()
            engine.max_model_len = max_model_len
            engine.announce()
            assert await watches(front_end)
            front_end.app_state.live_view.publish_restart("engine_core", hung=False)
            engine.send_view(view(epoch=engine.epoch, step=1))
            if max_model_len == 128:
                kind, hello = await stream.next()
                assert (kind, hello["max_model_len"]) == ("hello", 128)
            kind, notice = await stream.next()
            assert (kind, notice["kind"]) == ("notice", "restart")
            assert notice["text"] == "engine was restarted"
            assert (await stream.next())[1]["step"] == 1


async def test_what_happens_is_told(start: StartFrontEnd) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        assert await watches(front_end)
        front_end.engine.send_view(view(preemptions=2))
        assert (await stream.next())[0] == "view"
        kind, notice = await stream.next()
        assert (kind, notice["kind"]) == ("notice", "preemption")
        assert notice["text"].startswith("2 requests")
        front_end.app_state.live_view.publish_restart("worker", hung=True)
        assert (await stream.next())[1]["kind"] == "watchdog"


async def test_a_view_that_makes_no_sense_costs_nothing_else(
    start: StartFrontEnd, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        assert await watches(front_end)
        front_end.engine.send_view(view(blocks=BlockMap(b"\1\0\0\0", b"", b"")))
        front_end.engine.send_view(view(requests=(RequestView(1, 0, "cmpl-1", 9, 1, 1, 1, 1, 1),)))
        front_end.engine.send_view(view(step=8))
        assert (await stream.next())[1]["step"] == 8
        assert len([each for each in caplog.records if "could not be encoded" in each.message]) == 2


async def test_who_does_not_read_loses_the_stream_and_nobody_else_does(
    start: StartFrontEnd,
) -> None:
    async with start() as front_end:
        live_view = front_end.app_state.live_view
        async with watching(front_end) as reader:
            await reader.next()
            assert await watches(front_end)
            (response_watcher,) = live_view._subscribers
            lazy = live_view.subscribe(response_watcher.scope, front_end.app_state.client.engine)
            for step in range(MAX_UNREAD + 1):
                front_end.engine.send_view(view(step=step))
                assert (await reader.next())[1]["step"] == step
            assert lazy.finished
            assert live_view._subscribers == [response_watcher]
            assert await lazy.drain_events(None) == b""


async def test_there_is_a_most_of_watchers(
    start: StartFrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "MAX_SUBSCRIBERS", 1)
    async with start() as front_end:
        async with watching(front_end) as stream:
            await stream.next()
            response = await front_end.http.get("/view/events")
            assert response.status_code == 503
        assert await watches(front_end)
        assert not await watches(front_end)
        async with watching(front_end) as stream:
            assert (await stream.next())[0] == "hello"


async def test_the_end_of_the_server_ends_the_stream(start: StartFrontEnd) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        front_end.app_state.client.close()
        assert not any(await stream.rest())


async def test_silence_is_broken_by_empty_lines(start: StartFrontEnd) -> None:
    config = FrontEndConfig(sse_keep_alive=0.01)
    async with start(config=config) as front_end, watching(front_end) as stream:
        await stream.next()
        assert await stream.text() == ""
        assert await stream.text() == ""


async def test_a_drain_does_not_wait_for_watchers(start: StartFrontEnd) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        assert front_end.app_state.in_flight.number == 0
        front_end.app_state.health.start_drain()
        assert (await front_end.complete()).status_code == 503
        async with watching(front_end) as late:
            assert (await late.next())[0] == "hello"


async def test_it_is_for_pages_of_this_server_and_can_be_switched_off(
    start: StartFrontEnd,
) -> None:
    async with start() as front_end:
        foreign = {"sec-fetch-site": "cross-site"}
        response = await front_end.http.get("/view/events", headers=foreign)
        assert response.status_code == 403
        assert not front_end.app_state.live_view.has_subscribers
    async with start(config=FrontEndConfig(page=False)) as front_end:
        assert (await front_end.http.get("/view/events")).status_code == 404


def test_a_view_that_comes_at_once_has_no_rate():
    assert rate(256, 0.004) == 0.0
    assert rate(256, 0.25) == 1024.0
