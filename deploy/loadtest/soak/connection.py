"""A keep-alive HTTP/1.1 connection that costs its client next to nothing.

For a load that is to keep a server busy from the same machine: requests are bytes made
beforehand, and of an answer only the status and the length are understood.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

_HEAD_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_MAX_ANSWER_BYTES: Final = 1 << 20


class AnswerError(Exception):
    """The server did not answer, or not with what was asked for."""


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """A POST of this body as JSON."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: tokend\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Connection:
    """One request at a time; opened by the first, and again after `drop`."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> bytes:
        """The body of the answer, chunks with their sizes; raises AnswerError."""
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
        """Send it and go away: at once, or when the answer begins."""
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
        """Close without waiting for anything."""
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
