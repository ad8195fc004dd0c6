"""Measure how soon the requests of an engine or worker that is killed continue.

A stream decodes at engine 0, whose engine process or worker gets SIGKILL. It continues at a new
process, at a standby process, or, of two engines, at the other one, which idles or decodes a stream
of its own. Times in milliseconds after the signal, from the traces and the client's clock:

    arrival    the engine that continues has the request; not after the death of its own worker
    step       it begins the first step with it
    token      longest pause of the stream
    prompt     beside it: a new prompt of as many tokens, outputs included
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one
from deploy.bench.processes import pids_by_title
from deploy.bench.servers import StartedServer, tokend
from deploy.trace.command import lines_of
from proto.messages.sched_trace import Arrival, Event, Step, TraceHeader
from tests.benchmarks.command import run
from tests.chaos.streams import Stream

_VICTIMS: Final = ("engine", "worker")
_OTHERS: Final = {
    "new": "a new process",
    "standby": "a standby process",
    "idles": "another engine, which idles",
    "decodes": "another engine, which decodes",
}
"""What continues; an engine of two is `idles` or `decodes`."""
_STANDBY: Final = ("--standby-engines", "1", "--standby-workers", "1")
_TWO: Final = ("--data-parallel-size", "2")
_COLUMNS: Final = ("arrival", "step", "token", "prompt")
_TIMEOUT: Final = 120.0


@dataclass
class Kill:
    """A kill and what followed. moment: Unix time; the rest in milliseconds after it.

    other: one of _OTHERS. arrival: NaN if no engine has got the request again.
    """

    victim: str
    other: str
    moment: float
    token: float
    prompt: float
    arrival: float = math.nan
    step: float = math.nan


def body(rng: random.Random, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return a request of a prompt that no other request has."""
    return {
        "prompt": [rng.randrange(1000, 20000) for _ in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def client_of(url: str, engine: int) -> httpx.AsyncClient:
    """Return a client whose requests are computed by one engine."""
    headers = {"X-data-parallel-rank": str(engine)}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT)


async def wait_until_complete(client: httpx.AsyncClient) -> None:
    """Wait until no engine is missing, and all standby processes are ready."""
    while True:
        ready = (await client.get("/health/ready")).json()
        is_complete = ready["ready"] and not ready.get("missing_engines")
        if is_complete and all(ready.get("standby", {}).values()):
            return
        await asyncio.sleep(0.05)


async def kill(
    server: StartedServer, victim: str, other: str, options: argparse.Namespace, rng: random.Random
) -> Kill:
    """Kill a process of engine 0 amid a stream, and return what the client saw."""
    done, left = options.output_tokens, 16
    last = 1 if other in ("idles", "decodes") else 0
    async with client_of(server.url, 0) as first, client_of(server.url, last) as second:
        await wait_until_complete(second)
        beside = Stream(body(rng, 64, 4096))
        running = None
        if other == "decodes":
            running = asyncio.create_task(beside.run(second))
            await beside.reach(8)
        moved = Stream(body(rng, options.prompt_tokens, done + left))
        stream = asyncio.create_task(moved.run(first))
        await moved.reach(done)
        pid = pids_by_title(server.pid)[f"tokend: {victim} 0"]
        moment, since = time.time(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await stream
        if running is not None:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        await wait_until_complete(second)
        alone = Stream(body(rng, options.prompt_tokens + done, 1))
        begin = time.monotonic()
        await alone.run(second)
    token, prompt = moved.longest_pause(since), alone.arrivals[0] - begin
    return Kill(victim, other, moment, 1e3 * token, 1e3 * prompt)


def add_engine_times(kills: Sequence[Kill], traces: Iterable[Path]) -> None:
    """Set `arrival` and `step` from the traces of the engines that continued the requests."""
    paths = list(traces)
    moved = sorted(pair for trace in paths for pair in takeovers(trace))
    first = sorted(step for trace in paths for step in first_steps(trace))
    for each in kills:
        if each.victim == "worker" and each.other in ("new", "standby"):
            step = next(step for step in first if step >= each.moment)
        else:
            arrival, step = next(pair for pair in moved if pair[0] >= each.moment)
            each.arrival = 1e3 * (arrival - each.moment)
        each.step = 1e3 * (step - each.moment)


def first_steps(trace: Path) -> list[float]:
    """Return Unix times of the first step that computes a token after each restart of workers."""
    started_at, restarted, found = 0.0, False, list[float]()
    for line in lines_of(trace):
        if isinstance(line, TraceHeader):
            started_at = line.started_at
        elif isinstance(line, Event) and line.what == "restart":
            restarted = True
        elif isinstance(line, Step) and restarted and line.decision.num_tokens:
            found.append(started_at + line.time_us / 1e6)
            restarted = False
    return found


def takeovers(trace: Path) -> list[tuple[float, float]]:
    """Return Unix times of the arrival and the first step of each request with outputs."""
    started_at, arrived, found = 0.0, dict[int, float](), list[tuple[float, float]]()
    for line in lines_of(trace):
        now = started_at + line.time_us / 1e6
        if isinstance(line, TraceHeader):
            started_at = line.started_at
        elif isinstance(line, Arrival) and line.num_output_tokens:
            arrived[line.seq_id] = now
        elif isinstance(line, Step):
            moved = arrived.keys() & set(line.decision.new)
            found += [(arrived.pop(seq_id), now) for seq_id in sorted(moved)]
    return found


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options, rng = _parse(words), random.Random(1)
    kills = [
        *measure(options, rng, (), ("new",)),
        *measure(options, rng, _STANDBY, ("standby",)),
        *measure(options, rng, _TWO, ("idles", "decodes")),
    ]
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(each) for each in kills], indent=2) + "\n")
    _show(kills)


def measure(
    options: argparse.Namespace, rng: random.Random, flags: Sequence[str], others: Sequence[str]
) -> list[Kill]:
    """Return the kills of one daemon. flags: of `tokend serve`. others: of _OTHERS, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        trace = ("--sched-trace", str(Path(folder, "run.jsonl")))
        with StartedServer(tokend("tokend", [*options.serve_flags, *flags, *trace])) as server:
            kills = [
                asyncio.run(kill(server, victim, other, options, rng))
                for _ in range(options.rounds)
                for victim in _VICTIMS
                for other in others
            ]
        add_engine_times(kills, Path(folder).glob("run*.jsonl"))
    return kills


def _show(kills: Sequence[Kill]) -> None:
    table = Table(title="Milliseconds after SIGKILL: median (longest)")
    for column in ("of engine 0 dies", "continues at", "kills", *_COLUMNS):
        table.add_column(column, justify="right")
    for victim in _VICTIMS:
        for other, shown in _OTHERS.items():
            rows = [each for each in kills if (each.victim, each.other) == (victim, other)]
            cells = []
            for name in _COLUMNS:
                values = [getattr(row, name) for row in rows]
                known = f"{statistics.median(values):.0f} ({max(values):.0f})"
                cells.append("" if math.isnan(values[0]) else known)
            table.add_row(victim, shown, str(len(rows)), *cells)
    Console(width=100).print(table)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.takeover", description=__doc__)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=512, help="(512)")
    parser.add_argument(
        "--output-tokens", type=at_least_one, default=32, help="before the signal (32)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, help="of eight kills (5)")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("serve_flags", nargs="*", help="flags of tokend serve, after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
