"""From the bytes of a streamed answer to its exchange."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from proto.errors import ProtocolError, TokendError

# What a client reads of the stream of an OpenAI-compatible server, ours or another.
#
# Only the fields that a load test looks at; whatever else is in an event is skipped without
# being made into objects.


class StreamDelta(msgspec.Struct):
    """Of a chat: what is new in the message."""

    content: str | None = None


class StreamChoice(msgspec.Struct):
    """text: of a completion. delta: of a chat. finish_reason: with the last token."""

    text: str | None = None
    delta: StreamDelta | None = None
    finish_reason: str | None = None

    @property
    def added(self) -> str:
        """The text that is new, whichever endpoint it is of."""
        if self.text is not None:
            return self.text
        return (self.delta.content or "") if self.delta is not None else ""


class StreamPromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: StreamPromptDetails | None = None


class StreamEvent(msgspec.Struct):
    """One event. error, message: what a server says that fails after it has begun; their form
    differs from server to server."""

    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: Any = None
    object: Any = None
    message: Any = None

    @property
    def failure(self) -> str:
        """The message of an error event, empty for any other."""
        if self.error:
            if isinstance(self.error, dict) and self.error.get("message"):
                return str(self.error["message"])
            return str(self.error)
        return str(self.message or "an error without a message") if self.object == "error" else ""


_decoder = msgspec.json.Decoder(StreamEvent)


def decode_event(data: bytes) -> StreamEvent:
    """Raises ProtocolError for what is no event."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an event that is none ({error}): {data[:200]!r}") from None


# Server-sent events out of a body that arrives in pieces of any size.
#
# Only the data is of interest; names, ids and comments are skipped. The format is that of the
# HTML standard, section 9.2.6, without its lone carriage returns.


class EventSplitter:
    """Holds what has come of a line and of an event that are not over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        if not self._rest and not self._data and piece.startswith(b"data: "):
            # Nearly always: one event, and nothing else.
            end = piece.find(b"\n")
            if end == len(piece) - 2 and piece.endswith(b"\n\n"):
                return [piece[6:-2]]
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return self._events(lines)

    def end(self) -> list[bytes]:
        """The data of an event that was not closed by an empty line."""
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


# The bytes of one HTTP/1.1 response, as they come, to the bytes of its body.
#
# Knows nothing of sockets, and nothing of what the body means.
#
#       HTTP/1.1 200 OK\r\n … \r\n\r\n   5\r\n  hello  \r\n  0\r\n  \r\n
#       └────────── head ─────────────┘   └size┘└data┘ └─┘  └size┘└trailer┘


_MAX_HEAD_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 12


class BrokenResponseError(TokendError):
    """What came is no response, or not all of one."""


class ResponseReader:
    """status: 0 until the head is there. complete: nothing more belongs to this response.

    reusable: the connection may carry another request when this one is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        self.complete = False
        self._rest = b""
        self._left = 0
        self._read: Callable[[list[bytes]], bool] = self._read_head

    @property
    def begun(self) -> bool:
        """Something has come."""
        return self.status > 0 or bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body; raises BrokenResponseError."""
        self._rest = self._rest + data if self._rest else data
        pieces: list[bytes] = []
        while not self.complete and self._read(pieces):
            pass
        if self.complete and self._rest:
            self.reusable = False
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """The connection is closed; raises BrokenResponseError if something is missing."""
        if self._read == self._read_all:
            self.complete = True
        elif not self.complete:
            what = "in the middle of an answer" if self.begun else "without an answer"
            raise BrokenResponseError(f"the connection was closed {what}")

    def _read_head(self, _: list[bytes]) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise BrokenResponseError("the head of the answer does not end")
            return False
        lines, self._rest = self._rest[:end].split(b"\r\n"), self._rest[end + 4 :]
        status = _status(lines[0])
        if status < 200:  # 100 Continue and the like come before the response
            return True
        headers = dict(map(_header, lines[1:]))
        self.status = status
        self.reusable = headers.get(b"connection", b"").lower() != b"close"
        self._begin_body(headers)
        return True

    def _begin_body(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._read = self._read_size
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
            self._read = self._read_content
            self.complete = self._left == 0
        elif self.status in (204, 304):
            self.complete = True
        else:
            self.reusable = False
            self._read = self._read_all

    def _read_content(self, pieces: list[bytes]) -> bool:
        self._take(pieces)
        self.complete = self._left == 0
        return False

    def _read_all(self, pieces: list[bytes]) -> bool:
        pieces.append(self._rest)
        self._rest = b""
        return False

    def _read_size(self, _: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        self._left = _number(line.partition(b";")[0], 16)
        self._read = self._read_chunk if self._left else self._read_trailer
        return True

    def _read_chunk(self, pieces: list[bytes]) -> bool:
        if not self._rest:
            return False
        self._take(pieces)
        if not self._left:
            self._read = self._read_chunk_end
        return True

    def _read_chunk_end(self, _: list[bytes]) -> bool:
        if len(self._rest) < 2:
            return False
        if not self._rest.startswith(b"\r\n"):
            raise BrokenResponseError("a chunk of the answer is longer than it says")
        self._rest = self._rest[2:]
        self._read = self._read_size
        return True

    def _read_trailer(self, _: list[bytes]) -> bool:
        line = self._line()
        self.complete = line == b""
        return line is not None

    def _take(self, pieces: list[bytes]) -> None:
        piece = self._rest[: self._left]
        if piece:
            pieces.append(piece)
        self._rest = self._rest[len(piece) :]
        self._left -= len(piece)

    def _line(self) -> bytes | None:
        """The next line; None while its end is missing."""
        end = self._rest.find(b"\r\n")
        if end < 0:
            if len(self._rest) > _MAX_LINE_BYTES:
                raise BrokenResponseError("a line of the answer does not end")
            return None
        line, self._rest = self._rest[:end], self._rest[end + 2 :]
        return line


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise BrokenResponseError(f"not HTTP: {line[:80]!r}")
    return _number(rest.partition(b" ")[0], 10)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _number(text: bytes, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise BrokenResponseError(f"not a number: {text[:80]!r}")
    return number


# One request and what came of it: when, how much, and whether it failed.
#
# The figures are those of `vllm bench serve`:
#
#     sent        first event with a choice                          last such event
#       │◀──── TTFT ────▶│◀─ gap ─▶│◀─ gap ─▶│ …                          │
#       │◀──────────────────────────── E2EL ─────────────────────────────▶│
#     TPOT = (E2EL − TTFT) / (output tokens − 1);  the gaps are the ITLs.


def no_gaps() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Exchange:
    """Seconds on the monotonic clock. error: empty if it did not fail.

    waited: seconds in the client itself, for a place among those that may be under way.
    asked_tokens: output tokens that were asked for. keep_text: whether pieces are kept.
    """

    asked_tokens: int
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
    pieces: list[str] = field(default_factory=list)

    def take(self, event: StreamEvent, now: float) -> None:
        """Note an event that arrived now."""
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
                    self.pieces.append(choice.added)
        if event.usage is not None:
            self.input_tokens = event.usage.prompt_tokens or 0
            self.counted_tokens = event.usage.completion_tokens or 0
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens or 0) if details else 0
        self.error = self.error or event.failure

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def output_tokens(self) -> int:
        """What the server has counted; its chunks where it counts nothing."""
        return self.counted_tokens or self.num_chunks

    @property
    def ttft(self) -> float:
        return self.first - self.started

    @property
    def e2el(self) -> float:
        return self.last - self.started

    @property
    def tpot(self) -> float:
        """0 for a single token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0


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
