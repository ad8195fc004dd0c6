"""KV on disk and in a Redis store, through real daemons: the same greedy tokens in float32.

Stored blocks are loaded by the next daemon and by one beside it; a failing disk or store costs time
and changes no token.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from proto.runtime.redis_client import RedisConnection
from proto.settings.kv_media import HEADER_BYTES, parse_file_name
from proto.settings.kv_transfer_config import remote_address, remote_settings
from tests.e2e.daemon import Daemon, eventually
from tests.e2e.prompts import source_text
from tests.fakes import gated_disk
from tests.fakes.kv_media import RedisServer, needs_redis, redis_server

pytestmark = pytest.mark.suite("media")

REPOSITORY = Path(__file__).parents[2]
NUM_PROMPTS = 3
LIMIT_SECONDS = 300.0
FAILURES, LOADS = "tokend:kv_offload_failures_total", "vllm:kv_offload_load_size_count"
STORED = "vllm:kv_offload_store_bytes_total"

Tokens = list[list[int]]


def offloading(**extra: object) -> dict[str, object]:
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def on_disk(folder: Path, **extra: object) -> dict[str, object]:
    keys = {"disk_path": str(folder), "disk_bytes_to_use": 1 << 30}
    return offloading(**{"spec_name": "DiskOffloadingSpec", **keys, **extra})


def remote(server: RedisServer, **extra: object) -> dict[str, object]:
    return offloading(spec_name="RemoteOffloadingSpec", remote_url=server.url, **extra)


def start_daemon(
    connector: dict[str, object], num_workers: int = 1, model: str | None = None
) -> Daemon:
    """A daemon whose device pool holds one and a half prompts; can import modules of the tests."""
    return Daemon(
        *([] if model is None else [model]),
        "--dtype",
        "float32",
        "--num-gpu-blocks-override",
        "120",
        "--tensor-parallel-size",
        str(num_workers),
        "--kv-transfer-config",
        json.dumps(connector),
        environment={"PYTHONPATH": str(REPOSITORY)},
    )


def body(number: int) -> dict[str, object]:
    return {
        "prompt": source_text()[3000 * number : 3000 * number + 4000],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def generate_at_once(running: Daemon) -> Tokens:
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS) as client:
        url = f"{running.url}/v1/completions"
        posts = [client.post(url, json=body(each)) for each in range(NUM_PROMPTS)]
        return [each.json()["choices"][0]["token_ids"] for each in await asyncio.gather(*posts)]


def generate(running: Daemon) -> Tokens:
    """Complete the prompts one after the other."""
    tokens = []
    for number in range(NUM_PROMPTS):
        url = f"{running.url}/v1/completions"
        response = httpx.post(url, json=body(number), timeout=LIMIT_SECONDS)
        assert response.status_code == 200, response.text
        tokens.append(response.json()["choices"][0]["token_ids"])
    return tokens


def block_files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and parse_file_name(each.name)]


def holds_no_blocks(running: Daemon) -> bool:
    return running.metric("vllm:kv_cache_usage_perc") == 0


@pytest.fixture(scope="module")
def expected() -> Tokens:
    """Tokens without a connector."""
    with Daemon("--dtype", "float32") as plain:
        return generate(plain)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, expected: Tokens) -> Path:
    """The folder that a daemon has stored its blocks in."""
    folder = tmp_path_factory.mktemp("disk") / "kv"
    with start_daemon(on_disk(folder)) as first:
        assert generate(first) == expected
        assert first.metric(FAILURES) == 0
        assert eventually(lambda: first.metric(STORED) > 0)
    assert block_files(folder)
    return folder


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of the stored blocks that may be damaged."""
    for path in block_files(stored):
        target = tmp_path / "kv" / path.relative_to(stored)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    return tmp_path / "kv"


def test_a_restarted_daemon_loads_from_its_disk(stored: Path, expected: Tokens) -> None:
    with start_daemon(on_disk(stored)) as second:
        assert generate(second) == expected
        assert second.metric(LOADS) >= NUM_PROMPTS
        assert second.metric(FAILURES) == 0
        assert eventually(lambda: holds_no_blocks(second))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 1000] ^= 1
    path.unlink()  # the copy is a hard link
    path.write_bytes(content)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


