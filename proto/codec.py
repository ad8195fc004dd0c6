"""Messages to bytes and back: msgspec Structs as msgpack, never pickle.

A decoder accepts only the union of messages that its link may carry. Sockets limit sizes before
decoding, and the types limit nesting: none is recursive or untyped, and unknown extra fields are
skipped only down to the interpreter's recursion limit. The decoder allocates no memory for
lengths that are merely announced.
"""

from typing import Any, Generic, TypeVar

import msgspec

from proto.errors import ProtocolError

T = TypeVar("T")
Message = msgspec.Struct
"""Base class of all messages between processes."""
M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def changed(message: M, **fields: Any) -> M:
    """Return a copy of a message with these fields replaced."""
    return msgspec.structs.replace(message, **fields)


class MessageDecoder(Generic[T]):
    """Decodes the messages of one union of Structs."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def decode(self, frame: bytes) -> T:
        """Decode `frame`; raises ProtocolError if it is no message of the union."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"undecodable message of {len(frame)} bytes: {error}") from None


def to_json(message: msgspec.Struct) -> bytes:
    """Return a Struct as indented JSON, for files."""
    return msgspec.json.format(msgspec.json.encode(message), indent=2)


def to_json_line(message: msgspec.Struct) -> bytes:
    """Return a Struct as one line of JSON, for pipes."""
    return msgspec.json.encode(message) + b"\n"


def to_compact_json(value: Any) -> bytes:
    """Return dicts, lists, strings and numbers as JSON, ten times as fast as `json` for many."""
    return msgspec.json.encode(value)


def from_large_json(data: bytes | bytearray) -> Any:
    """Parse JSON with half the memory that `json` takes; raises ValueError or RecursionError."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def from_json(data: bytes, message_type: type[T]) -> T:
    """Parse a JSON document as a Struct; raises ProtocolError if it is invalid."""
    try:
        return msgspec.json.decode(data, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from None
