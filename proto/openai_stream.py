"""What a client reads of the stream of an OpenAI-compatible server, ours or another.

Only the fields that a load test looks at; whatever else is in an event is skipped without
being made into objects.
"""

from typing import Any

import msgspec

from proto.errors import ProtocolError


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
