"""Requests that may be refused, offered in a closed loop or at a fixed rate."""

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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from deploy.bench.datasets import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID
from deploy.bench.servers import Program
from proto.errors import TokendError

_UNLIMITED: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None)
_PATIENCE_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Recipe:
    """Tokens of a request; prompts are random, none like another."""

    input_tokens: int = 32
    output_tokens: int = 16

    def body(self, rng: random.Random) -> dict[str, Any]:
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
class Offer:
    """What came of one request; seconds from when it was sent.

    status: 0 when there was no answer. answered: to the status. retry_after: the header.
    first_token: to the first event, of those accepted. error: of a stream that broke off.
    """

    status: int = 0
    answered: float = 0.0
    first_token: float = 0.0
    retry_after: str = ""
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """The offers of a time, and how long it took until the last of them was over."""

    offers: Sequence[Offer]
    seconds: float

    @property
    def accepted(self) -> list[Offer]:
        return [each for each in self.offers if each.status == 200 and not each.error]

    @property
    def refused(self) -> list[Offer]:
        return [each for each in self.offers if each.status == 503]

    @property
    def failed(self) -> list[Offer]:
        """Neither answered in full nor refused."""
        return [each for each in self.offers if each.error or each.status not in (200, 503)]

    @property
    def requests_per_second(self) -> float:
        """Answered in full."""
        return len(self.accepted) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(len(each.token_ids) for each in self.accepted) / self.seconds


class Customers:
    """Clients of one daemon. seed: of their prompts."""

    def __init__(self, client: httpx.AsyncClient, recipe: Recipe, seed: int = 0) -> None:
        self._client = client
        self._recipe = recipe
        self._rng = random.Random(seed)

    async def keep(self, number: int, seconds: float) -> Outcome:
        """So many requests are always under way; who is refused comes again soon."""
        offers: list[Offer] = []
        started = time.monotonic()

        async def one() -> None:
            while time.monotonic() - started < seconds:
                offers.append(await self.offer())
                if offers[-1].status == 503:
                    await asyncio.sleep(_PAUSE_SECONDS)

        await asyncio.gather(*(one() for _ in range(number)))
        return Outcome(offers, time.monotonic() - started)

    async def flood(
        self, per_second: float, seconds: float, tick: Callable[[], None] = lambda: None
    ) -> Outcome:
        """New ones at a fixed rate, whatever becomes of the others; tick: called every second."""
        started = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        offers: list[Offer] = []

        async def one() -> None:
            offers.append(await self.offer())

        next_tick = 0.0
        for number in itertools.count():
            due = number / per_second
            if due >= seconds:
                break
            await asyncio.sleep(started + due - time.monotonic())
            if due >= next_tick:
                next_tick += 1.0
                tick()
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return Outcome(offers, time.monotonic() - started)

    async def offer(self) -> Offer:
        """One request to its end; what goes wrong is part of what came of it."""
        offer, started = Offer(), time.monotonic()
        try:
            await self._exchange(offer, started)
        except httpx.HTTPError as error:
            offer.error = f"{type(error).__name__}: {error}"
        return offer

    async def _exchange(self, offer: Offer, started: float) -> None:
        body = self._recipe.body(self._rng)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            offer.status, offer.answered = response.status_code, time.monotonic() - started
            offer.retry_after = response.headers.get("retry-after", "")
            done = response.status_code != 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    offer.first_token = offer.first_token or time.monotonic() - started
                    _take(json.loads(line.removeprefix("data: ")), offer)
            if not done:
                offer.error = "the stream ended without [DONE]"


@asynccontextmanager
async def customers(
    url: str, recipe: Recipe, seed: int = 0, headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Customers]:
    """Clients of the daemon at this URL. headers: of all their requests."""
    async with httpx.AsyncClient(
        base_url=url, timeout=_PATIENCE_SECONDS, limits=_UNLIMITED, headers=dict(headers)
    ) as client:
        yield Customers(client, recipe, seed)


def _take(event: dict[str, Any], offer: Offer) -> None:
    if "error" in event:
        offer.error = event["error"]["message"]
    for choice in event.get("choices", ()):
        offer.token_ids += choice.get("token_ids") or []


# Clients that connect, ask, and leave before they have an answer.


RESET_WHEN_CLOSED: Final = struct.pack("ii", 1, 0)


async def churn(
    url: str,
    recipe: Recipe,
    per_second: float,
    longest_stay: float,
    over: Callable[[], bool],
    seed: int = 0,
) -> int:
    """At this rate until `over`; returns how many came.

    longest_stay: seconds; each stays for a time of its own up to that, once it has asked.
    """
    rng = random.Random(seed)
    started = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    for number in itertools.count():
        await asyncio.sleep(started + number / per_second - time.monotonic())
        if over():
            await asyncio.gather(*tasks)
            return number
        stay = rng.uniform(0.0, longest_stay)
        task = asyncio.create_task(_come_and_go(url, recipe, rng, stay))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    raise AssertionError("unreachable")


async def _come_and_go(url: str, recipe: Recipe, rng: random.Random, seconds: float) -> None:
    address = urlsplit(url)
    content = json.dumps(recipe.body(rng)).encode()
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
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_WHEN_CLOSED)


# A server that reads what comes on a connection and closes it: the control of an overload run.
#
# What clients who come and leave take from the others beside it, they and the kernel take by
# themselves. `python -m` this module prints its port and serves until it is ended.


_BACKLOG: Final = 512
_READ_BYTES: Final = 64 << 10


class ClosingServer(Program):
    """One of these in a process of its own; `url` is where it listens."""

    def __init__(self) -> None:
        process = subprocess.Popen((sys.executable, "-P", "-m", __name__), stdout=subprocess.PIPE)
        super().__init__(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip().decode()
        if not port:
            raise TokendError("the control server did not start")
        self.url = f"http://127.0.0.1:{port}"


def serve(listener: socket.socket) -> None:
    """One connection after the other, for ever."""
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.recv(_READ_BYTES)
            except ConnectionError:
                continue  # it was reset: gone all the same


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listening:
        print(listening.getsockname()[1], flush=True)
        serve(listening)
