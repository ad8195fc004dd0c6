"""From the bytes of a streamed answer to its exchange."""

from deploy.loadtest.openai.events import EventSplitter
from deploy.loadtest.openai.exchange import Exchange
from deploy.loadtest.openai.response import ResponseReader
from proto.openai_stream import decode_event

_DONE = b"[DONE]"
_SHOWN_CHARACTERS = 300


class StreamedAnswer:
    """One answer in the making; whatever goes wrong becomes the error of the exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self.response = ResponseReader()
        self._exchange = exchange
        self._splitter = EventSplitter()
        self._refusal: list[bytes] = []
        self._done = False

    def take(self, data: bytes, now: float) -> None:
        """Bytes from the socket; raises TokendError when they make no sense."""
        body = self.response.feed(data)
        if body:
            if self.response.status == 200:
                self._note(self._splitter.feed(body), now)
            else:
                self._refusal.append(body)
        if self.response.complete:
            self._conclude(now)

    def end(self, now: float) -> None:
        """The connection is closed; raises TokendError when something is missing."""
        self.response.end()
        self._conclude(now)

    def _note(self, events: list[bytes], now: float) -> None:
        for data in events:
            if data == _DONE:
                self._done = True
            else:
                self._exchange.take(decode_event(data), now)

    def _conclude(self, now: float) -> None:
        exchange = self._exchange
        self._note(self._splitter.end(), now)
        if self.response.status != 200:
            text = b"".join(self._refusal).decode(errors="replace")
            exchange.error = f"status {self.response.status}: {text[:_SHOWN_CHARACTERS]}"
        elif not exchange.error and not (self._done or exchange.finished):
            exchange.error = "the stream ended without [DONE] and without a reason"
        elif not exchange.error and not exchange.num_chunks:
            exchange.error = "an answer without a token"
