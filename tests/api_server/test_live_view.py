"""The live view over HTTP: the events of a subscriber, and data hidden from it."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api_server.live_view import MAX_UNREAD, rate
from proto.messages.stats import KVTier
from proto.messages.view import (
    CACHED,
    FREE,
    HELD,
    RESERVED,
    RUNNING,
    WAITING,
    AdapterView,
    BlockMap,
    EngineView,
    RequestView,
)
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import FrontEnd, StartFrontEnd

HELLO = {
    "model": "toy",
    "num_blocks": 64,
    "block_size": 16,
    "blocks_per_cell": 1,
    "max_num_seqs": 256,
    "max_model_len": 256,
    "engine": 0,
    "num_engines": 1,
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
        "num_drafts": 2,
        "draft_tokens": 9,
        "accepted_tokens": 6,
        "num_state_slots": 24,
        "num_held_states": 3,
        "states": blocks,
        "step_limit": "blocks",
        "tiers": [KVTier("GPU", 30, 6), KVTier("CPU", 100, 25)],
    }
    return EngineView(**(facts | fields))  # type: ignore[arg-type]


class Stream:
    """The events of one subscriber, in order."""

    def __init__(self, lines) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, dict]:
        while not (line := await self.text()).startswith("event: "):
            pass
        data = await self.text()
        return line.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def text(self) -> str:
        """Return the next line of any kind."""
        return await asyncio.wait_for(anext(self._lines), 10)

    async def rest(self) -> list[str]:
        """Return all lines until the stream ends."""
        return [line async for line in self._lines]


@contextlib.asynccontextmanager
async def watching(front_end: FrontEnd, **headers: str):
    async with front_end.http.stream("GET", "/view/events", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response.aiter_lines())


async def watches(front_end: FrontEnd) -> bool:
    """Return the next Watch message that the engine gets."""
    return (await asyncio.wait_for(front_end.engine.watches.get(), 10)).wanted


async def test_the_stream_begins_with_hello_then_views(start: StartFrontEnd) -> None:
    request = RequestView(1, 0, "cmpl-1", RUNNING, 20, 5, 24, 16, 2, "a", 3)
    adapter = AdapterView("a", 0, 1, 2, 4096)
    async with start() as front_end, watching(front_end) as stream:
        kind, hello = await stream.next()
        assert kind == "hello"
        assert hello.pop("version")
        assert hello == HELLO
        assert await watches(front_end)
        front_end.engine.send_view(view(requests=(request,), adapters=[adapter]))
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
            "drafts": 2,
            "draft_tokens": 9,
            "accepted_tokens": 6,
            "state_slots": 24,
            "held_states": 3,
            "step_limit": "blocks",
            "tiers": [
                {"medium": "GPU", "blocks": 30, "used": 6},
                {"medium": "CPU", "blocks": 100, "used": 25},
            ],
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
                    "adapter": "a",
                    "images": 3,
                }
            ],
            "num_omitted_requests": 0,
            "adapters": [
                {"name": "a", "state": "resident", "running": 1, "requests": 2, "bytes": 4096}
            ],
            "cells": CELLS,
            "state_cells": CELLS,
        }


async def test_all_subscribers_share_one_engine_subscription(start: StartFrontEnd) -> None:
    """It starts with the first and ends with the last; later subscribers get the last view."""
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
        assert not front_end.app_state.live_view.has_subscribers(0)


async def test_the_engine_gets_the_request_id_of_the_response(start: StartFrontEnd) -> None:
    async with start(lambda request, choice: [2]) as front_end:
        answer = (await front_end.complete()).json()
        assert (await front_end.engine.requests.get()).label == answer["id"]


@pytest.mark.parametrize("tenant_by", ["api-key", "header", "none"])
async def test_requests_of_other_tenants_are_anonymous(
    start: StartFrontEnd, tmp_path: Path, tenant_by: Any
) -> None:
    """Without tenants, requests with different API keys are anonymous to each other."""
    keys = tmp_path / "keys"
    keys.write_text("alice key-of-alice\nbob key-of-bob\n")
    keys.chmod(0o600)
    config = FrontEndConfig(api_key_file=str(keys), admin_api_key="boss", tenant_by=tenant_by)
    hidden = ("id", "prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens")
    hidden += ("adapter", "images")
    async with start(lambda request, choice: [2], config=config) as front_end:
        readers = {}
        for name in ("alice", "bob"):
            bearer = {"authorization": f"Bearer key-of-{name}"}
            body = {"prompt": "x"}
            await front_end.http.post("/v1/completions", json=body, headers=bearer)
            readers[name] = (await front_end.engine.requests.get()).reader
        shown = view(
            requests=(
                RequestView(1, readers["alice"], "cmpl-a", RUNNING, 20, 5, 24, 16, 2, "a"),
                RequestView(2, readers["bob"], "cmpl-b", WAITING, 21, 0, 0, 0, 0, "b"),
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


async def test_the_stream_continues_after_an_engine_death(start: StartFrontEnd) -> None:
    """The next engine gets a new subscription; hello is repeated only if its shape differs."""
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


async def test_events_are_sent(start: StartFrontEnd) -> None:
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


async def test_an_invalid_view_affects_nothing_else(
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


async def test_a_subscriber_that_does_not_read_alone_is_disconnected(
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


async def test_the_number_of_subscribers_is_limited(
    start: StartFrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api_server.live_view.MAX_SUBSCRIBERS", 1)
    async with start() as front_end:
        async with watching(front_end) as stream:
            await stream.next()
            response = await front_end.http.get("/view/events")
            assert response.status_code == 503
        assert await watches(front_end)
        assert not await watches(front_end)
        async with watching(front_end) as stream:
            assert (await stream.next())[0] == "hello"


async def test_shutdown_ends_the_stream(start: StartFrontEnd) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        front_end.app_state.client.close()
        assert not any(await stream.rest())


async def test_keep_alive_lines_are_sent(start: StartFrontEnd) -> None:
    config = FrontEndConfig(sse_keep_alive=0.01)
    async with start(config=config) as front_end, watching(front_end) as stream:
        await stream.next()
        assert await stream.text() == ""
        assert await stream.text() == ""


async def test_a_drain_does_not_wait_for_subscribers(start: StartFrontEnd) -> None:
    async with start() as front_end, watching(front_end) as stream:
        await stream.next()
        assert front_end.app_state.in_flight.number == 0
        front_end.app_state.health.start_drain()
        assert (await front_end.complete()).status_code == 503
        async with watching(front_end) as late:
            assert (await late.next())[0] == "hello"


async def test_the_view_is_same_origin_only_and_can_be_disabled(
    start: StartFrontEnd,
) -> None:
    async with start() as front_end:
        foreign = {"sec-fetch-site": "cross-site"}
        response = await front_end.http.get("/view/events", headers=foreign)
        assert response.status_code == 403
        assert not front_end.app_state.live_view.has_subscribers(0)
    async with start(config=FrontEndConfig(page=False)) as front_end:
        assert (await front_end.http.get("/view/events")).status_code == 404


def test_the_first_view_has_no_rates():
    assert rate(256, 0.004) == 0.0
    assert rate(256, 0.25) == 1024.0
