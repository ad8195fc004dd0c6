"""`tokend bench soak`: short requests without end, and what the daemon keeps of them.

By default the worker computes nothing, so that a million requests fit into an hour:
front end, engine, supervisor and all sockets are real.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console

from deploy.loadtest.daemon import MeasuredDaemon
from deploy.loadtest.limits import judge, limits_json
from deploy.loadtest.options import Parser, at_least_one, positive, writable, write
from deploy.loadtest.processes import usage_by_title
from deploy.loadtest.rest import Rest, left_over
from deploy.loadtest.soak.load import Load
from deploy.loadtest.soak.report import Report
from deploy.loadtest.soak.samples import Sample
from deploy.loadtest.summary import quantile

_REQUESTS: Final = 1_000_000
_WARM_UP_ROUNDS: Final = 20


def main(words: Sequence[str]) -> None:
    """Run, print and plot; raises TokendError naming each limit that was missed."""
    options = _parse(words)
    with writable("--plot", options.plot) as plots, writable("--json", options.json) as files:
        report = _soak(options)
        report.show(Console(width=110))
        write(plots, report.plot())
        write(files, limits_json(report.limits, report.plain()))
    judge("bench soak", report.limits)


def _soak(options: argparse.Namespace) -> Report:
    command = ("serve",) if options.real else ("bench", "null")
    with MeasuredDaemon(options.serve_flags, command) as daemon:
        warm_up = _load(daemon, options, lambda number: number >= _warm_up_requests(options))
        asyncio.run(warm_up.run())
        before = Rest.of(daemon)
        load = _load(daemon, options, _end_of(options))
        samples = asyncio.run(_observe(daemon, load, options.every))
        after = left_over(before, daemon)
    return Report(load, samples, after, "the model" if options.real else "a worker without one")


def _load(daemon: MeasuredDaemon, options: argparse.Namespace, over: Callable[[int], bool]) -> Load:
    address = urlsplit(daemon.url)
    assert address.hostname is not None
    assert address.port is not None
    return Load(address.hostname, address.port, options.connections, options.tokens, over)


def _warm_up_requests(options: argparse.Namespace) -> int:
    """Every connection has been there, and every kind of request; not more than is asked for."""
    most: int = _WARM_UP_ROUNDS * options.connections
    return min(most, options.requests or most)


def _end_of(options: argparse.Namespace) -> Callable[[int], bool]:
    """Says of a number of requests whether it is enough."""
    most = options.requests or (float("inf") if options.minutes else _REQUESTS)
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    return lambda number: number >= most or time.monotonic() >= end


async def _observe(daemon: MeasuredDaemon, load: Load, every: float) -> list[Sample]:
    """A sample now and then while the load runs, and one when it ends."""
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


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="tokend bench soak", description=__doc__)
    parser.add_argument("--requests", type=at_least_one, help="in all; a million by default")
    parser.add_argument("--minutes", type=positive, help="instead, or whichever comes first")
    parser.add_argument("--real", action="store_true", help="with the real worker and model")
    parser.add_argument("--connections", type=at_least_one, default=64, help="at once (64)")
    parser.add_argument("--tokens", type=at_least_one, default=3, help="of each answer (3)")
    parser.add_argument("--every", type=positive, default=10.0, help="seconds to a sample (10)")
    parser.add_argument("--plot", metavar="FILE", help="HTML file to draw the curves into")
    parser.add_argument("--json", metavar="FILE", help="file to write the figures to")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    return parser.parse_args(words)
