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
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from rich.console import Console

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.limits import Limit, judge, limits_json, limits_table
from deploy.loadtest.options import Parser, writable, write
from deploy.loadtest.overload.churn import churn
from deploy.loadtest.overload.closing_server import ClosingServer
from deploy.loadtest.overload.memory import Memory
from deploy.loadtest.overload.offers import Customers, Outcome, Recipe, customers
from deploy.loadtest.overload.verdict import Record

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