def replace_with_fifo(path: Path) -> None:
    """Opening the file blocks for ever, as on an unreachable network file system."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [flip_bit, truncate, replace_with_fifo, os.unlink])
def test_a_damaged_disk_changes_no_token(
    copy: Path, expected: Tokens, damage: Callable[[Path], None]
) -> None:
    """Damage every other file after the daemon has indexed them."""
    with start_daemon(on_disk(copy, load_timeout=0.5)) as running:
        for path in sorted(block_files(copy))[::2]:
            damage(path)
        assert generate(running) == expected
        assert eventually(lambda: holds_no_blocks(running))
        assert generate(running) == expected
    assert "Traceback" not in running.text


def slow_disk(folder: Path, gates: Path, **extra: object) -> dict[str, object]:
    gates.mkdir()
    return on_disk(
        folder,
        spec_name="GatedDisk",
        spec_module_path=gated_disk.__name__,
        gates=str(gates),
        bytes_per_second=1_000_000,
        **extra,
    )


def test_stores_to_a_slow_disk_delay_no_request(
    stored: Path, tmp_path: Path, expected: Tokens
) -> None:
    """All outputs are complete before most blocks are stored; the rest is cancelled."""
    wanted = sum(each.stat().st_size for each in block_files(stored))
    with start_daemon(slow_disk(tmp_path / "kv", tmp_path / "gates", store_timeout=1.0)) as running:
        assert generate(running) == expected
        assert running.metric(STORED) < wanted / 2
        assert generate(running) == expected
        assert eventually(lambda: holds_no_blocks(running))
        assert running.metric(STORED) < wanted
    assert "Traceback" not in running.text
    assert {each.stat().st_size for each in block_files(tmp_path / "kv")} <= {
        each.stat().st_size for each in block_files(stored)
    }


def test_loads_from_a_slow_disk_time_out_and_are_recomputed(
    copy: Path, tmp_path: Path, expected: Tokens
) -> None:
    """Blocks not loaded by the timeout are recomputed, and the disk is paused."""
    with start_daemon(slow_disk(copy, tmp_path / "gates", load_timeout=0.3)) as running:
        assert generate(running) == expected
        assert running.metric(FAILURES) > 0
        assert running.metric(LOADS) == 0
        assert eventually(lambda: holds_no_blocks(running))


@pytest.mark.parametrize("lost", ["disk", "shared"])
def test_multi_connector_stores_to_disk_and_folder_and_loads_from_the_remaining_one(
    tmp_path: Path, expected: Tokens, lost: str
) -> None:
    """The first connector with a hit loads; without its files it is the second."""
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    files = {"kv_connector": "SharedStorageConnector"}
    files_extra = {"kv_connector_extra_config": {"shared_storage_path": str(shared)}}
    stacked = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [on_disk(disk), {**files, **files_extra}]},
    }
    with start_daemon(stacked) as first:
        assert generate(first) == expected
        assert eventually(lambda: first.metric(STORED) > 0)
        assert eventually(lambda: holds_no_blocks(first))
    assert block_files(disk)
    assert list(shared.rglob("*-of-1"))
    for each in block_files(disk) if lost == "disk" else shared.rglob("*-of-1"):
        each.unlink()
    with start_daemon(stacked) as second:
        assert generate(second) == expected
        assert second.metric("vllm:external_prefix_cache_hits_total") > 0
        assert (second.metric(LOADS) > 0) is (lost == "shared")
        assert second.metric(FAILURES) == 0
        assert eventually(lambda: holds_no_blocks(second))


def test_two_workers_share_a_disk(tmp_path: Path, expected: Tokens) -> None:
    for _ in range(2):
        with start_daemon(on_disk(tmp_path / "kv"), num_workers=2) as running:
            assert generate(running) == expected
            assert running.metric(FAILURES) == 0
            loads = running.metric(LOADS)
    assert loads >= NUM_PROMPTS


def test_a_folder_that_can_no_longer_be_written_changes_no_token(
    tmp_path: Path, expected: Tokens
) -> None:
    folder = tmp_path / "kv"
    with start_daemon(on_disk(folder)) as running:
        shutil.rmtree(folder)
        folder.write_text("no folder")
        assert generate(running) == expected
        assert running.metric(STORED) == 0


@pytest.mark.parametrize("victim", ["worker", "engine_core"])
async def test_a_death_during_copies_leaves_no_truncated_file(
    copy: Path, expected: Tokens, victim: str
) -> None:
    size = block_files(copy)[0].stat().st_size
    with start_daemon(on_disk(copy)) as running:
        for path in sorted(block_files(copy))[1::2]:
            path.unlink()  # so that blocks are stored again, too
        for num_answers in range(2):
            answers = asyncio.create_task(generate_at_once(running))
            await asyncio.to_thread(
                eventually, lambda: running.metric("vllm:num_requests_running") > 0
            )
            os.kill(running.processes()[victim].pid, signal.SIGKILL)
            assert await answers == expected, f"after death {num_answers}"
        assert generate(running) == expected
        assert eventually(lambda: holds_no_blocks(running))
    assert {each.stat().st_size for each in block_files(copy)} == {size}


@pytest.mark.parametrize("direction", [gated_disk.LOAD, gated_disk.STORE])
async def test_a_worker_that_dies_during_a_copy_loses_no_token(
    tmp_path: Path, expected: Tokens, direction: str
) -> None:
    """The copy is in progress for certain: it waits at a gate when its process is killed."""
    gates, folder = tmp_path / "gates", tmp_path / "kv"
    gates.mkdir()
    connector = on_disk(
        folder,
        spec_name="GatedDisk",
        spec_module_path=gated_disk.__name__,
        gates=str(gates),
        load_timeout=LIMIT_SECONDS,
        store_timeout=LIMIT_SECONDS,
    )
    with start_daemon(connector) as running:
        if direction == gated_disk.LOAD:
            assert generate(running) == expected
            assert eventually(lambda: holds_no_blocks(running))
        gated_disk.close_gate(gates, direction)
        answers = asyncio.create_task(generate_at_once(running))
        assert await asyncio.to_thread(eventually, lambda: gated_disk.waiting(gates, direction))
        worker = running.processes()["worker"]
        assert gated_disk.waiting(gates, direction) == [worker.pid]
        os.kill(worker.pid, signal.SIGKILL)
        (gates / direction).unlink()
        assert await answers == expected
        assert generate(running) == expected
        assert running.metric(LOADS) > 0, "the next worker loads what the disk has"
        assert eventually(lambda: holds_no_blocks(running))
    sizes = {each.stat().st_size for each in block_files(folder)}
    assert len(sizes) == 1, "a truncated file has the name of a block"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@needs_redis
def test_daemons_share_prefixes_through_a_store(server: RedisServer, expected: Tokens) -> None:
    with start_daemon(remote(server)) as first:
        assert generate(first) == expected
        assert eventually(lambda: first.metric(STORED) > 0)
        with start_daemon(remote(server)) as second:
            assert generate(second) == expected
            assert second.metric(LOADS) >= NUM_PROMPTS
            assert second.metric(FAILURES) == 0


@needs_redis
def test_a_store_that_stops_and_restarts_changes_no_token(
    server: RedisServer, expected: Tokens
) -> None:
    with start_daemon(remote(server, remote_timeout=0.3, remote_retry_seconds=0.3)) as running:
        assert generate(running) == expected
        server.stop()
        assert generate(running) == expected
        assert eventually(lambda: holds_no_blocks(running))
        server.go_on()
        server.kill()
        assert generate(running) == expected
        server.start()

        def stores_again() -> bool:
            before = running.metric(STORED)
            assert generate(running) == expected
            return running.metric(STORED) > before

        assert eventually(stores_again, seconds=60.0)
        loads = running.metric(LOADS)
        assert eventually(
            lambda: generate(running) == expected and running.metric(LOADS) > loads, seconds=60.0
        )
    assert "Traceback" not in running.text


@needs_redis
def test_a_store_with_corrupted_values_changes_no_token(
    server: RedisServer, expected: Tokens
) -> None:
    with start_daemon(remote(server)) as running:
        assert generate(running) == expected
        address = remote_address(remote_settings({"remote_url": server.url}))
        connection = RedisConnection(address, 5.0)
        names = connection.call(5.0, b"KEYS", b"*")
        assert isinstance(names, list)
        for name in names:
            assert isinstance(name, bytes)
            connection.call(5.0, b"SETRANGE", name, b"%d" % (HEADER_BYTES + 99), b"xyz")
        assert generate(running) == expected
        assert eventually(lambda: holds_no_blocks(running))
