"""Two engines behind one front end: each answers alike, dies alone, and shares what is stored."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq

from deploy.bench.processes import pids_by_title
from proto.codec import MessageDecoder
from proto.messages.kv_events import BlockStored, KVEventBatch
from tests.chaos.streams import NUM_TOKENS, Stream, requests
from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("settings")

ENGINES = ("--data-parallel-size", "2", "--cpu-threads", "1", "--dtype", "float32")
PROMPT = "A long sentence about the sea that has more tokens than a block of the cache has. " * 4
LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*ENGINES) as running:
        yield running


def at_engine(daemon: Daemon, engine: int) -> dict[str, Any]:
    return {
        "base_url": daemon.url,
        "headers": {"X-data-parallel-rank": str(engine)},
        "timeout": LIMIT_SECONDS,
    }


async def run_at_engine(daemon: Daemon, engine: int) -> list[Stream]:
    async with httpx.AsyncClient(**at_engine(daemon, engine)) as client:
        return await asyncio.gather(*(Stream(body).run(client) for body in requests()))


def test_engines_give_equal_answers(daemon: Daemon) -> None:
    first, second = (asyncio.run(run_at_engine(daemon, engine)) for engine in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(len(tokens) == NUM_TOKENS for tokens in one.choices.values())
        assert other.choices == one.choices, one.body
        assert other.reasons == one.reasons


@pytest.mark.parametrize("title", ["tokend: engine 1", "tokend: worker 1"])
def test_a_process_of_one_engine_is_restarted_alone(daemon: Daemon, title: str) -> None:
    before = pids_by_title(daemon.pid)
    assert {f"tokend: {role} {index}" for role in ("engine", "worker") for index in (0, 1)} <= set(
        before
    )
    back = f"{title.removeprefix('tokend: ')} is back after"
    num_back = daemon.text.count(back)
    statuses = set()
    with httpx.Client(base_url=daemon.url, timeout=LIMIT_SECONDS) as client:
        assert client.get("/health/ready").status_code == 200
        psutil.Process(before[title]).kill()
        end = time.monotonic() + LIMIT_SECONDS
        while daemon.text.count(back) == num_back:
            assert time.monotonic() < end, daemon.text
            statuses.add(client.get("/health/ready").status_code)
            time.sleep(0.02)
    assert statuses == {200}, "engine 0 serves"
    after = pids_by_title(daemon.pid)
    assert {each for each in before if after.get(each) != before[each]} == {title}
    (stream, *_) = asyncio.run(run_at_engine(daemon, 1))
    assert stream.num_tokens == NUM_TOKENS


def test_engines_have_the_packed_weights_in_memory_once() -> None:
    """A worker that replaces a dead one finds them, too, and the last process frees them."""
    with Daemon("--data-parallel-size", "2", "--cpu-threads", "1") as daemon:
        assert re.search(r"weights +\S+ MiB .*, in memory that the engines share", daemon.text)
        found = "weights: another worker has laid them out"
        assert eventually(lambda: daemon.text.count(found) == 1), daemon.text
        workers = pids_by_title(daemon.pid)
        pids = [workers[f"tokend: worker {index}"] for index in range(2)]
        (inode,) = weights_inodes(*pids)
        first, second = (asyncio.run(run_at_engine(daemon, engine)) for engine in range(2))
        assert [each.choices for each in first] == [each.choices for each in second]
        psutil.Process(pids[0]).kill()
        assert eventually(lambda: "worker 0 is back after" in daemon.text, LIMIT_SECONDS)
        assert daemon.text.count(found) == 2
        pids[0] = pids_by_title(daemon.pid)["tokend: worker 0"]
        assert weights_inodes(*pids) == {inode}
        again = asyncio.run(run_at_engine(daemon, 0))
        assert [each.choices for each in again] == [each.choices for each in first]
        psutil.Process(daemon.pid).kill()
        assert eventually(lambda: not any(map(psutil.pid_exists, pids)), LIMIT_SECONDS)


def weights_inodes(*pids: int) -> set[str]:
    """Return what identifies the files of packed weights that each of these processes has mapped.

    All must have mapped the same.
    """
    found = []
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found.append({line.split()[4] for line in maps if "/memfd:tokend-weights" in line})
    assert all(found)
    assert all(each == found[0] for each in found)
    return found[0]


def test_an_engine_finds_at_its_start_what_another_one_has_stored(tmp_path: Path) -> None:
    config = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}

    def num_cached(answer: dict[str, Any]) -> int:
        details = answer["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    with Daemon(*ENGINES, "--kv-transfer-config", json.dumps(config)) as daemon:
        with httpx.Client(**at_engine(daemon, 0)) as client:
            first = client.post("/v1/completions", json=body).json()
        assert num_cached(first) == 0
        assert eventually(lambda: len(list((tmp_path / "kv").rglob("*.0-of-1"))) >= 3)
        psutil.Process(pids_by_title(daemon.pid)["tokend: engine 1"]).kill()
        assert eventually(lambda: "engine 1 is back after" in daemon.text, LIMIT_SECONDS)
        with httpx.Client(**at_engine(daemon, 1)) as client:
            second = client.post("/v1/completions", json=body).json()
        assert num_cached(second) >= 32
        assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_engines_publish_kv_events_apart() -> None:
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": "ipc"})
    with (
        Daemon(*ENGINES, "--kv-events-config", events) as daemon,
        zmq.Context() as context,
        httpx.Client(**at_engine(daemon, 1)) as client,
    ):
        sources = client.get("/kv_event_sources").json()
        assert sorted(sources) == ["0", "1"]
        sockets = []
        for engine in ("0", "1"):
            socket = context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(sources[engine]["endpoint"])
            sockets.append(socket)
        number = 0
        while not sockets[1].poll(200):  # a subscriber that connects late hears only later events
            assert number < 50
            body = {"prompt": f"{number} {PROMPT}", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
            number += 1
        batch = MessageDecoder(KVEventBatch).decode(sockets[1].recv_multipart()[2])
        assert batch.data_parallel_rank == 1
        assert any(isinstance(each, BlockStored) for each in batch.events)
        assert not sockets[0].poll(0), "engine 0 has stored nothing"
        for socket in sockets:
            socket.close(linger=0)
