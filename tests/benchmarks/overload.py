"""Overload: many times the capacity of a daemon, and clients that disconnect.

Starts a daemon with a small batch and a short queue, and measures in parts:

  full      as many clients as the batch and the queue hold: capacity, and the usual waiting time
  overload  many times the capacity at a fixed rate: accepted requests wait no longer than before,
            the others are refused at once, and no process grows
  churn     a few clients beside a hundred per second that disconnect at once, or after a moment;
            a server that only closes connections is the control

The exit status is 1 if a limit was missed; the last table shows all limits.
"""

import argparse
import asyncio
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.limits import Limit, check_limits, limits_json, limits_table, quantile
from deploy.bench.options import BenchParser, writable, write
from deploy.bench.servers import MeasuredDaemon
from tests.benchmarks.arrivals import (
    ClosingServer,
    OverloadClients,
    PartResult,
    RequestShape,
    churn,
    overload_clients,
)
from tests.benchmarks.command import run
from tests.benchmarks.usage import MemoryLog

MAX_GROWTH_MIB: Final = 8.0
"""Maximum growth of a process during an overload: less than 0.5 KiB per refused request."""
MIN_SHARE: Final = 0.9
"""Minimum throughput beside disconnecting clients, relative to that without them."""
MAX_WAIT_RATIO: Final = 1.25
"""Maximum of the waiting time of accepted requests relative to a full daemon, with some noise."""
REFUSAL_SECONDS: Final = 1.0
"""Maximum time of a refusal, which waits for no step and no queue."""
_NOT_RUN: Final = PartResult((), 0.0)


