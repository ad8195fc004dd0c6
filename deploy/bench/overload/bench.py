"""`tokend bench overload`: many times what a daemon can take, and clients that do not stay.

Starts a daemon of its own with few seats and a short queue. First as many clients as have a
place keep it full: that is its capacity, and the longest that whoever is let in should wait.
Then many times as many requests as it can answer arrive at a fixed rate. Then a few clients
work beside a hundred a second that connect, ask and leave. Exit status 1 when a limit was missed
(verdict.py): each is in the last table.

Clients that leave do so as soon as they have asked, or after a moment, in which what they asked for
is computed like anything else. Beside both the table has a control: the same clients ask a server
that only closes connections, so the rest is what they cost the daemon.
"""

import argparse
import asyncio
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import Parser, writable, write
from deploy.bench.overload.arrivals import (
    ClosingServer,
    Customers,
    Outcome,
    Recipe,
    churn,
    customers,
)
from deploy.bench.processes import MAX_MIB, Memory
from deploy.bench.servers import MeasuredDaemon
from deploy.bench.verdicts import Limit, judge, limits_json, limits_table, quantile

# What an overload run came to: its parts as a table, and the limits that it is judged by.
#
# Knows no daemon; the outcomes come from offers.py.


MIN_SHARE: Final = 0.9
"""Of their throughput that clients keep while others come and leave."""
MAX_WAIT_RATIO: Final = 1.25
"""Whoever is let in waits as with every place taken; the rest is the scatter of short runs."""
REFUSAL_SECONDS: Final = 1.0
"""What "at once" is: no step and no queue is between a request and its refusal."""
_NOTHING: Final = Outcome((), 0.0)


