"""The front-end benchmark: streams, figures, and a short complete run."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proto.errors import ConfigError, TokendError
from tests.benchmarks import frontend
from tests.benchmarks.command import run
from tests.benchmarks.frontend import (
    ENGINE,
    FRONT_END,
    Figures,
    Limits,
    Reading,
    Streams,
    Window,
    figures_of,
    limits,
    medians,
    prompts_of,
)
from tests.benchmarks.null_daemon import commands

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"text": "a"}\n\n'
PROMPTS = [[1], [2], [3]]

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def streams(answer: Answering, max_tokens: int = 9) -> AsyncIterator[Streams]:
    """Run streams against a server that answers every connection with `answer`."""
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = Streams(f"http://127.0.0.1:{port}", "m", PROMPTS, max_tokens)
    async with listening:
        yield client
        client.close()


async def test_events_split_at_any_byte_are_counted() -> None:
    writers: list[asyncio.StreamWriter] = []
    taken = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"prompt": [')
        writers.append(writer)
        writer.write(HEAD + EVENT)
        await taken.wait()
        writer.close()

    async with streams(answer) as client:
        await client.open(5)
        watching = asyncio.create_task(client.watch(0.3))
        await asyncio.sleep(0)
        for pieces in ([EVENT], [EVENT + EVENT], [EVENT[:-1], EVENT[-1:]]):
            for writer in writers:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        window = await watching
        taken.set()
    assert window.events == [4, 4, 4]
    assert len(window.gaps) == 9
    assert all(0 <= gap < 5 for gap in window.gaps)


async def open_and_watch(client: Streams) -> None:
    await client.open(5)
    await client.watch(0.1)


async def test_error_statuses_and_early_ends_are_errors() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Busy\r\n\r\nbusy")

    async with streams(refuse) as client:
        with pytest.raises(TokendError, match="503 Busy"):
            await client.open(5)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + EVENT)
        writer.close()

    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + EVENT + b"data: [DONE]\n\n\r\n0\r\n\r\n")

    for end in (hang_up, finish):
        async with streams(end) as client:
            with pytest.raises(TokendError, match="more --output-tokens"):
                await open_and_watch(client)


async def test_waiting_for_a_silent_server_times_out() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with streams(nothing) as client:
        with pytest.raises(TokendError, match="0 of 3 streams have begun: after"):
            await client.open(0.05)


def figures(api: float, engine: float, events: list[int]) -> Figures:
    """Return figures of ten seconds with 100 steps and 1,000 tokens, from seconds of CPU time."""
    before = Reading(5.0, {FRONT_END: 1.0, ENGINE: 2.0}, 500, 50, 400)
    after = Reading(15.0, {FRONT_END: 1.0 + api, ENGINE: 2.0 + engine, "new": 9.0}, 1500, 150, 1300)
    return figures_of(before, after, Window(events, [0.01, 0.02, 0.4]), 0.5)


def test_figures_cover_only_the_window() -> None:
    found = figures(0.03, 0.2, [400, 300, 300])
    assert found.tokens_per_s == pytest.approx(100)
    assert found.tokens_per_step == pytest.approx(10)
    assert found.tokens_per_event == pytest.approx(1000 / 900)
    assert found.cpu_ms == {FRONT_END: pytest.approx(30), ENGINE: pytest.approx(200)}
    assert found.engine_ms_per_step == pytest.approx(2)
    assert (found.gap_ms_p50, found.gap_ms_max) == (pytest.approx(20), pytest.approx(400))
    assert found.client_share == pytest.approx(0.05)
    assert found.least_share == 1


def test_limits_are_met_or_missed() -> None:
    events = [100, 100, 100]
    even, starved = figures(0.02, 0.1, events), figures(0.02, 0.1, [40, 100, 100])
    peer = figures(0.04, 0.1, events)
    assert [each.met for each in limits([even], [peer])] == [True] * 3
    assert [each.met for each in limits([even], [])] == [True]
    # A single round with a starving stream misses the limit.
    assert [each.met for each in limits([even, starved], [peer, peer])] == [False, True, True]
    dear = figures(0.021, 0.11, events)
    assert [each.met for each in limits([dear], [peer])] == [True, False, False]
    assert medians([even, dear, dear]).cpu_ms[FRONT_END] == pytest.approx(21)


def test_server_limits_allow_all_streams() -> None:
    flags = Limits(num_streams=1000, tokens_each=33, step_seconds=0.0).flags()
    given = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    assert given["--max-num-seqs"] == 1000
    assert given["--num-gpu-blocks-override"] * given["--block-size"] > 1000 * 33
    assert given["--max-num-batched-tokens"] >= 1000


def test_prompts_share_no_prefix() -> None:
    prompts = prompts_of(50, 4)
    assert {len(each) for each in prompts} == {4}
    assert len({each[0] for each in prompts}) == 50


def test_the_step_time_is_passed_to_the_worker_and_flags_to_the_daemon() -> None:
    processes, flags = commands(["--step-ms", "20", "--port", "0", "--max-num-seqs", "3"])
    assert list(processes["worker"])[-2:] == ["--step-ms", "20.0"]
    assert flags == ["--port", "0", "--max-num-seqs", "3"]
    assert list(commands([])[0]["worker"])[-1] == "0.0"


def test_incomplete_peer_flags_are_refused() -> None:
    assert run(frontend.main, ["--peer-python", "x"]) == 2
    with pytest.raises(ConfigError, match="step-ms"):
        commands(["--step-ms", "-1"])


def test_a_run_against_the_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = ["--streams", "8", "--step-ms", "10", "--seconds", "1", "--rounds", "1"]
    run(frontend.main, [*words, "--json", str(file)])
    found = json.loads(file.read_text())["medians"]["tokend"]
    assert found["streams"] == 8
    assert 7 < found["tokens_per_step"] <= 8
    assert found["tokens_per_event"] == pytest.approx(1, abs=0.2)
    assert found["gap_ms_p50"] > 9
    assert found["cpu_ms"][FRONT_END] > 0
    assert "tokens an event" in capsys.readouterr().out
