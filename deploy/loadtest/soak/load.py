"""Short requests over keep-alive connections, many at once, each after the other's answer.

Owns the counts and the latencies since they were last taken.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final

from deploy.loadtest.soak.connection import AnswerError, Connection, request_bytes

PATH: Final = "/v1/completions"
_EVERY_STREAMED: Final = 8
_EVERY_LEFT: Final = 64
_LEFT_TOKENS: Final = 200
"""Enough that something is still to come when the client goes away."""
_MAX_FAILURES: Final = 100
_PROMPTS: Final = (
    "The sea is",
    "Once upon a time there was a lighthouse",
    "1 2 3 4 5",
    "In the year 1900 the keeper wrote in his log every evening, whatever the weather was",
)


class Load:
    """connections: that ask at once. over: says when no request is to follow any more."""

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
        """Until it is over, or has failed too often."""
        await asyncio.gather(*(self._ask_on() for _ in range(self._num_connections)))

    def take_latencies(self) -> list[float]:
        """Seconds of the requests since the last call."""
        taken, self._latencies = self._latencies, []
        return taken

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
    """Requests, and what a good answer to each contains; without end."""
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
