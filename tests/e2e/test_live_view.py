"""The live view of a real daemon with two front ends and an engine that dies."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("daemons")

LIMIT_SECONDS = 60.0
SMALL = ("--api-server-count", "2", "--kv-cache-memory", "160M", "--max-num-seqs", "8")


class EventStream:
    """Events of one stream, by kind."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.hellos: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.notices: list[dict[str, Any]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read events until `condition` holds."""
        seen = {"hello": self.hellos, "view": self.views, "notice": self.notices}
        async with asyncio.timeout(LIMIT_SECONDS):
            while not condition():
                line = await anext(self._lines)
                if line.startswith("event: "):
                    data = await anext(self._lines)
                    seen[line[7:]].append(json.loads(data.removeprefix("data: ")))

    @property
    def ids(self) -> set[str]:
        return {each["id"] for view in self.views for each in view["requests"]}

    @property
    def last(self) -> dict[str, Any]:
        return self.views[-1] if self.views else {}

    def num_blocks(self, *states: int) -> int:
        """The number of blocks in the last view."""
        return sum(length for length, state, _ in self.last["cells"] if state in states)


@contextlib.asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[EventStream]:
    async with client.stream("GET", "/view/events") as response:
        assert response.status_code == 200
        yield EventStream(response.aiter_lines())


async def complete(url: str, seed: int) -> str:
    """Complete over a new connection, which either front end may accept; returns the request id.

    With that many tokens it runs longer than the quarter of a second between two views.
    """
    body = {"prompt": [seed] * 40, "max_tokens": 240, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as client:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])


def test_the_live_view_shows_all_requests_and_survives_the_engines_death() -> None:
    async def run(daemon: Daemon) -> None:
        async with (
            httpx.AsyncClient(base_url=daemon.url, timeout=LIMIT_SECONDS) as client,
            watching(client) as watcher,
        ):
            await watcher.until(lambda: bool(watcher.views))
            (hello,) = watcher.hellos
            assert watcher.num_blocks(0, 1, 2, 3, 4) == hello["num_blocks"]
            assert watcher.num_blocks(0) == hello["num_blocks"]

            asked = [asyncio.create_task(complete(daemon.url, seed)) for seed in range(5, 13)]
            await watcher.until(lambda: watcher.last["running"] > 4)
            assert watcher.num_blocks(2, 3) >= 4 * 3
            owners = {each["owner"] for each in watcher.last["requests"] if each["num_blocks"]}
            assert owners == {owner for _, _, owner in watcher.last["cells"]} - {0}
            ids = set(await asyncio.gather(*asked))
            await watcher.until(lambda: not watcher.last["running"])
            await watcher.until(lambda: not watcher.last["generation_tokens_per_s"])
            assert watcher.ids == ids, "of both front ends"
            assert watcher.num_blocks(1) >= 8 * 6
            assert watcher.num_blocks(2, 3) == 0

            daemon.processes()["engine_core"].kill()
            await watcher.until(lambda: bool(watcher.notices))
            assert watcher.notices[0]["kind"] == "restart"
            num_views = len(watcher.views)
            late = asyncio.create_task(complete(daemon.url, 20))
            await watcher.until(lambda: any(each["running"] for each in watcher.views[num_views:]))
            assert await late in watcher.ids
            assert watcher.num_blocks(0) > hello["num_blocks"] // 2
            assert len(watcher.hellos) == 1, "the layout is the same"

            daemon.process.send_signal(signal.SIGTERM)
            await watcher.until(lambda: watcher.notices[-1]["kind"] == "drain")
            with pytest.raises(StopAsyncIteration):
                await watcher.until(lambda: False)

    with Daemon(*SMALL) as daemon:
        asyncio.run(run(daemon))
