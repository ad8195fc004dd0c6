"""Requests to one server over as many keep-alive connections as are under way."""

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from deploy.bench.stream import Exchange, StreamedAnswer
from proto.errors import ConfigError, TokendError

# A keep-alive connection that hands what arrives to the answer it belongs to, at once.


class StreamConnection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: StreamedAnswer | None = None
        self._over: asyncio.Future[None] | None = None
        self.used = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, answer: StreamedAnswer) -> None:
        """Until the answer is complete; raises TokendError or OSError."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed before anything was asked")
        self._answer = answer
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._over
        finally:
            self._answer = self._over = None
            self.used = True
            if not (answer.response.complete and answer.response.reusable):
                self.close()

    def close(self) -> None:
        """Without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self._answer
        if answer is None:
            self.close()  # nobody asked
            return
        try:
            answer.take(data, now)
        except TokendError as error:
            self._finish(error)
        else:
            if answer.response.complete:
                self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is None or error is not None:
            self._finish(error)
            return
        try:
            self._answer.end(time.perf_counter())
        except TokendError as broken:
            self._finish(broken)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """A server. url: without /v1. fields: that each request has beside its own."""

    url: str
    model: str
    api_key: str = ""
    timeout: float = 600.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """What to ask. content: the prompt or the messages.

    checked: it is asked greedily, and its answer is compared with others to the same.
    job: whose turn it is, told to the server; empty for nobody's. is_last_step: of that job.
    """

    path: str
    content: Mapping[str, Any]
    output_tokens: int
    checked: bool = False
    job: str = ""
    is_last_step: bool = False


def base_url(text: str) -> str:
    """A URL as people give it, without /v1; raises ConfigError."""
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"--url {text}: not a URL such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


class Client:
    """Belongs to one event loop. Connections are made as they are needed, and kept."""

    def __init__(self, target: Target) -> None:
        self.target = target
        parts = urlsplit(target.url)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        self._head = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n{key}"
        )
        self._idle: list[StreamConnection] = []

    async def ask(self, ask: Ask, *, keep_text: bool = False, waited: float = 0.0) -> Exchange:
        """One request to its end; what goes wrong is part of what came of it."""
        exchange = Exchange(ask.output_tokens, keep_text or ask.checked, waited)
        request = self._request(ask)
        exchange.started = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._exchange(request, exchange)
        except TimeoutError:
            exchange.error = f"no end after {self.target.timeout:g} s"
        except (TokendError, OSError) as error:
            exchange.error = exchange.error or str(error) or type(error).__name__
        return exchange

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, exchange: Exchange) -> None:
        while True:
            connection = await self._connection()
            again = connection.used
            answer = StreamedAnswer(exchange)
            try:
                await connection.ask(request, answer)
            except (TokendError, OSError):
                # A server may close an idle connection at the moment it is used again.
                if again and not answer.response.begun:
                    continue
                raise
            if connection.open:
                self._idle.append(connection)
            return

    async def _connection(self) -> StreamConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            StreamConnection, self._host, self._port, ssl=self._tls
        )
        return connection

    def _request(self, ask: Ask) -> bytes:
        body = {
            "model": self.target.model,
            **ask.content,
            "max_tokens": ask.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.target.fields,
        }
        if ask.checked:
            body["temperature"] = 0
        head = f"POST {self._prefix}{ask.path} HTTP/1.1\r\n{self._head}"
        if ask.job:
            body["agent_hint"] = {"job_id": ask.job, "is_last_step": ask.is_last_step}
            head += f"X-Session-ID: {ask.job}\r\n"
        content = json.dumps(body, separators=(",", ":")).encode()
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# What is asked of a server beside the load: whether it is up, and what it serves.
#
# With the standard library's client: it is asked while a server starts on the same cores, and a
# client that reads certificates first would be part of what is measured.


_ANSWER_SECONDS: Final = 30.0


def get(url: str, api_key: str = "", timeout: float = _ANSWER_SECONDS) -> tuple[int, bytes]:
    """(status, body); raises OSError or HTTPException when there is no answer."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.netloc.rpartition("@")[2], timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def is_up(url: str, timeout: float) -> bool:
    """Whether the answer is a 200."""
    try:
        return get(url, timeout=timeout)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def first_model(url: str, api_key: str = "") -> str:
    """What the server says it serves; raises TokendError."""
    try:
        _, body = get(f"{url}/v1/models", api_key)
        return str(json.loads(body)["data"][0]["id"])
    except (
        *(OSError, http.client.HTTPException),
        *(ValueError, KeyError, IndexError, TypeError),
    ) as error:
        raise TokendError(f"{url}/v1/models does not name a model: {error!r}") from None