@dataclass
class Record:
    """What each part of the run came to, in order.

    full: with every place taken. flood: beyond that. alone, beside: a few clients without
    and with those who leave. control: with those who leave another server. beside_stays: with
    those who stay for a moment, and are served like the others meanwhile. A part that was not run
    has no offers and no limits.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    full: Outcome = _NOTHING
    flood: Outcome = _NOTHING
    alone: Outcome = _NOTHING
    beside: Outcome = _NOTHING
    control: Outcome = _NOTHING
    beside_stays: Outcome = _NOTHING

    def note(self, name: str, outcome: Outcome) -> Outcome:
        """One more part."""
        self.outcomes[name] = outcome
        return outcome

    def limits(self, memory: Memory, left: Sequence[str]) -> list[Limit]:
        """What the run is judged by. left: gauges that did not return to 0."""
        num_failed = sum(len(each.failed) for each in self.outcomes.values())
        limits = [
            Limit("failed requests", num_failed, "at most", 0),
            Limit("left behind", len(left), "at most", 0),
        ]
        if self.flood.offers:
            limits += self._flood_limits(memory)
        if self.beside.offers:
            share = _ratio(self.beside.tokens_per_second, self.alone.tokens_per_second)
            limits.append(Limit("throughput beside those who leave", share, "at least", MIN_SHARE))
        return limits

    def _flood_limits(self, memory: Memory) -> list[Limit]:
        waits = [each.first_token for each in self.flood.accepted]
        usual = [each.first_token for each in self.full.accepted]
        refusals = [each.answered for each in self.flood.refused] or [math.nan]
        hints = sum(1 for each in self.flood.refused if not each.retry_after.isdigit())
        return [
            Limit(
                "first token of the accepted, flood / full",
                _ratio(_median(waits), _median(usual)),
                "at most",
                MAX_WAIT_RATIO,
            ),
            Limit(
                "answer to the refused, p99",
                1e3 * quantile(refusals, 0.99),
                "at most",
                1e3 * REFUSAL_SECONDS,
                "ms",
            ),
            Limit("refused without Retry-After", hints, "at most", 0),
            *(
                Limit(
                    f"{title.removeprefix('tokend: ')}: growth",
                    memory.growth(title),
                    "at most",
                    MAX_MIB,
                    "MiB",
                )
                for title in memory.sizes
            ),
        ]

    def _share_of_alone(self, outcome: Outcome) -> float | None:
        """Throughput beside the part without those who leave; None for parts of other clients."""
        beside = (self.control, self.beside, self.beside_stays)
        if not outcome.offers or all(outcome is not each for each in beside):
            return None
        return _ratio(outcome.tokens_per_second, self.alone.tokens_per_second)

    def plain(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "parts": [
                {
                    "name": name,
                    "seconds": outcome.seconds,
                    "answered": len(outcome.accepted),
                    "refused": len(outcome.refused),
                    "failed": len(outcome.failed),
                    "tokens_per_second": outcome.tokens_per_second,
                    "share_of_alone": self._share_of_alone(outcome),
                    "first_token": _quantiles([each.first_token for each in outcome.accepted]),
                    "refusal": _quantiles([each.answered for each in outcome.refused]),
                }
                for name, outcome in self.outcomes.items()
            ]
        }

    def problems(self) -> list[str]:
        """Of requests that were neither answered nor refused, some."""
        return [
            f"{name}: {len(outcome.failed)} failed, such as: "
            f"{outcome.failed[0].status} {outcome.failed[0].error}"
            for name, outcome in self.outcomes.items()
            if outcome.failed
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
            "first token of the accepted",
            "answer to the refused",
            "Retry-After, s",
        ):
            table.add_column(column, justify="left" if column == "load" else "right")
        for name, outcome in self.outcomes.items():
            accepted, refused = outcome.accepted, outcome.refused
            share = self._share_of_alone(outcome)
            table.add_row(
                name,
                str(len(accepted)),
                f"{outcome.requests_per_second:.1f}",
                f"{outcome.tokens_per_second:.0f}",
                "-" if share is None else f"{share:.2f}",
                str(len(refused)),
                _milliseconds([each.first_token for each in accepted]),
                _milliseconds([each.answered for each in refused]),
                _range([int(each.retry_after) for each in refused]),
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
    """Empty where there were none."""
    return {f"p{part}": quantile(seconds, part / 100) for part in (50, 99)} if seconds else {}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds) if seconds else math.nan


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.nan


GAUGES: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "tokend:queued_tokens")
REST_SECONDS: Final = 10.0
WARM_UP_SECONDS: Final = 5.0
SMALL_POOL: Final = "128M"
"""Memory of a pool is taken when it is first used; this one is in use before the flood begins."""


@dataclass
class OverloadRun:
    """One daemon, loaded in parts; each notes its outcome."""

    url: str
    recipe: Recipe
    clients: Customers
    memory: Memory
    record: Record = field(default_factory=Record)

    async def fill(self, places: int, seconds: float) -> float:
        """As many clients as there are places; returns requests per second."""
        await self.clients.keep(places, min(seconds, WARM_UP_SECONDS))
        outcome = await self.clients.keep(places, seconds)
        self.record.full = self.record.note(f"{places} clients, one for each place", outcome)
        return outcome.requests_per_second

    async def flood(self, per_second: float, seconds: float) -> Outcome:
        """New requests at this rate."""
        outcome = await self.clients.flood(per_second, seconds, self.memory.look)
        self.record.flood = self.record.note(f"{per_second:.1f} new ones a second", outcome)
        return outcome

    async def beside_churn(
        self, number: int, per_second: float, seconds: float, longest_stay: float
    ) -> Outcome:
        """So many clients: by themselves, beside the control, and beside those who leave.

        Each for `seconds`, by themselves for a quarter of it. longest_stay: seconds, of the
        last part. Returns the part beside those who leave at once.
        """
        alone = await self.clients.keep(number, seconds / 4)
        self.record.alone = self.record.note(f"{number} clients", alone)
        with ClosingServer() as control:
            self.record.control = await self._beside(
                number, "that left a server which only closes", control.url, per_second, seconds, 0
            )
        self.record.beside = await self._beside(
            number, "that left at once", self.url, per_second, seconds, 0
        )
        if longest_stay:
            name = f"that stayed up to {1e3 * longest_stay:g} ms"
            self.record.beside_stays = await self._beside(
                number, name, self.url, per_second, seconds, longest_stay
            )
        return self.record.beside

    async def _beside(
        self,
        number: int,
        name: str,
        url: str,
        per_second: float,
        seconds: float,
        longest_stay: float,
    ) -> Outcome:
        until = time.monotonic() + seconds
        others = asyncio.create_task(
            churn(url, self.recipe, per_second, longest_stay, lambda: time.monotonic() >= until)
        )
        outcome = await self.clients.keep(number, seconds)
        return self.record.note(f"{number} beside {await others} {name}", outcome)


def left_behind(url: str) -> list[str]:
    """Gauges that do not return to 0."""
    until = time.monotonic() + REST_SECONDS
    while (left := _not_at_rest(url)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def main(words: Sequence[str]) -> None:
    """Measure and print; raises TokendError naming each limit that was missed."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        limits, figures = _measure(options)
        write(files, limits_json(limits, figures))
    judge("bench overload", limits)


