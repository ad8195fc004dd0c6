"""Parses a streamed response: bytes → HTTP body → server-sent events → times and counts.

HttpResponseParser → EventSplitter → decode_event → RequestResult;  StreamedResponse joins them
"""

from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import httptools
import msgspec

from proto.errors import ProtocolError, TokendError

# ---- Events of an OpenAI-compatible server ----
#
# Only the fields that a load test needs; all others are skipped without creating objects.


class StreamDelta(msgspec.Struct):
    content: str | None = None


class StreamChoice(msgspec.Struct):
    """text: of a completion. delta: of a chat. finish_reason: set with the last token."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        if self.text is not None:
            return self.text
        return (self.delta.content or "") if self.delta is not None else ""


class StreamPromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: StreamPromptDetails | None = None


class StreamEvent(msgspec.Struct):
    """One event of a stream.

    An error event is {"error": {"message": …}}, {"error": text} or {"object": "error",
    "message": …}, depending on the server.
    """

    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: Any = None
    object: Any = None
    message: Any = None

    @property
    def error_message(self) -> str:
        """Message of an error event; "" for any other event."""
        if self.error:
            if isinstance(self.error, dict) and self.error.get("message"):
                return str(self.error["message"])
            return str(self.error)
        return str(self.message or "an error without a message") if self.object == "error" else ""


_decoder = msgspec.json.Decoder(StreamEvent)


def decode_event(data: bytes) -> StreamEvent:
    """Parse an event; raises ProtocolError if it is invalid."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid event ({error}): {data[:200]!r}") from None


# ---- Server-sent events ----


class EventSplitter:
    """Splits a body, which arrives in chunks of any size, into the data of server-sent events.

    Names, ids and comments are skipped. Format: HTML standard, section 9.2.6, without lone
    carriage returns.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that a chunk completes."""
        if not self._rest and not self._data and chunk.startswith(b"data: "):
            # The usual case: exactly one event.
            end = chunk.find(b"\n")
            if end == len(chunk) - 2 and chunk.endswith(b"\n\n"):
                return [chunk[6:-2]]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return self._events(lines)

    def end(self) -> list[bytes]:
        """Return the data of a last event without the empty line after it."""
        lines, self._rest = [self._rest, b""], b""
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> list[bytes]:
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return found


# ---- HTTP ----

_MAX_HEAD_BYTES: Final = 1 << 16
_LENGTH_HEADERS: Final = (b"content-length", b"transfer-encoding")


class InvalidResponseError(TokendError):
    """The server sent an invalid or incomplete response."""


class HttpResponseParser:
    """Parses one HTTP/1.1 response that arrives in chunks of any size.

    status: 0 until the head has arrived. begun: whether a part of the response has arrived.
    complete: whether the whole response has arrived.
    reusable: whether the connection can be used for another request after it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.begun = False
        self.complete = False
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._has_length = False
        self._num_head_bytes = 0
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in `data`; raises InvalidResponseError."""
        self.begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise InvalidResponseError(f"not a valid response: {error}") from None
            self.reusable = False  # bytes after the response
        if not self.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                raise InvalidResponseError("the head of the response is too long")
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    def end(self) -> None:
        """Note that the connection was closed; raises InvalidResponseError if bytes are missing."""
        if self.status and not self._has_length:
            self.complete = True
        elif not self.complete:
            when = "during the response" if self.begun else "before the response"
            raise InvalidResponseError(f"the connection was closed {when}")

    # Called by httptools

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in _LENGTH_HEADERS

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self.complete:  # not 100 Continue, before the response
            self.status = status

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status and not self.complete:
            self.complete = True
            self.reusable = self._parser.should_keep_alive()


# ---- Times and counts of one request ----
#
# Defined as by `vllm bench serve`:
#
#     sent        first event with a choice                          last such event
#       │◀──── TTFT ────▶│◀─ gap ─▶│◀─ gap ─▶│ …                          │
#       │◀──────────────────────────── E2EL ─────────────────────────────▶│
#     TPOT = (E2EL − TTFT) / (output tokens − 1);  the gaps are the ITLs.


def no_gaps() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class RequestResult:
    """Times and token counts of one request. Times: seconds of the performance counter.

    requested_tokens: max_tokens of the request. keep_text: whether to keep the text.
    waited: seconds that the client held the request back because of its concurrency limit.
    first, last: arrival of the first and the last chunk. gaps: seconds between chunks.
    counted_tokens: output tokens as counted by the server; 0 if it does not count.
    error: "" if the request succeeded.
    """

    requested_tokens: int
    keep_text: bool = False
    waited: float = 0.0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: "array[float]" = field(default_factory=no_gaps)
    num_chunks: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    counted_tokens: int = 0
    finished: bool = False
    error: str = ""
    texts: list[str] = field(default_factory=list)

    def note_event(self, event: StreamEvent, now: float) -> None:
        """Note an event that has arrived now."""
        if event.choices:
            if self.num_chunks:
                self.gaps.append(now - self.last)
            else:
                self.first = now
            self.num_chunks += 1
            self.last = now
            for choice in event.choices:
                self.finished = self.finished or choice.finish_reason is not None
                if self.keep_text:
                    self.texts.append(choice.new_text)
        if event.usage is not None:
            self.input_tokens = event.usage.prompt_tokens or 0
            self.counted_tokens = event.usage.completion_tokens or 0
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens or 0) if details else 0
        self.error = self.error or event.error_message

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def output_tokens(self) -> int:
        """Output tokens as counted by the server, or the number of chunks if it does not count."""
        return self.counted_tokens or self.num_chunks

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first - self.started

    @property
    def e2el(self) -> float:
        """End-to-end latency: time to the last token."""
        return self.last - self.started

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0


_DONE = b"[DONE]"
_SHOWN_CHARACTERS = 300


class StreamedResponse:
    """Parses one streamed response into a RequestResult; a refusal becomes its error."""

    def __init__(self, result: RequestResult) -> None:
        self.parser = HttpResponseParser()
        self._result = result
        self._splitter = EventSplitter()
        self._refusal: list[bytes] = []
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that have arrived now; raises TokendError if they are invalid."""
        body = self.parser.feed(data)
        if body:
            if self.parser.status == 200:
                self._note_events(self._splitter.feed(body), now)
            else:
                self._refusal.append(body)
        if self.parser.complete:
            self._finish(now)

    def end(self, now: float) -> None:
        """Note that the connection was closed; raises TokendError if the response is incomplete."""
        self.parser.end()
        self._finish(now)

    def _note_events(self, events: list[bytes], now: float) -> None:
        for data in events:
            if data == _DONE:
                self._done = True
            else:
                self._result.note_event(decode_event(data), now)

    def _finish(self, now: float) -> None:
        result = self._result
        self._note_events(self._splitter.end(), now)
        if self.parser.status != 200:
            text = b"".join(self._refusal).decode(errors="replace")
            result.error = f"status {self.parser.status}: {text[:_SHOWN_CHARACTERS]}"
        elif not result.error and not (self._done or result.finished):
            result.error = "the stream ended without [DONE] and without a finish reason"
        elif not result.error and not result.num_chunks:
            result.error = "no token in the answer"
