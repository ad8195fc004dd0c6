"""Malformed frames raise ProtocolError without exhausting the receiver's memory or stack."""

import tracemalloc

import msgspec
import pytest

from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError
from proto.messages.engine_io import Abort, ToEngine
from tests.proto.test_messages import MESSAGES


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x00",
        b"garbage",
        b"\x81\xa1a\x01",
        b"\x91" * 100_000 + b"\x00",
        msgspec.msgpack.encode([2, 1, "not a number", "disconnect"]),
        msgspec.msgpack.encode([2, 1, 2, "some other reason"]),
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode({"epoch": 1}),
        b"\x95\x02\x01\x02\xa4\x80\x80\x80\x80\xc0",  # a string that is not UTF-8
        b"\x9e\x01\x01\x02\x91\x01\x91\x01\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\xa1\x80\x90\x90\x00",
    ],
)
def test_garbage_is_a_protocol_error(frame):
    with pytest.raises(ProtocolError):
        MessageDecoder(ToEngine).decode(frame)


DEEPEST = 10
"""Deepest nesting of Structs and lists that any message needs."""


def depth_of(kind, above=()):
    """Return the nesting depth of a type; fail if it is untyped or recursive."""
    assert not isinstance(kind, msgspec.inspect.AnyType | msgspec.inspect.RawType), above
    inner = []
    if isinstance(kind, msgspec.inspect.StructType):
        assert kind.cls not in above
        above = (*above, kind.cls)
        inner = [field.type for field in kind.fields]
    elif isinstance(kind, msgspec.inspect.UnionType):
        return max(depth_of(part, above) for part in kind.types)
    elif isinstance(kind, msgspec.inspect.TupleType):
        inner = kind.item_types
    elif isinstance(kind, msgspec.inspect.DictType):
        inner = [kind.key_type, kind.value_type]
    elif isinstance(kind, msgspec.inspect.CollectionType):
        inner = [kind.item_type]
    return 1 + max((depth_of(part, above) for part in inner), default=0)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_message_types_bound_the_nesting_depth(message):
    assert depth_of(msgspec.inspect.type_info(type(message))) <= DEEPEST


@pytest.mark.parametrize("bracket", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
@pytest.mark.parametrize("times", [50, 5_000, 1_000_000])
def test_deep_nesting_in_an_unknown_field_is_a_protocol_error(bracket, times):
    """Unknown trailing fields, as a newer process sends them, are skipped up to a depth."""
    fields = encode(Abort(1, 2, "disconnect", None))
    frame = b"\x96" + fields[1:] + bracket * times + b"\x00"
    if times > 50:
        with pytest.raises(ProtocolError):
            MessageDecoder(ToEngine).decode(frame)
    else:
        assert MessageDecoder(ToEngine).decode(frame) == Abort(1, 2, "disconnect", None)


@pytest.mark.parametrize(
    "frame", [b"\xdd\xff\xff\xff\xff", b"\x9d\x01\x01\x02\xdd\xff\xff\xff\xff\x01"]
)
def test_an_announced_length_allocates_no_memory(frame):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            MessageDecoder(ToEngine).decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
