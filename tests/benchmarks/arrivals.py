"""Clients of the overload benchmark: requests that may be refused, and clients that disconnect."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx

from deploy.bench.datasets import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID
from deploy.bench.servers import OwnedProcess
from proto.errors import TokendError

if TYPE_CHECKING:  # this file also runs as a program, outside of the package
    from tests.benchmarks.usage import MemoryLog

_UNLIMITED: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_ANSWER_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True)
class RequestShape:
    """Tokens of a request. Prompts are random and differ."""

    input_tokens: int = 32
    output_tokens: int = 16

    def make_body(self, rng: random.Random) -> dict[str, Any]:
        ids = range(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID)
        return {
            "prompt": rng.choices(ids, k=self.input_tokens),
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


@dataclass
class Attempt:
    """Result of one request. Times: seconds since it was sent.

    status: HTTP status; 0 without an answer. answered: time of the status. retry_after: header.
    first_token: time of the first event, if accepted. error: of a stream that failed.
    """

    status: int = 0
    answered: float = 0.0
    first_token: float = 0.0
    retry_after: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class PartResult:
    """Results of a part of the run, and seconds until the last request had ended."""

    attempts: Sequence[Attempt]
    seconds: float

    @property
    def accepted(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.status == 200 and not attempt.error]

    @property
    def refused(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.status == 503]

    @property
    def failed(self) -> list[Attempt]:
        """Requests that were neither answered completely nor refused."""
        return [
            attempt
            for attempt in self.attempts
            if attempt.error or attempt.status not in (200, 503)
        ]

    @property
    def requests_per_second(self) -> float:
        """Completely answered requests per second."""
        return len(self.accepted) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(len(attempt.token_ids) for attempt in self.accepted) / self.seconds


class OverloadClients:
    """Sends requests to one daemon. seed: of the prompts."""

    def __init__(self, client: httpx.AsyncClient, shape: RequestShape, seed: int = 0) -> None:
        self._client = client
        self._shape = shape
        self._rng = random.Random(seed)

    async def run_closed_loop(self, number: int, seconds: float) -> PartResult:
        """Keep `number` requests open; a refused client sends again after a pause."""
        attempts: list[Attempt] = []
        started = time.monotonic()

        async def one() -> None:
            while time.monotonic() - started < seconds:
                attempts.append(await self.send_request())
                if attempts[-1].status == 503:
                    await asyncio.sleep(_PAUSE_SECONDS)

        await asyncio.gather(*(one() for _ in range(number)))
        return PartResult(attempts, time.monotonic() - started)

    async def run_open_loop(
        self, per_second: float, seconds: float, memory: "MemoryLog | None" = None
    ) -> PartResult:
        """Send requests at a fixed rate. memory: sampled every second."""
        started = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        attempts: list[Attempt] = []

        async def one() -> None:
            attempts.append(await self.send_request())

        next_sample = 0.0
        for number in itertools.count():
            due = number / per_second
            if due >= seconds:
                break
            await asyncio.sleep(started + due - time.monotonic())
            if memory is not None and due >= next_sample:
                next_sample += 1.0
                memory.sample()
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return PartResult(attempts, time.monotonic() - started)

    async def send_request(self) -> Attempt:
        """Send a request and read its answer; errors are part of the result."""
        attempt, started = Attempt(), time.monotonic()
        try:
            await self._send(attempt, started)
        except httpx.HTTPError as error:
            attempt.error = f"{type(error).__name__}: {error}"
        return attempt

    async def _send(self, attempt: Attempt, started: float) -> None:
        body = self._shape.make_body(self._rng)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            attempt.status, attempt.answered = response.status_code, time.monotonic() - started
            attempt.retry_after = response.headers.get("retry-after", "")
            done = response.status_code != 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    attempt.first_token = attempt.first_token or time.monotonic() - started
                    _note_event(json.loads(line.removeprefix("data: ")), attempt)
            if not done:
                attempt.error = "the stream ended without [DONE]"


@asynccontextmanager
async def overload_clients(
    url: str, shape: RequestShape, seed: int = 0, headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[OverloadClients]:
    """Open the clients of a daemon. headers: of all requests."""
    async with httpx.AsyncClient(
        base_url=url, timeout=_ANSWER_SECONDS, limits=_UNLIMITED, headers=dict(headers)
    ) as client:
        yield OverloadClients(client, shape, seed)


def _note_event(event: dict[str, Any], attempt: Attempt) -> None:
    if "error" in event:
        attempt.error = event["error"]["message"]
    for choice in event.get("choices", ()):
        attempt.token_ids += choice.get("token_ids") or []


# ---- Clients that disconnect before they have an answer ----


RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


async def churn(
    url: str,
    shape: RequestShape,
    per_second: float,
    max_stay: float,
    seconds: float,
    seed: int = 0,
) -> int:
    """Send requests at a fixed rate from clients that disconnect; return their number.

    max_stay: seconds until a client disconnects, at most; random for each.
    """
    rng = random.Random(seed)
    started = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    for number in itertools.count():
        await asyncio.sleep(started + number / per_second - time.monotonic())
        if time.monotonic() >= started + seconds:
            await asyncio.gather(*tasks)
            return number
        stay = rng.uniform(0.0, max_stay)
        task = asyncio.create_task(_send_and_disconnect(url, shape, rng, stay))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    raise AssertionError("unreachable")


async def _send_and_disconnect(
    url: str, shape: RequestShape, rng: random.Random, seconds: float
) -> None:
    address = urlsplit(url)
    content = json.dumps(shape.make_body(rng)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as client, contextlib.suppress(ConnectionError):
        client.setblocking(False)
        await loop.sock_connect(client, (address.hostname, address.port))
        await loop.sock_sendall(client, head.encode() + content)
        await asyncio.sleep(seconds)
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)


# ---- The control: a server that only closes connections ----
#
# Its effect on other clients is the cost of the disconnecting clients and of the kernel alone.
# `python -m` this module prints its port and serves until it is killed.


_BACKLOG: Final = 512
_READ_BYTES: Final = 64 << 10


class ClosingServer(OwnedProcess):
    """A server process that reads from each connection once and closes it."""

    def __init__(self) -> None:
        process = subprocess.Popen((sys.executable, "-P", __file__), stdout=subprocess.PIPE)
        super().__init__(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip().decode()
        if not port:
            raise TokendError("the control server did not start")
        self.url = f"http://127.0.0.1:{port}"


def serve(listener: socket.socket) -> None:
    """Accept connections one after the other, forever."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.recv(_READ_BYTES)
            except ConnectionError:
                continue  # the client has reset it


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listening:
        print(listening.getsockname()[1], flush=True)
        serve(listening)
