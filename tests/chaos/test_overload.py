"""A real daemon under overload: refused requests and disconnecting clients."""

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.benchmarks.arrivals import OverloadClients, PartResult, RequestShape, overload_clients
from tests.benchmarks.overload import SMALL_POOL, OverloadRun, nonzero_gauges
from tests.benchmarks.usage import MemoryLog
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("chaos")

SEATS, QUEUE = 8, 8
SECONDS = 20.0
CONTROL = {"prompt": "The sun rises in the", "max_tokens": 8, "temperature": 0}
GROWTH_MIB = 64.0
"""Generous: a leak per request would exceed it in this time."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ("--max-num-seqs", str(SEATS), "--max-num-queued-reqs", str(QUEUE))
    flags += ("--kv-cache-memory", SMALL_POOL, "--disable-log-requests")
    with Daemon("--dtype", "float32", *flags) as running:
        yield running


class IdleSnapshot:
    """The idle state of a daemon, to compare with later."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._answer = self._control()
        self._api = daemon.processes()["api_server"]
        self._pids = {each.pid for each in daemon.processes().values()}
        self._sockets = len(self._api.net_connections("tcp"))

    def assert_unchanged(self) -> None:
        """Assert that no request, connection or process is left, and that outputs are unchanged."""
        assert nonzero_gauges(self._daemon.url) == []
        assert eventually(lambda: self._daemon.metric("vllm:kv_cache_usage_perc") == 0)
        assert eventually(lambda: len(self._api.net_connections("tcp")) <= self._sockets + 1)
        assert {each.pid for each in self._daemon.processes().values()} == self._pids
        assert not [
            each
            for each in psutil.Process(self._daemon.process.pid).children(recursive=True)
            if each.status() == psutil.STATUS_ZOMBIE
        ]
        assert self._control() == self._answer

    def _control(self) -> str:
        url = f"{self._daemon.url}/v1/completions"
        text: str = httpx.post(url, json=CONTROL, timeout=60).json()["choices"][0]["text"]
        return text


def has_all_tokens(result: PartResult, shape: RequestShape) -> bool:
    return all(len(each.token_ids) == shape.output_tokens for each in result.accepted)


async def run_of(daemon: Daemon, clients: OverloadClients, shape: RequestShape) -> OverloadRun:
    return OverloadRun(daemon.url, shape, clients, MemoryLog(daemon.process.pid))


async def test_ten_times_the_capacity_is_refused_at_once(daemon: Daemon) -> None:
    before, shape = IdleSnapshot(daemon), RequestShape()
    lengths: list[float] = []
    watching = asyncio.create_task(watch_queue(daemon, lengths))
    async with overload_clients(daemon.url, shape) as clients:
        run = await run_of(daemon, clients, shape)
        per_second = await run.measure_capacity(SEATS + QUEUE, SECONDS / 4)
        result = await run.measure_overload(10 * per_second, SECONDS)
    watching.cancel()
    assert run.report.problems() == []
    assert has_all_tokens(result, shape)
    assert len(result.accepted) > SEATS + QUEUE
    assert len(result.refused) > len(result.accepted)
    assert all(1 <= int(each.retry_after) <= 60 for each in result.refused)
    assert daemon.metric("vllm:admission_rejections_total") >= len(result.refused)
    assert all(run.memory.growth(title) < GROWTH_MIB for title in run.memory.sizes)
    assert max(lengths) <= QUEUE
    await asyncio.to_thread(before.assert_unchanged)


async def watch_queue(daemon: Daemon, lengths: list[float]) -> None:
    while True:
        lengths.append(await asyncio.to_thread(daemon.metric, "tokend:queued_reqs"))
        await asyncio.sleep(0.5)


async def test_a_hundred_short_connections_a_second(daemon: Daemon) -> None:
    before, shape = IdleSnapshot(daemon), RequestShape()
    async with overload_clients(daemon.url, shape) as clients:
        run = await run_of(daemon, clients, shape)
        result = await run.measure_churn(SEATS // 2, 100.0, SECONDS / 2, 0.1)
    assert run.report.problems() == []
    assert has_all_tokens(result, shape)
    assert result.accepted
    assert daemon.metric("tokend:requests_cut_short_total") > 0
    await asyncio.to_thread(before.assert_unchanged)


def events(response: httpx.Response) -> list[str]:
    return response.text.strip().split("\n\n")


async def complete(daemon: Daemon, **fields: object) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, **fields}
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(f"{daemon.url}/v1/completions", json=body)


async def test_a_request_beyond_its_timeout_is_aborted_at_once(daemon: Daemon) -> None:
    """Streamed, not streamed, and across the death of the engine."""
    before = IdleSnapshot(daemon)
    whole = await complete(daemon, timeout_ms=300)
    assert whole.status_code == 504
    streamed = await complete(daemon, timeout_ms=3000, stream=True)
    assert streamed.status_code == 200
    assert len(events(streamed)) > 2, "no tokens before the timeout"
    assert '"code": 504' in events(streamed)[-2]
    assert events(streamed)[-1] == "data: [DONE]"
    await asyncio.to_thread(before.assert_unchanged)
    completion = asyncio.create_task(complete(daemon, timeout_ms=6000, stream=True))
    assert await asyncio.to_thread(
        eventually, lambda: daemon.metric("vllm:num_requests_running") == 1
    )
    daemon.processes()["engine_core"].kill()
    streamed = await completion
    assert streamed.status_code == 200
    assert '"code": 504' in events(streamed)[-2]
    assert nonzero_gauges(daemon.url) == []


async def test_a_request_beyond_its_queue_timeout_is_refused(daemon: Daemon) -> None:
    before = IdleSnapshot(daemon)
    running = [
        asyncio.create_task(complete(daemon, stream=True, timeout_ms=8000)) for _ in range(SEATS)
    ]
    assert await asyncio.to_thread(
        eventually, lambda: daemon.metric("vllm:num_requests_running") == SEATS
    )
    for stream in (False, True):
        late = await complete(daemon, queue_timeout_ms=200, stream=stream)
        assert late.status_code == 503
        assert late.headers["retry-after"]
    assert [(await each).status_code for each in running] == [200] * SEATS
    await asyncio.to_thread(before.assert_unchanged)
