"""A soak test: many short requests, and the growth of the daemon's memory and latency.

By default the worker computes nothing, so that a million requests fit into an hour; front end,
engine, supervisor and all sockets are real.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from deploy.bench.limits import Limit, check_limits, limits_json, limits_table, quantile
from deploy.bench.options import BenchParser, at_least_one, positive, writable, write
from deploy.bench.processes import IdleState, find_leftovers
from deploy.bench.servers import MeasuredDaemon
from tests.benchmarks.command import run
from tests.benchmarks.null_daemon import NULL_DAEMON
from tests.benchmarks.plot import PlotPanel, Points, plot_page
from tests.benchmarks.usage import ProcessUsage, usage_by_title

# A keep-alive HTTP/1.1 connection with little overhead, for a load from the same machine: requests
# are prepared bytes, and only status and length of an answer are parsed.


_HEAD_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_MAX_ANSWER_BYTES: Final = 1 << 20


class AnswerError(Exception):
    """The server did not answer, or with an unexpected answer."""


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """Return a POST of this body as JSON."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Connection:
    """A connection with one request at a time; opened on demand."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> bytes:
        """Return the body of the answer, including chunk sizes; raise AnswerError."""
        try:
            reader, writer = await self._open()
            writer.write(request)
            head = await reader.readuntil(_HEAD_END)
            body = await _body(reader, head.lower())
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.drop()
            raise AnswerError(f"{type(error).__name__}: {error}") from None
        status = head.split(b" ", 2)[1]
        if status != b"200":
            raise AnswerError(f"status {status.decode()}: {body[:300].decode(errors='replace')}")
        return body

    async def ask_and_leave(self, request: bytes, *, answered: bool) -> None:
        """Send a request and disconnect, immediately or when the answer begins."""
        try:
            reader, writer = await self._open()
            writer.write(request)
            await writer.drain()
            if answered:
                await reader.readuntil(_HEAD_END)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise AnswerError(f"{type(error).__name__}: {error}") from None
        finally:
            self.drop()

    def drop(self) -> None:
        """Close immediately."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=_MAX_ANSWER_BYTES
            )
        return self._streams


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """head: in lower case."""
    _, found, rest = head.partition(b"content-length:")
    if found:
        return await reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
    return await reader.readuntil(_LAST_CHUNK)


# Short sequential requests over many keep-alive connections.


PATH: Final = "/v1/completions"
_EVERY_STREAMED: Final = 8
_EVERY_LEFT: Final = 64
_LEFT_TOKENS: Final = 200
"""Enough that the answer is unfinished when the client disconnects."""
_MAX_FAILURES: Final = 100
_PROMPTS: Final = (
    "The sea is",
    "Once upon a time there was a lighthouse",
    "1 2 3 4 5",
    "In the year 1900 the keeper wrote in his log every evening, whatever the weather was",
)


class Load:
    """The load. connections: concurrent ones. over: returns whether to stop sending requests."""

    def __init__(
        self, host: str, port: int, connections: int, max_tokens: int, over: Callable[[int], bool]
    ) -> None:
        self.num_requests = 0
        self.num_left = 0
        self.failures: list[str] = []
        self._host = host
        self._port = port
        self._num_connections = connections
        self._over = over
        self._requests = _requests(max_tokens)
        left = {"prompt": _PROMPTS[0], "max_tokens": _LEFT_TOKENS, "ignore_eos": True}
        self._left = request_bytes(PATH, left | {"stream": True})
        self._latencies: list[float] = []

    async def run(self) -> None:
        """Run until `over` or too many failures."""
        await asyncio.gather(*(self._ask_on() for _ in range(self._num_connections)))

    def pop_latencies(self) -> list[float]:
        """Return the seconds of the requests since the last call."""
        latencies, self._latencies = self._latencies, []
        return latencies

    async def _ask_on(self) -> None:
        connection = Connection(self._host, self._port)
        while not self._over(self.num_requests) and len(self.failures) < _MAX_FAILURES:
            self.num_requests += 1
            try:
                await self._ask(connection, self.num_requests)
            except AnswerError as error:
                self.failures.append(str(error))
        connection.drop()

    async def _ask(self, connection: Connection, number: int) -> None:
        if number % _EVERY_LEFT == 0:
            self.num_left += 1
            answered = number % (2 * _EVERY_LEFT) == 0
            await connection.ask_and_leave(self._left, answered=answered)
            return
        request, ending = next(self._requests)
        started = time.monotonic()
        answer = await connection.ask(request)
        self._latencies.append(time.monotonic() - started)
        if ending not in answer:
            raise AnswerError(f"an answer without {ending.decode()}: {answer[-300:]!r}")


