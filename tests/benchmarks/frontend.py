"""Measure the cost of streaming in front end and engine, without a model.

All processes and sockets of the daemon are real except the worker, which makes up tokens and sleeps
for --step-ms in every step. This must be long enough for every token to get a separate event
(tokens per event: 1), because a front end that lags behind merges tokens, which is cheaper.
--step-ms 0 measures the maximal speed instead.

With --peer-python and --peer-model vLLM's API server and engine get the same load, also without a
model, alternating with ours; the other server idles meanwhile.

  python -m tests.benchmarks.frontend --streams 1000
  python -m tests.benchmarks.frontend --peer-python ~/vllm/bin/python --peer-model
  ~/SmolLM2-135M-Instruct
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from deploy.bench.client import first_model
from deploy.bench.limits import Limit, check_limits, limits_json, limits_table, quantile
from deploy.bench.options import (
    BenchParser,
    at_least_one,
    positive,
    writable,
    write,
)
from deploy.bench.processes import SUPERVISOR
from deploy.bench.servers import PORT, MeasuredDaemon, ServerSpec, StartedServer, metrics_of
from proto.errors import ConfigError, TokendError
from tests.benchmarks.command import from_zero_number, run
from tests.benchmarks.null_daemon import NULL_DAEMON
from tests.benchmarks.soak import request_bytes
from tests.benchmarks.usage import usage_by_title

# Many open streams on one thread, whose events are counted but not parsed.
#
# A client that parsed them would cost more than the servers.


PATH: Final = "/v1/completions"
_AT_ONCE: Final = 50
"""Number of connections that are opened together."""
_EVENT_END: Final = b"\n\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_GOOD: Final = b"HTTP/1.1 200"
_SHOWN_BYTES: Final = 300


@dataclass
class Window:
    """Events in a time window. events: number by stream. gaps: seconds between two reads of a
    stream that returned events."""

    events: list[int]
    gaps: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One request and its answer. begun, ended: called once; failed: called with the reason."""

    def __init__(
        self,
        request: bytes,
        begun: Callable[[], None],
        ended: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self.num_events = 0
        self.gaps: list[float] | None = None
        self._request = request
        self._begun = begun
        self._ended = ended
        self._failed = failed
        self._clock = asyncio.get_running_loop().time
        self._last = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._last:
            self._last = self._clock()
            if not data.startswith(_GOOD):
                self._failed(data[:_SHOWN_BYTES].decode(errors="replace"))
                return
        # ...}\n | \ndata: {...   the end of an event may be cut in two
        number = data.count(_EVENT_END) + (self._tail + data[:1] == _EVENT_END)
        self._tail = data[-1:]
        if not number:
            return
        if data.endswith(_LAST_CHUNK):
            self._ended()
        now = self._clock()
        if not self.num_events:
            self._begun()
        elif self.gaps is not None:
            self.gaps.append(now - self._last)
        self.num_events += number
        self._last = now

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()

    def close(self) -> None:
        """Disconnect, like a client that needs no more tokens."""
        self._transport.abort()


class Streams:
    """One concurrently open stream for every prompt.

    max_tokens: enough that no stream ends before the measurement.
    """

    def __init__(
        self, url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        fields = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        fields["temperature"] = 0
        self._requests = [request_bytes(PATH, fields | {"prompt": each}) for each in prompts]
        self._streams: list[Stream] = []
        self._num_begun = 0
        self._trouble = ""
        self._changed = asyncio.Event()

    @property
    def num_events(self) -> int:
        """Number of events of all streams since they were opened."""
        return sum(each.num_events for each in self._streams)

    async def open(self, seconds: float) -> None:
        """Wait until every stream has had an event; raise TokendError after this many seconds."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                for begin in range(0, len(self._requests), _AT_ONCE):
                    some = self._requests[begin : begin + _AT_ONCE]
                    opened = await asyncio.gather(
                        *(
                            loop.create_connection(self._stream(each), self._host, self._port)
                            for each in some
                        )
                    )
                    self._streams += [stream for _, stream in opened]
                while self._num_begun < len(self._requests):
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except (TimeoutError, OSError) as error:
            raise TokendError(
                f"{self._num_begun} of {len(self._requests)} streams have begun: "
                f"{str(error) or f'after {seconds:g} s'}"
            ) from None

    async def watch(self, seconds: float) -> Window:
        """Return the events of this many seconds; raise TokendError if a stream ends."""
        before = [each.num_events for each in self._streams]
        gaps: list[float] = []
        for each in self._streams:
            each.gaps = gaps
        await asyncio.sleep(seconds)
        for each in self._streams:
            each.gaps = None
        self.check()
        events = [each.num_events - then for each, then in zip(self._streams, before, strict=True)]
        return Window(events, gaps)

    def check(self) -> None:
        """Raise TokendError if a stream has ended or failed."""
        if self._trouble:
            raise TokendError(self._trouble)

    def close(self) -> None:
        for each in self._streams:
            each.close()

    def _stream(self, request: bytes) -> Callable[[], Stream]:
        return lambda: Stream(request, self._on_begun, self._on_ended, self._on_failed)

    def _on_begun(self) -> None:
        self._num_begun += 1
        self._changed.set()

    def _on_ended(self) -> None:
        self._on_failed("a stream ended while it was measured: more --output-tokens are needed")

    def _on_failed(self, text: str) -> None:
        self._trouble = self._trouble or text
        self._changed.set()


# The measured servers: the daemon and vLLM, both without a model, with the same limits and step
# time, and the CPU time of their processes.


FRONT_END: Final = "front end"
ENGINE: Final = "engine"
BLOCK_SIZE: Final = 16
_PEERS: Final = Path(__file__).parent / "peers"
_EXECUTOR: Final = "vllm_null_executor.NullExecutor"
_TITLES: Final = "VLLM::"
_CORE: Final = "VLLM::EngineCore"


@dataclass(frozen=True)
class Limits:
    """The settings of both servers. step_seconds: time that a step sleeps instead of computing."""

    num_streams: int
    tokens_each: int
    step_seconds: float

    def flags(self) -> list[str]:
        """Return the flags that tokend and vLLM share."""
        blocks_each = -(-self.tokens_each // BLOCK_SIZE) + 1
        return [
            *("--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(self.num_streams * blocks_each + 1)),
            *("--max-num-seqs", str(self.num_streams)),
            *("--max-num-batched-tokens", str(max(2048, 2 * self.num_streams))),
        ]


class Subject(Protocol):
    """A running server."""

    name: str
    url: str

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time since the start by process, including FRONT_END and ENGINE."""
        ...


class Ours:
    """The daemon with a null worker process."""

    name = "tokend"

    def __init__(self, stack: ExitStack, limits: Limits, flags: Sequence[str]) -> None:
        pace = ("--step-ms", str(1e3 * limits.step_seconds))
        command = (*NULL_DAEMON, *pace)
        words = [*limits.flags(), "--max-num-queued-reqs", "0", *flags]
        self._daemon = stack.enter_context(MeasuredDaemon(words, command))
        self.url = self._daemon.url

    def cpu_seconds(self) -> dict[str, float]:
        used = {
            title.removeprefix("tokend: "): each.cpu_seconds
            for title, each in usage_by_title(self._daemon.pid).items()
        }
        return used | {
            FRONT_END: _sum_of(used, "api "),
            ENGINE: _sum_of(used, "engine "),
        }


class VLLM:
    """`vllm serve` with a null executor inside EngineCore.

    python: interpreter that has vLLM. model: folder with a config and a tokenizer.
    """

    name = "vLLM"

    def __init__(self, stack: ExitStack, limits: Limits, python: str, model: str) -> None:
        self._null_cpu = Path(stack.enter_context(tempfile.TemporaryDirectory()), "cpu_seconds")
        self._null_cpu.write_text("0")
        variables = {
            "PYTHONPATH": str(_PEERS),
            "TOKEND_BENCH_STEP_SECONDS": str(limits.step_seconds),
            "TOKEND_BENCH_NULL_CPU": str(self._null_cpu),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        command = [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", PORT),
            *("--distributed-executor-backend", _EXECUTOR, "--disable-uvicorn-access-log"),
            *limits.flags(),
        ]
        spec = ServerSpec(self.name, command=tuple(command))
        self._server = stack.enter_context(StartedServer(spec))
        self.url = self._server.url

    def cpu_seconds(self) -> dict[str, float]:
        """Return CPU times; the front end is the started process, and the null executor's time is
        excluded."""
        used = {
            title: each.cpu_seconds
            for title, each in usage_by_title(self._server.pid, _TITLES).items()
        }
        null = float(self._null_cpu.read_text())
        return {
            FRONT_END: used[SUPERVISOR],
            ENGINE: _sum_of(used, _CORE) - null,
            "null model": null,
        }


def _sum_of(used: Mapping[str, float], prefix: str) -> float:
    return sum(seconds for title, seconds in used.items() if title.startswith(prefix))


# The figures of a window of streaming, limits relative to a peer, and the table.


LEAST_SHARE: Final = 0.8
"""Least allowed share of the slowest stream, relative to the median stream."""
API_RATIO: Final = 0.5
"""Most CPU time of our front end per token, relative to the peer."""
ENGINE_RATIO: Final = 1.0
"""Most CPU time of our engine per token, relative to the peer."""


@dataclass(frozen=True)
class Reading:
    """Counters of a server at one moment. cpu_seconds: since its start, by process. events: of its
    streams when tokens and steps were counted."""

    seconds: float
    cpu_seconds: Mapping[str, float]
    tokens: float
    steps: float
    events: int


@dataclass(frozen=True)
class Figures:
    """Figures of one window, or medians of several.

    tokens_per_event: 1 if every token had a separate event. least, middle: events of the slowest
    and of the median stream. cpu_ms: by process, per 1,000 streamed tokens. client_share: part of
    one core that the client used.
    """

    streams: float
    tokens_per_s: float
    tokens_per_step: float
    tokens_per_event: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    least_events: float
    middle_events: float
    engine_ms_per_step: float
    client_share: float
    cpu_ms: Mapping[str, float]

    @property
    def least_share(self) -> float:
        return self.least_events / self.middle_events

    def plain(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def figures_of(
    before: Reading, after: Reading, window: Window, client_cpu_seconds: float
) -> Figures:
    """Return the figures of a window in which every stream had events."""
    seconds, tokens = after.seconds - before.seconds, after.tokens - before.tokens
    steps = after.steps - before.steps
    used = {
        name: now - before.cpu_seconds[name]
        for name, now in after.cpu_seconds.items()
        if name in before.cpu_seconds
    }
    gaps = window.gaps or [float("nan")]
    return Figures(
        streams=len(window.events),
        tokens_per_s=tokens / seconds,
        tokens_per_step=tokens / steps,
        tokens_per_event=tokens / max(1, after.events - before.events),
        gap_ms_p50=1e3 * quantile(gaps, 0.5),
        gap_ms_p99=1e3 * quantile(gaps, 0.99),
        gap_ms_max=1e3 * max(gaps),
        least_events=min(window.events),
        middle_events=median(window.events),
        engine_ms_per_step=1e3 * used[ENGINE] / steps,
        client_share=client_cpu_seconds / seconds,
        cpu_ms={name: 1e6 * each / tokens for name, each in sorted(used.items())},
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of every figure."""
    plain = [each.plain() for each in rounds]
    found = {name: median(each[name] for each in plain) for name in plain[0] if name != "cpu_ms"}
    cpu_ms = {
        name: median(each.cpu_ms[name] for each in rounds)
        for name in rounds[0].cpu_ms
        if all(name in each.cpu_ms for each in rounds)
    }
    return Figures(**found, cpu_ms=cpu_ms)


def limits(ours: Sequence[Figures], peer: Sequence[Figures]) -> list[Limit]:
    """Return the limits; with a peer also those of median ratios over rounds."""
    least = min(each.least_share for each in ours)
    found = [
        Limit("events of the least stream / of the middle one", least, "at least", LEAST_SHARE)
    ]
    for name, bound in ((FRONT_END, API_RATIO), (ENGINE, ENGINE_RATIO)) if peer else ():
        ratio = median(
            mine.cpu_ms[name] / theirs.cpu_ms[name] for mine, theirs in zip(ours, peer, strict=True)
        )
        found.append(Limit(f"{name}: CPU for a token / the peer's", ratio, "at most", bound))
    return found


def table(title: str, columns: Mapping[str, Figures]) -> Table:
    """Return a table with a column for each server."""
    made = Table(title=title)
    made.add_column("")
    for name in columns:
        made.add_column(name, justify="right")
    for label, text in _ROWS:
        made.add_row(label, *(text(each) for each in columns.values()))
    names = dict.fromkeys(name for each in columns.values() for name in each.cpu_ms)
    for name in sorted(names, key=lambda each: (each not in (FRONT_END, ENGINE), each)):
        made.add_row(
            f"CPU ms / 1,000 tokens: {name}",
            *(
                f"{each.cpu_ms[name]:.2f}" if name in each.cpu_ms else ""
                for each in columns.values()
            ),
        )
    return made


_ROWS: Final[Sequence[tuple[str, Callable[[Figures], str]]]] = (
    ("streams", lambda each: f"{each.streams:.0f}"),
    ("tokens/s", lambda each: f"{each.tokens_per_s:,.0f}"),
    ("tokens a step", lambda each: f"{each.tokens_per_step:.0f}"),
    ("tokens an event", lambda each: f"{each.tokens_per_event:.3f}"),
    ("gap p50, ms", lambda each: f"{each.gap_ms_p50:.0f}"),
    ("gap p99, ms", lambda each: f"{each.gap_ms_p99:.0f}"),
    ("longest gap, ms", lambda each: f"{each.gap_ms_max:.0f}"),
    ("events a stream, least", lambda each: f"{each.least_events:.0f}"),
    ("events a stream, middle", lambda each: f"{each.middle_events:.0f}"),
    ("engine CPU ms a step", lambda each: f"{each.engine_ms_per_step:.2f}"),
    ("client's part of a core", lambda each: f"{each.client_share:.2f}"),
)


_OPEN_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 2.0
"""Time in which a server notices that all clients have disconnected."""
_FIRST_TOKEN: Final = 1_000
_TOKENS: Final = "vllm:generation_tokens_total"
_STEPS: Final = "vllm:iteration_tokens_total_count"


def main(words: Sequence[str]) -> None:
    """Measure, print the table, write the figures; raises TokendError for a limit missed."""
    options = _parse(words)
    with writable("--json", options.json) as files:
        rounds = _rounds(options)
        ours, *peers = rounds.values()
        judged = limits(ours, peers[0] if peers else ())
        columns = {name: medians(each) for name, each in rounds.items()}
        document = {
            "command": "python -m tests.benchmarks.frontend",
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "medians": {name: each.plain() for name, each in columns.items()},
            "rounds": {name: [one.plain() for one in each] for name, each in rounds.items()},
        }
        write(files, limits_json(judged, document))
    console = Console(width=100)
    console.print(table(_title(options), columns))
    console.print(limits_table(judged))
    check_limits("bench frontend", judged)


def prompts_of(number: int, length: int) -> list[list[int]]:
    """Return prompts of token ids, which differ from the first token on."""
    return [[_FIRST_TOKEN + each] + [_FIRST_TOKEN] * (length - 1) for each in range(number)]


def _rounds(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Measure the servers in alternation."""
    with ExitStack() as stack:
        subjects = _subjects(options, stack)
        rounds: dict[str, list[Figures]] = {each.name: [] for each in subjects}
        for number in range(options.rounds):
            for subject in subjects:
                print(f"round {number + 1}: {subject.name}", file=sys.stderr, flush=True)
                rounds[subject.name].append(asyncio.run(_measure(subject, options)))
    return rounds


async def _measure(subject: Subject, options: argparse.Namespace) -> Figures:
    prompts = prompts_of(options.streams, options.input_tokens)
    model = await asyncio.to_thread(first_model, subject.url)
    streams = Streams(subject.url, model, prompts, options.output_tokens)
    try:
        await streams.open(_OPEN_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)
        before, client = await _reading(subject, streams), time.process_time()
        window = await streams.watch(options.seconds)
        client = time.process_time() - client
        after = await _reading(subject, streams)
    finally:
        streams.close()
    await asyncio.sleep(_LEAVE_SECONDS)
    return figures_of(before, after, window, client)


async def _reading(subject: Subject, streams: Streams) -> Reading:
    """Read the CPU time, then the counts, so that every window includes one request for them."""
    seconds, used = time.monotonic(), subject.cpu_seconds()
    tokens, steps = await asyncio.to_thread(metrics_of, subject.url, _TOKENS, _STEPS)
    return Reading(seconds, used, tokens, steps, streams.num_events)


def _subjects(options: argparse.Namespace, stack: ExitStack) -> list[Subject]:
    limited = Limits(
        options.streams, options.input_tokens + options.output_tokens, options.step_ms / 1e3
    )
    subjects: list[Subject] = [Ours(stack, limited, options.serve_flags)]
    if options.peer_python:
        subjects.append(VLLM(stack, limited, options.peer_python, options.peer_model))
    return subjects


def _title(options: argparse.Namespace) -> str:
    return (
        f"{options.streams} streams, a step of {options.step_ms:g} ms, {options.seconds:g} s; "
        f"medians of {options.rounds}"
    )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.frontend", description=__doc__)
    parser.add_argument("--streams", type=at_least_one, default=1000, help="at once (1000)")
    parser.add_argument("--step-ms", type=from_zero_number, default=250.0, help="(250)")
    parser.add_argument("--seconds", type=positive, default=20.0, help="of each window (20)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="(3)")
    parser.add_argument("--input-tokens", type=at_least_one, default=32, help="(32)")
    parser.add_argument(
        "--output-tokens",
        type=at_least_one,
        default=4_000,
        help="of each stream, which ends earlier: when the window does (4000)",
    )
    parser.add_argument("--peer-python", metavar="PATH", help="of an environment with vLLM")
    parser.add_argument(
        "--peer-model", metavar="FOLDER", help="the same model's config and tokenizer, for vLLM"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: more flags of tokend serve")
    options = parser.parse_args(words)
    if bool(options.peer_python) != bool(options.peer_model):
        raise ConfigError("bench frontend: --peer-python and --peer-model go together")
    return options


if __name__ == "__main__":
    sys.exit(run(main))
