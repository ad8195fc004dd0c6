"""Requests to one server over as many keep-alive connections as are under way."""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from deploy.loadtest.openai.answer import StreamedAnswer
from deploy.loadtest.openai.connection import StreamConnection
from deploy.loadtest.openai.exchange import Exchange
from proto.errors import ConfigError, TokendError

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
