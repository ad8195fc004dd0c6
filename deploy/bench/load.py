"""Runs a load: sends sessions of requests to a server and records the results.

    closed loop   `concurrency` clients; each sends its next request when it has its answer
    open loop     sessions begin at given times, whether or not earlier ones have ended

Start reading at `measure`.
"""

import asyncio
import contextlib
import gc
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TextIO

from deploy.bench.client import BenchClient, BenchRequest, Target
from deploy.bench.datasets import MakePrompt, RequestSizes, Session, SessionSeeds, prompt_sessions
from deploy.bench.stream import RequestResult
from proto.errors import TokendError

# ---- When the sessions of an open loop begin ----


def gamma_arrivals(
    rate: float, burstiness: float, seed: int, number: int | None
) -> Iterable[float]:
    """Return times of arrival, in seconds from the start; the same for the same seed.

    The mean rate is `rate` per second. The gaps are gamma distributed with shape `burstiness`:
    1 is a Poisson process, less is burstier, more is more regular, infinity is a constant gap.
    A known number of arrivals is scaled so that the last one is at number / rate, as in
    `vllm bench serve`; otherwise the rate of a short run would depend on chance.
    """
    gaps = _gaps(rate, burstiness, random.Random(f"arrivals {seed}"))
    if number is None:
        return itertools.accumulate(gaps)
    arrivals = list(itertools.accumulate(itertools.islice(gaps, number)))
    scale = number / rate / arrivals[-1]
    return [arrival * scale for arrival in arrivals]


def ramped(arrivals: Iterable[float], seconds: float) -> Iterator[float]:
    """Delay arrivals as if their rate grew linearly from 0 within `seconds`.

    The arrival at time s of a constant rate moves to the time t at which the integral of the
    growing rate is as large: t² / (2 seconds) = s during the ramp, t - seconds / 2 = s after it.
    """
    for arrival in arrivals:
        in_ramp = arrival < seconds / 2
        yield math.sqrt(2 * seconds * arrival) if in_ramp else arrival + seconds / 2


def _gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    while True:
        if math.isinf(burstiness):
            yield 1 / rate
        else:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


# ---- One run ----

_MIN_SECONDS: Final = 1e-9
"""Minimum of a run's duration, so that a run without an answer has rates of 0."""
_NUM_PREPARED: Final = 1_000
"""Sessions whose prompts are created before the clock starts."""
_WARM_UP_TOKENS: Final = 64
_WARM_UP_OUTPUT_TOKENS: Final = 16
_DRAW_SECONDS: Final = 0.25


@dataclass(frozen=True)
class LoadPattern:
    """Speed and size of a load.

    concurrency: maximum requests at the same time; None for no limit (open loop only).
    arrivals: seconds at which sessions begin; None for a closed loop.
    ramp_seconds: time within which the clients of a closed loop start, one after the other.
    max_requests, duration: the run ends at the first of these limits, and then waits for open
        requests.
    """

    concurrency: int | None = None
    arrivals: Iterable[float] | None = None
    ramp_seconds: float = 0.0
    max_requests: float = float("inf")
    duration: float = float("inf")


