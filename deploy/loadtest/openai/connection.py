"""A keep-alive connection that hands what arrives to the answer it belongs to, at once."""

import asyncio
import time
from typing import cast

from deploy.loadtest.openai.answer import StreamedAnswer
from proto.errors import TokendError


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
