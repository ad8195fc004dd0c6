"""HTTP client of the load test: streamed requests over keep-alive connections.

It time-stamps each chunk in the transport's callback, and costs little CPU time (see
docs/benchmarks/client.md). `BenchClient.send_request` sends one request.
"""

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from deploy.bench.stream import RequestResult, StreamedResponse
from proto.errors import ConfigError, TokendError


class HttpConnection(asyncio.Protocol):
    """A keep-alive connection, for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: StreamedResponse | None = None
        self._done: asyncio.Future[None] | None = None
        self.used = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, response: StreamedResponse) -> None:
        """Send a request and read its response to the end; raises TokendError or OSError."""
        if self._transport is None:
            raise ConnectionResetError("the connection was closed before the request was sent")
        self._response = response
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._done
        finally:
            self._response = self._done = None
            self.used = True
            if not (response.parser.complete and response.parser.reusable):
                self.close()

    def close(self) -> None:
        """Close at once, without sending pending data."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        response = self._response
        if response is None:
            self.close()  # no request is open
            return
        try:
            response.feed(data, now)
        except TokendError as error:
            self._finish(error)
        else:
            if response.parser.complete:
                self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._response is None or error is not None:
            self._finish(error)
            return
        try:
            self._response.end(time.perf_counter())
        except TokendError as incomplete:
            self._finish(incomplete)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """A server. url: without /v1. timeout: seconds. fields: further fields of every request."""

    url: str
    model: str
    api_key: str = ""
    timeout: float = 600.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRequest:
    """A request. content: the field `prompt` or `messages`.

    checked: whether it is sampled greedily, and its answer compared with others to the same.
    job: agent job of the request, sent to the server; "" for none. is_last_step: of that job.
    keep_text: whether the text of the answer is needed even if it is not compared.
    """

    path: str
    content: Mapping[str, Any]
    output_tokens: int
    checked: bool = False
    job: str = ""
    is_last_step: bool = False
    keep_text: bool = False


def base_url(text: str) -> str:
    """Return the URL of a server without /v1; raises ConfigError if it is invalid."""
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"--url {text}: not a URL such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


class BenchClient:
    """Sends requests to one server, in one event loop, and keeps connections open."""

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
        self._idle: list[HttpConnection] = []

    async def send_request(self, request: BenchRequest, *, waited: float = 0.0) -> RequestResult:
        """Send a request and read its answer; errors are part of the result."""
        result = RequestResult(request.output_tokens, request.keep_text or request.checked, waited)
        encoded = self._encode(request)
        result.started = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._send(encoded, result)
        except TimeoutError:
            result.error = f"not complete after {self.target.timeout:g} s"
        except (TokendError, OSError) as error:
            result.error = result.error or str(error) or type(error).__name__
        return result

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, encoded: bytes, result: RequestResult) -> None:
        while True:
            connection = await self._connection()
            reused = connection.used
            response = StreamedResponse(result)
            try:
                await connection.send(encoded, response)
            except (TokendError, OSError):
                # A server may close an idle connection at the moment it is used again.
                if reused and not response.parser.begun:
                    continue
                raise
            if connection.open:
                self._idle.append(connection)
            return

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            HttpConnection, self._host, self._port, ssl=self._tls
        )
        return connection

    def _encode(self, request: BenchRequest) -> bytes:
        body = {
            "model": self.target.model,
            **request.content,
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.target.fields,
        }
        if request.checked:
            body["temperature"] = 0
        head = f"POST {self._prefix}{request.path} HTTP/1.1\r\n{self._head}"
        if request.job:
            body["agent_hint"] = {"job_id": request.job, "is_last_step": request.is_last_step}
            head += f"X-Session-ID: {request.job}\r\n"
        content = json.dumps(body, separators=(",", ":")).encode()
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# ---- Single requests ----
#
# With the client of the standard library: these requests are sent while a server starts on the same
# cores, and a client that loads certificates first would slow down the start that is measured.


_ANSWER_SECONDS: Final = 30.0


def get(url: str, api_key: str = "", timeout: float = _ANSWER_SECONDS) -> tuple[int, bytes]:
    """Send a GET request and return status and body; raises OSError or HTTPException."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.netloc.rpartition("@")[2], timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", parts.path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def is_up(url: str, timeout: float) -> bool:
    """Whether a GET request is answered with status 200."""
    try:
        return get(url, timeout=timeout)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def not_reached(url: str, error: Exception, remedy: str = "") -> str:
    """Return the message about a server with which no connection was made. remedy: if none runs."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"the certificate of {url} is not trusted ({error}): if a private authority has signed "
            "it, set SSL_CERT_FILE to the file with the certificate of that authority"
        )
    reason = getattr(error, "strerror", None) or error
    return f"no server answers at {url} ({reason})" + (f": {remedy}" if remedy else "")


def first_model(url: str, api_key: str = "") -> str:
    """Return the first model in /v1/models; raises TokendError."""
    try:
        status, body = get(f"{url}/v1/models", api_key)
        if status == 401:
            what = "refuses this API key" if api_key else "needs an API key"
            raise TokendError(f"{url}/v1/models {what}: set --api-key or TOKEND_API_KEY")
        return str(json.loads(body)["data"][0]["id"])
    except OSError as error:
        raise TokendError(
            not_reached(url, error, "start one with `tokend serve`, or name another with --url")
        ) from None
    except (http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise TokendError(f"{url}/v1/models lists no model: {error!r}") from None