@dataclass
class LoadResult:
    """Results of a run, also while it runs.

    checked: requests whose answers are compared, with their results.
    seconds: from the start to the end of the last answer.
    cpu_seconds: CPU time of this process, the client.
    num_sent, num_failed: requests. num_tokens: output tokens of complete answers.
    """

    results: list[RequestResult] = field(default_factory=list)
    checked: list[tuple[BenchRequest, RequestResult]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_sent: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    def note_end(self, request: BenchRequest, result: RequestResult) -> None:
        self.results.append(result)
        self.num_failed += bool(result.error)
        self.num_tokens += result.output_tokens
        if request.checked and not result.error:
            self.checked.append((request, result))

    def describe_progress(self, seconds: float) -> str:
        """Return the counts in words; tokens of open requests are not included."""
        num_ended = len(self.results)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        rate = self.num_tokens / seconds if seconds else 0.0
        in_flight = self.num_sent - num_ended
        return f"{num_ended} done, {in_flight} in flight{failed}, {rate:.0f} tokens/s"


def measure(
    target: Target,
    sessions: Iterator[Session],
    pattern: LoadPattern,
    name: str = "",
    terminal: TextIO | None = None,
) -> LoadResult:
    """Run a load with new connections. Failed requests are part of the result.

    terminal: stream for a progress bar with this name; nothing is shown if it is no terminal.
    """
    return asyncio.run(_measure(target, sessions, pattern, name, terminal))


async def _measure(
    target: Target,
    sessions: Iterator[Session],
    pattern: LoadPattern,
    name: str,
    terminal: TextIO | None,
) -> LoadResult:
    client = BenchClient(target)
    generator = LoadGenerator(client, sessions, pattern)
    drawing = None
    if terminal is not None and terminal.isatty():
        drawing = asyncio.create_task(_draw_bar(name, pattern, generator.result, terminal))
    try:
        return await generator.run()
    finally:
        client.close()
        if drawing is not None:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exempt existing objects (prompts) from garbage collection, which would delay requests."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class LoadGenerator:
    """Sends the requests of one run."""

    def __init__(
        self, client: BenchClient, sessions: Iterator[Session], pattern: LoadPattern
    ) -> None:
        self.result = LoadResult()
        self._client = client
        self._sessions = sessions
        self._pattern = pattern
        self._num_begun = 0
        self._started_at = self._ended_at = 0.0  # seconds of the performance counter
        limit = pattern.concurrency if pattern.arrivals is not None else None
        self._slots: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        )

    async def run(self) -> LoadResult:
        """Run the load to its end; prompts of many sessions are made before the clock starts."""
        pattern, sessions, result = self._pattern, self._sessions, self.result
        prepared = list(itertools.islice(sessions, int(min(pattern.max_requests, _NUM_PREPARED))))
        self._sessions = itertools.chain(prepared, sessions)
        with frozen_heap():
            cpu, self._started_at = time.process_time(), time.perf_counter()
            if pattern.arrivals is None:
                number = pattern.concurrency or 1
                step = pattern.ramp_seconds / number
                await asyncio.gather(*(self._run_client(index * step) for index in range(number)))
            else:
                await self._run_open_loop(pattern.arrivals)
            result.seconds = max(self._ended_at - self._started_at, _MIN_SECONDS)
            result.cpu_seconds = time.process_time() - cpu
        return result

    async def _run_open_loop(self, arrivals: Iterable[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for due in arrivals:
                if due > self._pattern.duration or not self._may_send():
                    break
                delay = self._started_at + due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                session = next(self._sessions, None)
                if session is None:
                    break
                group.create_task(self._run_session(session))
                await asyncio.sleep(0)  # it counts its first request before the next arrival

    async def _run_client(self, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        while self._may_send():
            session = next(self._sessions, None)
            if session is None:
                return
            await self._run_session(session)

    async def _run_session(self, session: Session) -> None:
        answer = None
        with contextlib.suppress(StopIteration):
            while self._may_send():
                result = await self._send(session.send(answer))
                if result.error:
                    return  # later requests would contain the missing answer
                answer = result.text

    async def _send(self, request: BenchRequest) -> RequestResult:
        self._num_begun += 1
        due = time.perf_counter()
        async with self._slots:
            self.result.num_sent += 1
            waited = time.perf_counter() - due
            result = await self._client.send_request(request, waited=waited)
        self._ended_at = time.perf_counter()
        self.result.note_end(request, result)
        return result

    def _may_send(self) -> bool:
        timed_out = time.perf_counter() - self._started_at >= self._pattern.duration
        return self._num_begun < self._pattern.max_requests and not timed_out


async def _draw_bar(name: str, pattern: LoadPattern, result: LoadResult, terminal: TextIO) -> None:
    """Draw a progress bar, only four times a second: drawing costs CPU time."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    started_at = time.monotonic()
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=terminal, highlight=False),
        auto_refresh=False,
        transient=True,
    ) as bars:
        task = bars.add_task(name, total=1.0, note="")
        while True:
            seconds = time.monotonic() - started_at
            share = max(len(result.results) / pattern.max_requests, seconds / pattern.duration)
            note = result.describe_progress(seconds)
            bars.update(task, completed=min(share, 1.0), note=note)
            bars.refresh()
            await asyncio.sleep(_DRAW_SECONDS)


# ---- Short loads: warm-up and first token ----


def warm_up(target: Target, make_prompt: MakePrompt, number: int, *, chat: bool = False) -> None:
    """Send short requests, all at once; raises TokendError if one of them fails."""
    if not number:
        return
    sizes = RequestSizes(_WARM_UP_TOKENS, _WARM_UP_OUTPUT_TOKENS)
    sessions = prompt_sessions(SessionSeeds(seed=-1), sizes, make_prompt, chat=chat)
    pattern = LoadPattern(concurrency=number, max_requests=number)
    for result in measure(target, sessions, pattern).results:
        if result.error:
            raise TokendError(f"{target.url}: a warm-up request failed: {result.error}")


def first_token_time(target: Target, make_prompt: MakePrompt, seed: int) -> float:
    """Send a short request and return the time of its first token; raises TokendError.

    Seconds of the performance counter, like `StartedServer.started_at`.
    """
    sizes = RequestSizes(_WARM_UP_TOKENS, 1)
    sessions = prompt_sessions(SessionSeeds(seed), sizes, make_prompt)
    (result,) = measure(target, sessions, LoadPattern(concurrency=1, max_requests=1)).results
    if result.error:
        raise TokendError(f"{target.url}: {result.error}")
    return result.first