def _measure(options: argparse.Namespace) -> tuple[list[Limit], dict[str, Any]]:
    """Run and print: the limits, and all figures."""
    console = Console(width=130)
    flags = [
        *("--max-num-seqs", str(options.seats), "--max-num-queued-reqs", str(options.queue)),
        *("--kv-cache-memory", SMALL_POOL),
    ]
    with MeasuredDaemon([*flags, *options.serve_flags]) as daemon:
        memory = Memory(daemon.pid)
        record = asyncio.run(_run(daemon.url, memory, options))
        left = left_behind(daemon.url)
    limits = record.limits(memory, left)
    console.print(record.table())
    for title, sizes in memory.sizes.items():
        console.print(
            f"{title}: {sizes[0]:.0f} MiB before, {max(sizes):.0f} at most, {sizes[-1]:.0f} after"
        )
    for line in [*record.problems(), *left]:
        console.print(line, markup=False)
    console.print(limits_table(limits))
    return limits, record.plain() | {"memory_mib": memory.sizes}


async def _run(url: str, memory: Memory, options: argparse.Namespace) -> Record:
    recipe = Recipe(options.input_tokens, options.output_tokens)
    async with customers(url, recipe) as clients:
        run = OverloadRun(url, recipe, clients, memory)
        per_second = await run.fill(options.seats + options.queue, options.fill_seconds)
        if options.flood_minutes:
            await run.flood(options.times * per_second, 60 * options.flood_minutes)
        if options.churn_minutes:
            seconds, longest_stay = 60 * options.churn_minutes, options.churn_stay_ms / 1000
            await run.beside_churn(options.seats, options.churn_rate, seconds, longest_stay)
    return run.record


def _not_at_rest(url: str) -> list[str]:
    text = httpx.get(f"{url}/metrics").text
    found = {
        name: sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
        for name in GAUGES
    }
    return [f"{name} stays at {value:g}" for name, value in found.items() if value]


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokend bench overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seats", type=int, default=16, help="--max-num-seqs of the daemon")
    parser.add_argument("--queue", type=int, default=16, help="its --max-num-queued-reqs")
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--fill-seconds", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=10.0, help="the capacity, in the flood")
    parser.add_argument("--flood-minutes", type=float, default=5.0)
    parser.add_argument("--churn-rate", type=float, default=100.0, help="clients a second")
    parser.add_argument("--churn-minutes", type=float, default=2.0, help="of each such part")
    parser.add_argument(
        "--churn-stay-ms", type=float, default=100.0, help="longest stay, in the last of them; or 0"
    )
    parser.add_argument("--json", metavar="FILE", help="file to write the figures to")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    return parser.parse_args(words)