def _requests(max_tokens: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield requests, and a text that a correct answer contains, endlessly."""
    made = []
    for number, prompt in zip(range(_EVERY_STREAMED), itertools.cycle(_PROMPTS), strict=False):
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": number}
        streamed = number == 0
        made.append(
            (
                request_bytes(PATH, body | {"stream": streamed}),
                b"data: [DONE]" if streamed else b'"completion_tokens": %d' % max_tokens,
            )
        )
    return itertools.cycle(made)


# Samples of a soak test, and their growth.


WARM_UP: Final = 50_000
"""Requests in which caches and heaps fill, at most half of all requests."""
REQUESTS: Final = 100_000
MAX_MIB: Final = 2.0
"""Limit of the memory growth of a process per REQUESTS; a shorter run may grow as much in total.

A heap grows in steps of about 1 MiB; an object that each request leaves is 5 MiB or more."""
MAX_DRIFT: Final = 1.5
"""Limit of the 99th percentile at the end, relative to after the warm-up."""
_DRIFT_SAMPLES: Final = 16
"""Least number of samples for a meaningful median of a quarter."""


@dataclass(frozen=True)
class Sample:
    """A sample. requests: so far. latencies: milliseconds, since the last sample.

    usage: of each process, by title. blocks: part of the KV pool in use, 0 to 1.
    """

    seconds: float
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    blocks: float
    usage: Mapping[str, ProcessUsage]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Growth:
    """Memory growth of one process. mib: per REQUESTS, by least squares. requests: measured."""

    title: str
    mib: float
    requests: int

    def describe(self) -> str:
        """Return a description."""
        return f"{self.name}: {self.mib:+.3f} MiB in {REQUESTS:,} requests"

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.title.removeprefix("tokend: ")

    @property
    def judged_mib(self) -> float:
        """Growth over REQUESTS, or over all requests if there were fewer.

        A single growth of a heap in few requests says nothing about later ones.
        """
        return self.mib * min(1.0, self.requests / REQUESTS)


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of each process that ran all the time, after the warm-up."""
    later = settled(samples)
    titles = set.intersection(*(set(each.usage) for each in later))
    requests = later[-1].requests - later[0].requests
    return [
        Growth(title, REQUESTS * slope(_memory(later, title)), requests) for title in sorted(titles)
    ]


def drifts(samples: Sequence[Sample]) -> list[float]:
    """Return ratios of the median p99 of the last quarter to the first one after the warm-up.

    Empty for a short run; intervals without an answer are ignored.
    """
    later = [each.p99_ms for each in settled(samples) if each.p99_ms]
    if len(later) < _DRIFT_SAMPLES:
        return []
    quarter = len(later) // 4
    return [quantile(later[-quarter:], 0.5) / quantile(later[:quarter], 0.5)]


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples after the warm-up, at least one."""
    begin = min(WARM_UP, samples[-1].requests / 2)
    return [each for each in samples if each.requests >= begin]


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line; 0 if all points have the same x."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if not spread:
        return 0.0
    return float(sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread)


def _memory(samples: Sequence[Sample], title: str) -> list[tuple[float, float]]:
    return [(float(each.requests), each.usage[title].resident_mib) for each in samples]


# The report of a soak test: faults, figures and plots.


_SHOWN_FAULTS: Final = 20


@dataclass(frozen=True)
class Report:
    """after: leftovers after the run. worker: the kind of worker."""

    load: Load
    samples: Sequence[Sample]
    after: Sequence[str]
    worker: str

    @property
    def faults(self) -> list[str]:
        """Return descriptions of all faults."""
        return [
            *(f"failed: {each}" for each in self.load.failures),
            *(f"afterwards: {each}" for each in self.after),
        ]

    @property
    def limits(self) -> list[Limit]:
        """Return the limits; a short run has none for latency drift."""
        return [
            Limit("failed requests", len(self.load.failures), "at most", 0),
            Limit("left over", len(self.after), "at most", 0),
            *(
                Limit(f"{each.name}: growth", each.judged_mib, "at most", MAX_MIB, "MiB")
                for each in growths(self.samples)
            ),
            *(
                Limit("p99, last quarter / first", each, "at most", MAX_DRIFT)
                for each in drifts(self.samples)
            ),
        ]

    @property
    def notes(self) -> list[str]:
        """Return the figures as lines."""
        load, seconds = self.load, self.samples[-1].seconds
        first, last = settled(self.samples)[0], self.samples[-1]
        return [
            f"{load.num_requests:,} requests in {seconds:,.0f} s "
            f"({load.num_requests / seconds:,.0f} a second) against {self.worker}; "
            f"{load.num_left:,} were left by their clients, {len(load.failures):,} failed",
            f"p99 {first.p99_ms:.1f} ms after the warm-up, {last.p99_ms:.1f} ms at the end",
            *(each.describe() for each in growths(self.samples)),
        ]

    def show(self, console: Console) -> None:
        """Print everything."""
        table = Table(title="processes after the warm-up and at the end of the load")
        for name in ("process", "MiB", "descriptors", "sockets"):
            table.add_column(name, justify="left" if name == "process" else "right")
        first = settled(self.samples)[0].usage
        for title, now in sorted(self.samples[-1].usage.items()):
            was = first.get(title, now)
            table.add_row(
                title.removeprefix("tokend: "),
                f"{was.resident_mib:.1f} → {now.resident_mib:.1f}",
                f"{was.descriptors} → {now.descriptors}",
                f"{was.sockets} → {now.sockets}",
            )
        console.print(table)
        for line in [*self.notes, *self.faults[:_SHOWN_FAULTS]]:
            console.print(line, markup=False, highlight=False)
        console.print(limits_table(self.limits))

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "requests": self.load.num_requests,
            "left": self.load.num_left,
            "faults": self.faults,
            "samples": [each.plain() for each in self.samples],
        }

    def plot(self) -> str:
        """Return the plots as an HTML page."""
        return plot_page("tokend under short requests", self.notes, self._panels(), "requests")

    def _panels(self) -> list[PlotPanel]:
        return [
            PlotPanel("resident memory, MiB", self._of_processes("resident_mib")),
            PlotPanel("open descriptors", self._of_processes("descriptors")),
            PlotPanel("sockets", self._of_processes("sockets")),
            PlotPanel("latency, ms", self._of_all(p50="p50_ms", p99="p99_ms")),
            PlotPanel("requests a second", self._of_all(rate="requests_per_second")),
            PlotPanel("part of the KV pool in use", self._of_all(blocks="blocks")),
        ]

    def _of_processes(self, field: str) -> dict[str, Points]:
        titles = sorted({title for each in self.samples for title in each.usage})
        return {
            title.removeprefix("tokend: "): [
                (each.requests, getattr(each.usage[title], field))
                for each in self.samples
                if title in each.usage
            ]
            for title in titles
        }

    def _of_all(self, **fields: str) -> dict[str, Points]:
        return {
            name: [(each.requests, getattr(each, field)) for each in self.samples]
            for name, field in fields.items()
        }


_REQUESTS: Final = 1_000_000
_WARM_UP_ROUNDS: Final = 20


def main(words: Sequence[str]) -> None:
    """Run, print and plot; raise TokendError naming each missed limit."""
    options = _parse(words)
    with writable("--plot", options.plot) as plots, writable("--json", options.json) as files:
        report = _soak(options)
        report.show(Console(width=110))
        write(plots, report.plot())
        write(files, limits_json(report.limits, report.plain()))
    check_limits("bench soak", report.limits)


def _soak(options: argparse.Namespace) -> Report:
    command = () if options.real else NULL_DAEMON
    with MeasuredDaemon(options.serve_flags, command) as daemon:
        warm_up = _load(daemon, options, lambda number: number >= _warm_up_requests(options))
        asyncio.run(warm_up.run())
        before = IdleState.settled(daemon)
        load = _load(daemon, options, _end_of(options))
        samples = asyncio.run(_observe(daemon, load, options.every))
        after = find_leftovers(before, daemon)
    return Report(load, samples, after, "the model" if options.real else "a worker without one")


def _load(daemon: MeasuredDaemon, options: argparse.Namespace, over: Callable[[int], bool]) -> Load:
    address = urlsplit(daemon.url)
    assert address.hostname is not None
    assert address.port is not None
    return Load(address.hostname, address.port, options.connections, options.tokens, over)


def _warm_up_requests(options: argparse.Namespace) -> int:
    """Return the number of warm-up requests, which cover all connections and kinds."""
    most: int = _WARM_UP_ROUNDS * options.connections
    return min(most, options.requests or most)


def _end_of(options: argparse.Namespace) -> Callable[[int], bool]:
    """Return a function that tells whether a number of requests is enough."""
    most = options.requests or (float("inf") if options.minutes else _REQUESTS)
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    return lambda number: number >= most or time.monotonic() >= end


async def _observe(daemon: MeasuredDaemon, load: Load, every: float) -> list[Sample]:
    """Take samples while the load runs, and one at its end."""
    samples: list[Sample] = []
    begin = last = time.monotonic()
    requests = 0
    running = asyncio.create_task(load.run())
    while not running.done():
        await asyncio.wait([running], timeout=every)
        blocks = await asyncio.to_thread(daemon.metric, "vllm:kv_cache_usage_perc")
        latencies = load.pop_latencies() or [0.0]
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
    parser = BenchParser(prog="python -m tests.benchmarks.soak", description=__doc__)
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


if __name__ == "__main__":
    sys.exit(run(main))
