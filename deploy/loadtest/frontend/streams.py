"""Many open streams on one thread, of which only the events are counted.

Owns the connections, and of each the events and the gaps between them while somebody
measures. A client that understood what it reads would cost more than the servers.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from deploy.loadtest.soak.connection import request_bytes
from proto.errors import TokendError

PATH: Final = "/v1/completions"
_AT_ONCE: Final = 50
"""Connections that are opened together."""
_EVENT_END: Final = b"\n\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_GOOD: Final = b"HTTP/1.1 200"
_SHOWN_BYTES: Final = 300


@dataclass
class Window:
    """What came while it was open. events: of each stream. gaps: seconds between two reads of a
    stream that brought events."""

    events: list[int]
    gaps: list[float] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One request and its answer. begun, ended: called once each; failed: with the reason."""

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
        """Go away, as a client that has enough."""
        self._transport.abort()


class Streams:
    """As many as there are prompts, all open at once.

    max_tokens: of each; enough that none ends before the measurement does.
    """

    def __init__(
        self, url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        address = urlsplit(url)
        self._address = address.hostname, address.port
        fields = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        fields["temperature"] = 0
        self._requests = [request_bytes(PATH, fields | {"prompt": each}) for each in prompts]
        self._streams: list[Stream] = []
        self._num_begun = 0
        self._trouble = ""
        self._changed = asyncio.Event()

    @property
    def num_events(self) -> int:
        """Of all of them, since they were opened."""
        return sum(each.num_events for each in self._streams)

    async def open(self, seconds: float) -> None:
        """Return when each has had an event; raises TokendError after so many seconds."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                for begin in range(0, len(self._requests), _AT_ONCE):
                    some = self._requests[begin : begin + _AT_ONCE]
                    opened = await asyncio.gather(
                        *(
                            loop.create_connection(self._stream(each), *self._address)
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
        """What comes in this time; raises TokendError when a stream ends in it."""
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
        """Raise TokendError if a stream has ended, or was none."""
        if self._trouble:
            raise TokendError(self._trouble)

    def close(self) -> None:
        for each in self._streams:
            each.close()

    def _stream(self, request: bytes) -> Callable[[], Stream]:
        return lambda: Stream(request, self._on_begun, self._on_ended, self._on_trouble)

    def _on_begun(self) -> None:
        self._num_begun += 1
        self._changed.set()

    def _on_ended(self) -> None:
        self._on_trouble("a stream ended while it was measured: more --output-tokens are needed")

    def _on_trouble(self, text: str) -> None:
        self._trouble = self._trouble or text
        self._changed.set()
