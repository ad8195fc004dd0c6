"""Measure how a tenant with few requests is delayed by a tenant that floods the daemon.

Starts a daemon that identifies tenants by a header. The quiet tenant first sends one request after
another to the idle daemon, then again while the other tenant keeps several times --max-num-seqs
requests in flight. The limit is a median first token at most two steps later than on the idle
daemon; the exit status is 1 if it is missed or a request fails.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy.bench.limits import percentile
from deploy.bench.options import BenchParser, at_least_one, positive, writable, write
from deploy.bench.servers import MeasuredDaemon
from tests.benchmarks.arrivals import (
    Attempt,
    OverloadClients,
    PartResult,
    RequestShape,
    overload_clients,
)
from tests.benchmarks.command import run

STEPS_PROMISED: Final = 2
WARM_UP_REQUESTS: Final = 3
LOOK_SECONDS: Final = 0.5
PAUSE_SECONDS: Final = 0.3
"""Pause between requests of the quiet tenant."""


@dataclass(frozen=True)
class Verdict:
    """Seconds to the first token of the quiet tenant, and step times during the flood."""

    idle: list[float]
    flooded: list[float]
    steps: list[float]

    @property
    def delay(self) -> float:
        """Median delay in seconds caused by the flood."""
        return statistics.median(self.flooded) - statistics.median(self.idle)

    @property
    def limit(self) -> float:
        """Allowed delay in seconds: the time of two steps."""
        return STEPS_PROMISED * statistics.median(self.steps)

    def plain(self, flood: PartResult, num_failed: int) -> dict[str, object]:
        """Return the figures of the table for JSON."""
        times = {
            "quiet_idle_first_token": self.idle,
            "quiet_flooded_first_token": self.flooded,
            "flood_first_token": [each.first_token for each in flood.accepted],
            "step": self.steps,
        }
        found: dict[str, object] = {"command": "python -m tests.benchmarks.fairness"}
        for name, seconds in times.items():
            if seconds:
                found[f"{name}_ms_p50"] = 1e3 * percentile(seconds, 50)
                found[f"{name}_ms_p99"] = 1e3 * percentile(seconds, 99)
        return found | {
            "delay_ms": 1e3 * self.delay,
            "limit_ms": 1e3 * self.limit,
            "num_flood_requests": len(flood.attempts),
            "num_failed": num_failed,
        }

    def table(self, flood: PartResult) -> Table:
        table = Table(title=f"{len(flood.attempts)} requests of the flood, ms")
        table.add_column("figure")
        for column in ("median", "99th percentile"):
            table.add_column(column, justify="right")
        for name, seconds in (
            ("first token of the quiet tenant, idle", self.idle),
            ("first token of the quiet tenant, beside the flood", self.flooded),
            ("first token in the flood", [each.first_token for each in flood.accepted]),
            ("a step in the flood", self.steps),
        ):
            table.add_row(
                name,
                f"{1e3 * statistics.median(seconds):.0f}",
                f"{1e3 * statistics.quantiles(seconds, n=100)[98]:.0f}",
            )
        kept = "met" if self.delay <= self.limit else "MISSED"
        table.caption = (
            f"the flood costs {1e3 * self.delay:.0f} ms of the {1e3 * self.limit:.0f} "
            f"that {STEPS_PROMISED} steps take: {kept}"
        )
        return table


async def probe(quiet: OverloadClients, number: int) -> list[Attempt]:
    """Send requests of the quiet tenant, one after another."""
    attempts = []
    for _ in range(number):
        attempts.append(await quiet.send_request())
        await asyncio.sleep(PAUSE_SECONDS)
    return attempts


async def watch_steps(daemon: MeasuredDaemon, found: list[float]) -> None:
    """Append the mean step time of every short interval until cancelled."""
    last_steps, last_time = await asyncio.to_thread(daemon.num_steps), time.monotonic()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        steps, now = await asyncio.to_thread(daemon.num_steps), time.monotonic()
        if steps > last_steps:
            found.append((now - last_time) / (steps - last_steps))
        last_steps, last_time = steps, now


async def measure(
    daemon: MeasuredDaemon, options: argparse.Namespace
) -> tuple[Verdict, PartResult, list[Attempt]]:
    """Measure idle, then during the flood; return the verdict, the flood and the quiet requests."""
    async with AsyncExitStack() as stack:
        quiet, loud = [
            await stack.enter_async_context(
                overload_clients(daemon.url, recipe, seed, {"X-Tenant-ID": name})
            )
            for seed, (name, recipe) in enumerate(
                {
                    "quiet": RequestShape(options.quiet_tokens, 1),
                    "loud": RequestShape(options.flood_tokens),
                }.items()
            )
        ]
        await probe(quiet, WARM_UP_REQUESTS)
        idle = await probe(quiet, options.requests)
        seconds = options.requests * options.seconds_a_request
        flood = asyncio.create_task(loud.run_closed_loop(options.times * options.seats, seconds))
        steps: list[float] = []
        watch = asyncio.create_task(watch_steps(daemon, steps))
        while await asyncio.to_thread(daemon.metric, "vllm:num_requests_waiting") < options.seats:
            await asyncio.sleep(LOOK_SECONDS)
        flooded: list[Attempt] = []
        while not flood.done() and len(flooded) < options.requests:
            flooded += await probe(quiet, 1)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        verdict = Verdict(
            [each.first_token for each in idle if each.first_token],
            [each.first_token for each in flooded if each.first_token],
            steps,
        )
        return verdict, await flood, [*idle, *flooded]


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    options = _parse(words)
    console = Console(width=100)
    flags = ["--tenant-by", "header", "--max-num-seqs", str(options.seats)]
    with writable("--json", options.json) as files:
        with MeasuredDaemon([*flags, *options.serve_flags]) as daemon:
            verdict, flood, asked = asyncio.run(measure(daemon, options))
        console.print(verdict.table(flood))
        failed = [
            each for each in (*flood.failed, *asked) if each.error or each.status not in (200, 503)
        ]
        write(files, json.dumps(verdict.plain(flood, len(failed)), indent=2) + "\n")
    if failed:
        console.print(f"{len(failed)} failed, such as: {failed[0].status} {failed[0].error}")
    if failed or verdict.delay > verdict.limit:
        sys.exit(1)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.fairness", description=__doc__)
    parser.add_argument(
        "--seats", type=at_least_one, default=8, help="--max-num-seqs of the daemon"
    )
    parser.add_argument("--times", type=at_least_one, default=4, help="the flood, in seats")
    parser.add_argument("--flood-tokens", type=at_least_one, default=400, help="of its prompts")
    parser.add_argument("--quiet-tokens", type=at_least_one, default=24, help="of the other's")
    parser.add_argument("--requests", type=at_least_one, default=40, help="of the quiet tenant")
    parser.add_argument(
        "--seconds-a-request", type=positive, default=2.0, help="the flood's length, at most"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
