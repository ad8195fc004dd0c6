"""A real daemon is reloaded while it streams: no stream is lost, and new files are used.

The old worker is suspended during a reload, so that its streams cannot have ended.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from deploy.bench.processes import pids_by_title
from tests.chaos.streams import Stream, assert_same, requests, run_undisturbed
from tests.e2e.daemon import TOKEND, Daemon, eventually
from tests.e2e.own_models import PROMPT, greedy, save_qwen3
from tests.e2e.reference import Reference
from tests.e2e.session_client import FIELDS, TEXTS, merged, opened, send, turn

pytestmark = pytest.mark.suite("settings")

BODIES = requests()[3:7]
"""Greedy and seeded, with a prefix that some share."""
SMALL = ("--dtype", "float32", "--kv-cache-memory", "256M")
TWO_ENGINES = ("--data-parallel-size", "2", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(*SMALL, "--reload-strategy", "side-by-side") as running:
        yield running


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> list[Stream]:
    return asyncio.run(run_undisturbed(daemon.url, BODIES))


async def printed(daemon: Daemon, text: str, times: int) -> None:
    async with asyncio.timeout(60):
        while daemon.text.count(text) < times:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def suspended_streams(
    client: httpx.AsyncClient, worker: psutil.Process
) -> AsyncIterator[list[Stream]]:
    """Start streams that are suspended until the end of the block; then they must end."""
    streams = [Stream(body) for body in BODIES]
    running = [asyncio.create_task(each.run(client)) for each in streams]
    await asyncio.gather(*(each.reach(3) for each in streams))
    worker.suspend()
    assert not any(each.done() for each in running)
    yield streams
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.resume()
    await asyncio.gather(*running)


def child_configs(daemon: Daemon) -> set[int]:
    """The configurations of all child processes, with as many workers as configured."""
    return {each.pid for each in psutil.Process(daemon.process.pid).children()}


def is_reloaded(daemon: Daemon, front_end: psutil.Process, old: set[int]) -> bool:
    """The front end is unchanged, all other processes are new and as many as before."""
    children = child_configs(daemon)
    return len(children) == len(old) and children & old == {front_end.pid}


@pytest.mark.parametrize("dies", [False, True])
def test_reload_side_by_side_keeps_streams(
    daemon: Daemon, expected: list[Stream], dies: bool
) -> None:
    """New requests are served while the old worker is suspended; its streams continue there or, if
    the old engine dies, on the new engine.
    """

    async def reload() -> list[Stream]:
        times = daemon.text.count("tokend reloaded after")
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
            async with suspended_streams(client, before["worker"]) as streams:
                daemon.process.send_signal(signal.SIGHUP)
                await printed(daemon, "tokend reloaded after", times + 1)
                late = await Stream(BODIES[0]).run(client)
                assert_same(expected[0], late)
                if dies:
                    before["engine_core"].kill()
            return streams

    before, old = daemon.processes(), child_configs(daemon)
    for was, now in zip(expected, asyncio.run(reload()), strict=True):
        assert_same(was, now)
    assert eventually(lambda: is_reloaded(daemon, before["api_server"], old))
    assert "it is restarted" not in daemon.text
    assert eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0


def test_a_session_goes_on_at_the_engine_that_has_it(daemon: Daemon, reference: Reference) -> None:
    """Its next turn, too, after a reload side by side; the old processes end with it."""
    chunks = [list(reference.tokenizer.encode(text)) for text in TEXTS]

    async def reload() -> list[tuple[list[int], list[int]]]:
        times = daemon.text.count("tokend reloaded after")
        async with opened(daemon) as client:
            await send(client, "input", prompt=chunks[0], **FIELDS)
            turns = [await turn(client)]
            daemon.process.send_signal(signal.SIGHUP)
            await printed(daemon, "tokend reloaded after", times + 1)
            await send(client, "input", prompt=chunks[1])
            turns.append(await turn(client))
            assert len(child_configs(daemon)) > len(old), "the old processes serve the session"
            await send(client, "end")
        return turns

    before, old = daemon.processes(), child_configs(daemon)
    turns = asyncio.run(reload())
    assert [prompt for prompt, _ in turns] == merged(chunks[:2], [output for _, output in turns])
    reference.assert_greedy(turns)
    assert eventually(lambda: is_reloaded(daemon, before["api_server"], old))


def test_reload_in_place_keeps_streams(expected: list[Stream]) -> None:
    """Running and new requests wait in the front end."""

    async def reload() -> list[Stream]:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
            async with suspended_streams(client, before["worker"]) as streams:
                daemon.process.send_signal(signal.SIGHUP)
                await printed(daemon, "is replaced by another one", 1)
                late = asyncio.create_task(Stream(BODIES[0]).run(client))
            await printed(daemon, "tokend reloaded after", 1)
            return [*streams, await late]

    with Daemon(*SMALL, "--reload-strategy", "in-place") as daemon:
        before, old = daemon.processes(), child_configs(daemon)
        for was, now in zip([*expected, expected[0]], asyncio.run(reload()), strict=True):
            assert_same(was, now)
        assert eventually(lambda: is_reloaded(daemon, before["api_server"], old))
        assert "it is restarted" not in daemon.text


def reload_command(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*TOKEND, "reload", *words, "--pid", str(daemon.process.pid)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(daemon.runtime_dir)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("strategy", ["side-by-side", "in-place"])
def test_reload_switches_to_another_model(
    strategy: str, expected: list[Stream], tmp_path: Path
) -> None:
    """Streams finish on the old model; in place, new requests are refused until they have.

    A model that cannot be served changes nothing. A later reload stays at the new model.
    """
    model = save_qwen3(tmp_path / "mine")
    (tmp_path / "broken").mkdir()

    def names() -> list[str]:
        served = httpx.get(f"{daemon.url}/v1/models").json()["data"]
        return [each["id"] for each in served]

    async def switch() -> list[Stream]:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120) as client:
            async with suspended_streams(client, daemon.processes()["worker"]) as streams:
                command = asyncio.create_task(
                    asyncio.to_thread(reload_command, daemon, str(tmp_path / "mine"))
                )
                if strategy == "in-place":
                    async with asyncio.timeout(60):
                        while (await client.get("/health/ready")).status_code == 200:
                            await asyncio.sleep(0.02)
                    refused = await client.post("/v1/completions", json=BODIES[0])
                    assert refused.status_code == 503
                    assert "another model is being loaded" in refused.text
                else:
                    done = await command
                    assert names() == ["mine"]
            done = await command
            assert done.stdout == "reloaded: the model is mine now\n", done.stderr
            return streams

    with Daemon(*SMALL, "--reload-strategy", strategy) as daemon:
        for broken in (str(tmp_path / "broken"), "no-such-model"):
            failed = reload_command(daemon, broken)
            assert failed.returncode == 1
            assert "nothing has changed: " in failed.stderr
            assert names() == ["smollm2-135m-instruct"]
        for was, now in zip(expected, asyncio.run(switch()), strict=True):
            assert_same(was, now)
        Reference(model, None).assert_greedy([(PROMPT, greedy(daemon, PROMPT, 12))])
        again = reload_command(daemon)
        assert (again.returncode, again.stdout) == (0, "reloaded\n"), again.stderr
        assert names() == ["mine"]
        Reference(model, None).assert_greedy([(PROMPT, greedy(daemon, PROMPT, 12))])
        assert "it is restarted" not in daemon.text


def at_engine_1(daemon: Daemon) -> httpx.AsyncClient:
    headers = {"X-data-parallel-rank": "1"}
    return httpx.AsyncClient(base_url=daemon.url, timeout=120, headers=headers)


def are_reloaded(daemon: Daemon, before: dict[str, int]) -> bool:
    """The front end is unchanged; engines and workers are new and as many as before."""
    after = pids_by_title(daemon.pid)
    titles = [f"tokend: {role} {index}" for role in ("engine", "worker") for index in range(2)]
    new = [title for title in titles if before[title] != after.get(title, before[title])]
    is_kept = before["tokend: api 0"] == after["tokend: api 0"]
    return is_kept and new == titles and len(daemon.process_ids()) == 5


@pytest.mark.parametrize("how", ["drains", "dies", "in-place"])
def test_several_engines_are_reloaded_while_they_stream(how: str, expected: list[Stream]) -> None:
    """The streams of a suspended engine stay there, or continue at another one with equal tokens:
    if it dies, and if it ends because the reload is in place.
    """

    async def reload() -> list[Stream]:
        worker = psutil.Process(before["tokend: worker 1"])
        async with at_engine_1(daemon) as client:
            async with suspended_streams(client, worker) as streams:
                daemon.process.send_signal(signal.SIGHUP)
                await printed(daemon, "tokend reloaded after", 1)
                late = await Stream(BODIES[0]).run(client)
                if how == "dies":
                    psutil.Process(before["tokend: engine 1"]).kill()
            return [*streams, late]

    strategy = "in-place" if how == "in-place" else "side-by-side"
    with Daemon(*SMALL, *TWO_ENGINES, "--reload-strategy", strategy) as daemon:
        before = pids_by_title(daemon.pid)
        for was, now in zip([*expected, expected[0]], asyncio.run(reload()), strict=True):
            assert_same(was, now)
        assert eventually(lambda: are_reloaded(daemon, before))
        assert "it is restarted" not in daemon.text
        assert eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
        assert httpx.get(f"{daemon.url}/health/ready").json()["missing_engines"] == {}


@pytest.mark.parametrize("strategy", ["side-by-side", "in-place"])
def test_several_engines_switch_to_another_model(
    strategy: str, expected: list[Stream], tmp_path: Path
) -> None:
    """New requests are answered by the new model alone, while streams finish on the old one."""
    model = save_qwen3(tmp_path / "mine")

    async def served_name(client: httpx.AsyncClient) -> str:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])

    async def switch() -> list[Stream]:
        worker = psutil.Process(before["tokend: worker 1"])
        async with at_engine_1(daemon) as client, asyncio.timeout(120):
            async with suspended_streams(client, worker) as streams:
                command = asyncio.create_task(
                    asyncio.to_thread(reload_command, daemon, str(tmp_path / "mine"))
                )
                while await served_name(client) != "mine":
                    await asyncio.sleep(0.02)
                answers = [await asyncio.to_thread(greedy, daemon, PROMPT, 12) for _ in range(3)]
                reference.assert_greedy([(PROMPT, answer) for answer in answers])
                assert not command.done(), "engine 1 still has streams of the old model"
            done = await command
            assert done.stdout == "reloaded: the model is mine now\n", done.stderr
            return streams

    reference = Reference(model, None)
    with Daemon(*SMALL, *TWO_ENGINES, "--reload-strategy", strategy) as daemon:
        before = pids_by_title(daemon.pid)
        for was, now in zip(expected, asyncio.run(switch()), strict=True):
            assert_same(was, now)
        reference.assert_greedy([(PROMPT, greedy(daemon, PROMPT, 12, each)) for each in range(2)])
        assert eventually(lambda: are_reloaded(daemon, before))
        assert "it is restarted" not in daemon.text


@pytest.mark.parametrize("flags", [(), TWO_ENGINES])
def test_reload_uses_changed_files(flags: tuple[str, ...], tmp_path: Path) -> None:
    """A broken folder changes nothing; other weights and another tokenizer are used."""

    def reload() -> subprocess.CompletedProcess[str]:
        return reload_command(daemon)

    def answers() -> list[tuple[list[int], list[int]]]:
        return [(PROMPT, greedy(daemon, PROMPT, 12, each)) for each in range(2 if flags else 1)]

    folder = tmp_path / "mine"
    model = save_qwen3(folder)
    before = Reference(model, None)
    with Daemon(str(folder), *SMALL, *flags) as daemon:
        pids = daemon.process_ids()
        config = (folder / "config.json").read_text()
        for text in ("{", config.replace("Qwen3ForCausalLM", "AnotherForCausalLM")):
            (folder / "config.json").write_text(text)
            done = reload()
            assert done.returncode == 1
            assert "the reload failed, nothing has changed: " in done.stderr
            assert "Traceback" not in done.stderr
            before.assert_greedy(answers())
        assert daemon.process_ids() == pids
        (folder / "config.json").write_text(config)
        torch.manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight) * 0.05)
        model.save_pretrained(folder)
        done = reload()
        assert (done.returncode, done.stdout) == (0, "reloaded\n"), done.stderr
        Reference(model, None).assert_greedy(answers())
