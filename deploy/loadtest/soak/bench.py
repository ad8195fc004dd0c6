"""`tokend bench soak`: short requests without end, and what the daemon keeps of them.

By default the worker computes nothing, so that a million requests fit into an hour:
front end, engine, supervisor and all sockets are real.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.options import Parser, at_least_one, positive
from deploy.loadtest.processes import usage_by_title
from deploy.loadtest.rest import Rest, left_over
from deploy.loadtest.soak.load import Load
from deploy.loadtest.soak.plot import Panel, page
from deploy.loadtest.soak.samples import Growth, Sample, growths
from deploy.loadtest.summary import quantile
from proto.errors import ConfigError, TokendError

_REQUESTS: Final = 1_000_000
_WARM_UP_ROUNDS: Final = 20
_SHOWN_FAILURES: Final = 10


def main(words: Sequence[str]) -> None:
    """Run, print and plot; raises TokendError for what grows, stays behind or fails."""
    options = _parse(words)
    for file in (options.plot, options.json):
        _check_writable(file)
    command = ("serve",) if options.real else ("bench", "serve")
    with MeasuredDaemon(options.serve_flags, command) as daemon:
        address = urlsplit(daemon.url)
        assert address.hostname is not None
        assert address.port is not None
        where = (address.hostname, address.port, options.connections, options.tokens)
        warm_up = Load(*where, lambda number: number >= _WARM_UP_ROUNDS * options.connections)
        asyncio.run(warm_up.run())
        before = Rest.of(daemon)
        begin = time.monotonic()
        end = begin + 60 * options.minutes if options.minutes else float("inf")
        most = options.requests or (float("inf") if options.minutes else _REQUESTS)
        load = Load(*where, lambda number: number >= most or time.monotonic() >= end)
        samples = asyncio.run(_observe(daemon, load, options.every))
        after = left_over(before, daemon)
    grown = growths(samples)
    faults = _faults(load, grown, after)
    notes = _notes(load, samples, grown)
    _show(notes, samples, grown, faults)
    if options.plot:
        title = "tokend under short requests" + ("" if options.real else ", null worker")
        Path(options.plot).write_text(page(title, notes, _panels(samples), "requests"))
    if options.json:
        Path(options.json).write_text(json.dumps([each.plain() for each in samples], indent=1))
    if faults:
        raise TokendError(f"bench soak: {len(faults)} findings")


async def _observe(daemon: MeasuredDaemon, load: Load, every: float) -> list[Sample]:
    """A sample now and then while the load runs."""
    samples: list[Sample] = []
    begin = last = time.monotonic()
    requests = 0
    running = asyncio.create_task(load.run())
    while not running.done():
        await asyncio.wait([running], timeout=every)
        blocks = await asyncio.to_thread(daemon.metric, "vllm:kv_cache_usage_perc")
        latencies = load.take_latencies() or [0.0]
        now = time.monotonic()
        samples.append(
            Sample(
                seconds=now - begin,
                requests=load.num_requests,
                requests_per_second=(load.num_requests - requests) / (now - last),
                p50_ms=1e3 * quantile(latencies, 0.5),
                p99_ms=1e3 * quantile(latencies, 0.99),
                blocks=blocks,
                usage=usage_by_title(daemon.pid),
            )
        )
        last, requests = now, load.num_requests
    await running
    return samples


def _faults(load: Load, grown: Sequence[Growth], after: Sequence[str]) -> list[str]:
    found = [f"failed: {each}" for each in load.failures]
    found += [
        f"{each.title} grows by {each.mib:.2f} MiB in 100,000 requests"
        for each in grown
        if each.too_much
    ]
    return found + [f"afterwards: {each}" for each in after]


def _notes(load: Load, samples: Sequence[Sample], grown: Sequence[Growth]) -> list[str]:
    seconds = samples[-1].seconds
    return [
        f"{load.num_requests:,} requests in {seconds:,.0f} s "
        f"({load.num_requests / seconds:,.0f} a second), of which {load.num_left:,} were left "
        f"by their clients and {len(load.failures):,} failed",
        *(
            f"{each.title.removeprefix('tokend: ')}: {each.mib:+.3f} MiB in 100,000 requests"
            for each in grown
        ),
    ]


def _show(
    notes: Sequence[str], samples: Sequence[Sample], grown: Sequence[Growth], faults: Sequence[str]
) -> None:
    console = Console(width=110)
    first, last = samples[min(len(samples) - 1, len(samples) // 5)], samples[-1]
    table = Table(title="processes after the warm-up and at the end")
    for name in ("process", "MiB", "MiB at the end", "descriptors", "sockets"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for title, now in sorted(last.usage.items()):
        was = first.usage.get(title, now)
        table.add_row(
            title.removeprefix("tokend: "),
            f"{was.resident_mib:.1f}",
            f"{now.resident_mib:.1f}",
            f"{was.descriptors} → {now.descriptors}",
            f"{was.sockets} → {now.sockets}",
        )
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    console.print(f"p99 {first.p99_ms:.1f} ms after the warm-up, {last.p99_ms:.1f} ms at the end")
    for fault in faults[:_SHOWN_FAILURES]:
        console.print(fault, markup=False)


def _panels(samples: Sequence[Sample]) -> list[Panel]:
    titles = sorted({title for each in samples for title in each.usage})

    def of_processes(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            title.removeprefix("tokend: "): [
                (each.requests, getattr(each.usage[title], field))
                for each in samples
                if title in each.usage
            ]
            for title in titles
        }

    def of_all(**fields: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: [(each.requests, getattr(each, field)) for each in samples]
            for name, field in fields.items()
        }

    return [
        Panel("resident memory, MiB", of_processes("resident_mib")),
        Panel("open descriptors", of_processes("descriptors")),
        Panel("sockets", of_processes("sockets")),
        Panel("latency, ms", of_all(p50="p50_ms", p99="p99_ms")),
        Panel("requests a second", of_all(rate="requests_per_second")),
        Panel("part of the KV pool in use", of_all(blocks="blocks")),
    ]


def _check_writable(file: str | None) -> None:
    """A name that is no good must not cost an hour."""
    if file is None:
        return
    try:
        Path(file).touch()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="tokend bench soak", description=__doc__)
    parser.add_argument("--requests", type=at_least_one, help="in all; a million by default")
    parser.add_argument("--minutes", type=positive, help="instead, or whichever comes first")
    parser.add_argument("--real", action="store_true", help="with the real worker and model")
    parser.add_argument("--connections", type=at_least_one, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=at_least_one, default=3, help="of each answer (3)")
    parser.add_argument("--every", type=positive, default=10.0, help="seconds to a sample (10)")
    parser.add_argument("--plot", metavar="FILE", help="HTML file to draw the curves into")
    parser.add_argument("--json", metavar="FILE", help="file to write the samples to")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    return parser.parse_args(words)
