"""Several front ends of one daemon: distribution of connections and common metrics."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.bench.processes import pids_by_title
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

NUMBER = 3
STREAMS = 12
BODY = {
    "prompt": "The sea is",
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--api-server-count", str(NUMBER)) as running:
        yield running


def front_ends(daemon: Daemon) -> list[psutil.Process]:
    pids = pids_by_title(daemon.pid)
    return [psutil.Process(pids[f"tokend: api {index}"]) for index in range(NUMBER)]


def num_connections(front_end: psutil.Process) -> int:
    found = front_end.net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


def counters(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


async def get(url: str, path: str) -> httpx.Response:
    """Send over a new connection, which any front end may accept."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await client.get(path)


async def stream(url: str, started: asyncio.Queue[None], resume: asyncio.Event) -> str:
    """Read a whole stream; pauses after the first event until `resume` is set."""
    text = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            text += line
            if text == line:
                started.put_nowait(None)
                await resume.wait()
    return text


async def run_streams(daemon: Daemon) -> tuple[list[int], list[dict[str, int]], list[str]]:
    """Connections by front end while all streams run, their /load, and the texts."""
    started: asyncio.Queue[None] = asyncio.Queue()
    resume = asyncio.Event()
    running = [asyncio.create_task(stream(daemon.url, started, resume)) for _ in range(STREAMS)]
    for _ in running:
        await started.get()
    counts = [num_connections(each) for each in front_ends(daemon)]
    loads = [(await get(daemon.url, "/load")).json() for _ in range(2 * NUMBER)]
    resume.set()
    return counts, loads, await asyncio.gather(*running)


def test_connections_are_balanced_and_metrics_cover_all_front_ends(daemon: Daemon) -> None:
    before = counters(asyncio.run(get(daemon.url, "/metrics")).text)
    counts, loads, texts = asyncio.run(run_streams(daemon))
    assert sum(counts) == STREAMS
    # The balance depends on the load of the machine; test_fair_listener.py checks the rule itself.
    assert min(counts) >= 1
    assert max(counts) <= 2 * STREAMS / NUMBER
    # Streams end on the server's side even if they are not read.
    assert all(each["server_load"] <= STREAMS for each in loads)
    assert any(each["server_load"] > max(counts) for each in loads)
    assert all(text.endswith("data: [DONE]") for text in texts)
    generated = [name for name in before if name[0] == "vllm:generation_tokens_total"]
    for _ in range(2 * NUMBER):
        now = counters(asyncio.run(get(daemon.url, "/metrics")).text)
        assert [now[each] - before[each] for each in generated] == [STREAMS * 120]


async def responses_by_client(daemon: Daemon) -> None:
    """As many clients as make every front end serve some: each finds what another has got."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=daemon.url, timeout=60))
            for _ in range(2 * NUMBER)
        ]

        async def ask_for(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
            body = {"input": "The sea is", "max_output_tokens": 4, "temperature": 0, **fields}
            response = await client.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        made = await asyncio.gather(*(ask_for(client) for client in clients))
        assert len({response["id"].split("_")[1] for response in made}) > 1
        for client, of_another in zip(clients, made[1:] + made[:1], strict=True):
            url = f"/v1/responses/{of_another['id']}"
            assert (await client.get(url)).json() == of_another
            following = await ask_for(client, previous_response_id=of_another["id"])
            assert following["usage"]["input_tokens"] > of_another["usage"]["input_tokens"]
            assert (await client.delete(url)).status_code == 200
        for client, response in zip(clients, made, strict=True):
            assert (await client.get(f"/v1/responses/{response['id']}")).status_code == 404


def test_a_response_is_found_through_every_front_end(daemon: Daemon) -> None:
    asyncio.run(responses_by_client(daemon))


def test_counters_never_decrease_when_a_front_end_dies(daemon: Daemon) -> None:
    before = counters(asyncio.run(get(daemon.url, "/metrics")).text)
    victim = front_ends(daemon)[1]
    victim.kill()
    psutil.wait_procs([victim], timeout=30)
    for _ in range(3 * NUMBER):  # before and after its replacement
        now = counters(asyncio.run(get(daemon.url, "/metrics")).text)
        assert {name for name, value in before.items() if now[name] < value} == set()
    assert eventually(
        lambda: pids_by_title(daemon.pid).get("tokend: api 1", victim.pid) != victim.pid
    )
    assert eventually(lambda: httpx.get(f"{daemon.url}/health").status_code == 200)
    now = counters(asyncio.run(get(daemon.url, "/metrics")).text)
    assert {name for name, value in before.items() if now[name] < value} == set()