@dataclass
class OverloadReport:
    """Results of all parts of a run. parts: by name, in order.

    full: batch and queue are full. overload: more requests than that. alone, with_churn: a few
    clients without and with disconnecting ones. with_control: with clients that disconnect from
    the control server. with_stay: with clients that disconnect after a moment.
    A part that was not run has no attempts and no limits.
    """

    parts: dict[str, PartResult] = field(default_factory=dict)
    full: PartResult = _NOT_RUN
    overload: PartResult = _NOT_RUN
    alone: PartResult = _NOT_RUN
    with_churn: PartResult = _NOT_RUN
    with_control: PartResult = _NOT_RUN
    with_stay: PartResult = _NOT_RUN

    def add_part(self, name: str, result: PartResult) -> PartResult:
        self.parts[name] = result
        return result

    def limits(self, memory: MemoryLog, left: Sequence[str]) -> list[Limit]:
        """Return all limits with the measured values. left: gauges that did not return to 0."""
        num_failed = sum(len(part.failed) for part in self.parts.values())
        limits = [
            Limit("failed requests", num_failed, "at most", 0),
            Limit("gauges not back at 0", len(left), "at most", 0),
        ]
        if self.overload.attempts:
            limits += self._overload_limits(memory)
        if self.with_churn.attempts:
            share = _ratio(self.with_churn.tokens_per_second, self.alone.tokens_per_second)
            limits.append(
                Limit("throughput beside disconnecting clients", share, "at least", MIN_SHARE)
            )
        return limits

    def _overload_limits(self, memory: MemoryLog) -> list[Limit]:
        waits = [attempt.first_token for attempt in self.overload.accepted]
        usual = [attempt.first_token for attempt in self.full.accepted]
        refusals = [attempt.answered for attempt in self.overload.refused] or [math.nan]
        no_hint = sum(not attempt.retry_after.isdigit() for attempt in self.overload.refused)
        return [
            Limit(
                "first token of accepted requests, overload / full",
                _ratio(_median(waits), _median(usual)),
                "at most",
                MAX_WAIT_RATIO,
            ),
            Limit(
                "time of refusals, p99",
                1e3 * quantile(refusals, 0.99),
                "at most",
                1e3 * REFUSAL_SECONDS,
                "ms",
            ),
            Limit("refusals without Retry-After", no_hint, "at most", 0),
            *(
                Limit(
                    f"{title.removeprefix('tokend: ')}: growth",
                    memory.growth(title),
                    "at most",
                    MAX_GROWTH_MIB,
                    "MiB",
                )
                for title in memory.sizes
            ),
        ]

    def _share_of_alone(self, result: PartResult) -> float | None:
        """Return the throughput relative to `alone`; None for parts with other clients."""
        compared = (self.with_control, self.with_churn, self.with_stay)
        if not result.attempts or all(result is not part for part in compared):
            return None
        return _ratio(result.tokens_per_second, self.alone.tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON; times in seconds."""
        return {
            "parts": [
                {
                    "name": name,
                    "seconds": result.seconds,
                    "answered": len(result.accepted),
                    "refused": len(result.refused),
                    "failed": len(result.failed),
                    "tokens_per_second": result.tokens_per_second,
                    "share_of_alone": self._share_of_alone(result),
                    "first_token": _quantiles([attempt.first_token for attempt in result.accepted]),
                    "refusal": _quantiles([attempt.answered for attempt in result.refused]),
                }
                for name, result in self.parts.items()
            ]
        }

    def problems(self) -> list[str]:
        """Return descriptions of requests that were neither answered nor refused."""
        return [
            f"{name}: {len(result.failed)} failed, such as: "
            f"{result.failed[0].status} {result.failed[0].error}"
            for name, result in self.parts.items()
            if result.failed
        ]

    def table(self) -> Table:
        table = Table(title="times in ms, p50 / p99")
        for column in (
            "load",
            "answered",
            "per s",
            "tokens/s",
            "of alone",
            "refused",
            "first token if accepted",
            "time of refusal",
            "Retry-After, s",
        ):
            table.add_column(column, justify="left" if column == "load" else "right")
        for name, result in self.parts.items():
            accepted, refused = result.accepted, result.refused
            share = self._share_of_alone(result)
            table.add_row(
                name,
                str(len(accepted)),
                f"{result.requests_per_second:.1f}",
                f"{result.tokens_per_second:.0f}",
                "-" if share is None else f"{share:.2f}",
                str(len(refused)),
                _milliseconds([attempt.first_token for attempt in accepted]),
                _milliseconds([attempt.answered for attempt in refused]),
                _range([int(attempt.retry_after) for attempt in refused]),
            )
        return table


def _milliseconds(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "-"
    p99 = statistics.quantiles(seconds, n=100)[98]
    return f"{1e3 * statistics.median(seconds):.0f} / {1e3 * p99:.0f}"


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if numbers else "-"


def _quantiles(seconds: list[float]) -> dict[str, float]:
    """Return median and 99th percentile; empty without values."""
    return {f"p{part}": quantile(seconds, part / 100) for part in (50, 99)} if seconds else {}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds) if seconds else math.nan


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.nan


GAUGES: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "tokend:queued_tokens")
SETTLE_SECONDS: Final = 10.0
WARM_UP_SECONDS: Final = 5.0
SMALL_POOL: Final = "128M"
"""KV pool of the daemon. Its memory is allocated on first use, here before the overload begins."""


@dataclass
class OverloadRun:
    """Loads one daemon in parts; each is added to the report."""

    url: str
    shape: RequestShape
    clients: OverloadClients
    memory: MemoryLog
    report: OverloadReport = field(default_factory=OverloadReport)

    async def measure_capacity(self, num_clients: int, seconds: float) -> float:
        """Fill batch and queue with clients; return the answered requests per second."""
        await self.clients.run_closed_loop(num_clients, min(seconds, WARM_UP_SECONDS))
        result = await self.clients.run_closed_loop(num_clients, seconds)
        self.report.full = self.report.add_part(
            f"{num_clients} clients: batch and queue full", result
        )
        return result.requests_per_second

    async def measure_overload(self, per_second: float, seconds: float) -> PartResult:
        result = await self.clients.run_open_loop(per_second, seconds, self.memory)
        self.report.overload = self.report.add_part(f"{per_second:.1f} requests per second", result)
        return result

    async def measure_churn(
        self, number: int, per_second: float, seconds: float, max_stay: float
    ) -> PartResult:
        """Measure `number` clients alone, with the control, and with disconnecting clients.

        Each part takes `seconds`, that alone a quarter of it. max_stay: seconds until a client
        disconnects in the last part. Returns the part with clients that disconnect at once.
        """
        alone = await self.clients.run_closed_loop(number, seconds / 4)
        self.report.alone = self.report.add_part(f"{number} clients", alone)
        with ClosingServer() as control:
            self.report.with_control = await self._run_with_churn(
                number, "that disconnect from the control", control.url, per_second, seconds, 0
            )
        self.report.with_churn = await self._run_with_churn(
            number, "that disconnect at once", self.url, per_second, seconds, 0
        )
        if max_stay:
            name = f"that disconnect within {1e3 * max_stay:g} ms"
            self.report.with_stay = await self._run_with_churn(
                number, name, self.url, per_second, seconds, max_stay
            )
        return self.report.with_churn

    async def _run_with_churn(
        self,
        number: int,
        name: str,
        url: str,
        per_second: float,
        seconds: float,
        max_stay: float,
    ) -> PartResult:
        others = asyncio.create_task(churn(url, self.shape, per_second, max_stay, seconds))
        result = await self.clients.run_closed_loop(number, seconds)
        return self.report.add_part(f"{number} beside {await others} {name}", result)


def nonzero_gauges(url: str) -> list[str]:
    """Return descriptions of gauges that do not return to 0."""
    until = time.monotonic() + SETTLE_SECONDS
    while (left := _nonzero(url)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def main(words: Sequence[str]) -> None:
    options = _parse(words)
    with writable("--json", options.json) as files:
        limits, figures = _measure(options)
        write(files, limits_json(limits, figures))
    check_limits("overload", limits)


def _measure(options: argparse.Namespace) -> tuple[list[Limit], dict[str, Any]]:
    """Run all parts and print tables; return the limits and all figures."""
    console = Console(width=130)
    flags = [
        *(
            "--max-num-seqs",
            str(options.max_num_seqs),
            "--max-num-queued-reqs",
            str(options.max_num_queued_reqs),
        ),
        *("--kv-cache-memory", SMALL_POOL),
    ]
    with MeasuredDaemon([*flags, *options.serve_flags]) as daemon:
        memory = MemoryLog(daemon.pid)
        report = asyncio.run(_run(daemon.url, memory, options))
        left = nonzero_gauges(daemon.url)
    limits = report.limits(memory, left)
    console.print(report.table())
    for title, sizes in memory.sizes.items():
        console.print(
            f"{title}: {sizes[0]:.0f} MiB before, {max(sizes):.0f} at most, {sizes[-1]:.0f} after"
        )
    for line in [*report.problems(), *left]:
        console.print(line, markup=False)
    console.print(limits_table(limits))
    return limits, report.to_dict() | {"memory_mib": memory.sizes}


async def _run(url: str, memory: MemoryLog, options: argparse.Namespace) -> OverloadReport:
    shape = RequestShape(options.input_tokens, options.output_tokens)
    async with overload_clients(url, shape) as clients:
        run = OverloadRun(url, shape, clients, memory)
        per_second = await run.measure_capacity(
            options.max_num_seqs + options.max_num_queued_reqs, options.capacity_seconds
        )
        if options.overload_minutes:
            await run.measure_overload(
                options.overload_factor * per_second, 60 * options.overload_minutes
            )
        if options.churn_minutes:
            seconds, max_stay = 60 * options.churn_minutes, options.churn_stay_ms / 1000
            await run.measure_churn(options.max_num_seqs, options.churn_rate, seconds, max_stay)
    return run.report


def _nonzero(url: str) -> list[str]:
    text = httpx.get(f"{url}/metrics").text
    found = {
        name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
        for name in GAUGES
    }
    return [f"{name} stays at {value:g}" for name, value in found.items() if value]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.overload", description=__doc__)
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, help="batch size of the daemon (16)"
    )
    parser.add_argument(
        "--max-num-queued-reqs", type=int, default=16, help="queue of the daemon (16)"
    )
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument(
        "--capacity-seconds", type=float, default=30.0, help="measuring the capacity (30)"
    )
    parser.add_argument(
        "--overload-factor", type=float, default=10.0, help="load relative to the capacity (10)"
    )
    parser.add_argument(
        "--overload-minutes", type=float, default=5.0, help="duration of the overload (5)"
    )
    parser.add_argument(
        "--churn-rate", type=float, default=100.0, help="disconnecting clients per second (100)"
    )
    parser.add_argument(
        "--churn-minutes", type=float, default=2.0, help="duration of each part (2)"
    )
    parser.add_argument(
        "--churn-stay-ms",
        type=float,
        default=100.0,
        help="time until clients disconnect in the last part (100)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
