"""JSON of clients, decoded within limits that are checked on its bytes.

    [{"a": "b, \\"c\\""}, []]  ─▶  [{"":""},[]]  ─▶  1 comma, 3 containers, 4 quotes, 1 key

Objects take up to a hundred times the bytes of their JSON. So brackets, commas and quotation marks
outside of strings are counted before anything is decoded. Images are most of a body that has some,
and nothing in them counts: they are cut out before, and put back after.
"""

import json
import math
import re
import secrets
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from api_server.protocol.fields import MAX_DEPTH, is_nested_deeper, path_text
from api_server.turns import INLINE_BYTES
from proto.codec import from_large_json
from proto.errors import InvalidRequestError, shown

MAX_VALUES: Final = 1 << 20
MAX_CONTAINERS: Final = 1 << 16
MAX_KEYS: Final = 1 << 16
MAX_STRINGS: Final = 1 << 17
MAX_DIGITS: Final = 308
"""Most digits of a number: a float holds every integer of that length."""
MAX_PYTHON_JSON: Final = 4 << 20
"""Largest JSON in bytes for Python's decoder, which takes eight bytes for each if one character is
an emoji. msgspec's takes half, and does not notice a key that appears twice."""
_Path = tuple[()] | tuple["_Path", str | int]
"""A key, after the path of the container that has it."""
_IMAGE: Final = b'"data'
_OPENING: Final = re.compile(rb'"data(:|"[ \t\r\n]*:[ \t\r\n]*")')
"""A data URI, or the member of an image block of /v1/messages."""
_LONG_STRING: Final = 1 << 14
_SPACE: Final = 64
"""Characters after an image among which a comma or bracket is looked for."""
_SCANNED_BYTES: Final = 1 << 18
_UNCOUNTED: Final = bytes(set(range(256)) - set(b',[{":'))


class _Counts(NamedTuple):
    """commas: one less than values, for each container. quotes: two for each string."""

    commas: int = 0
    containers: int = 0
    quotes: int = 0
    keys: int = 0

    @property
    def too_many(self) -> bool:
        return (
            self.commas > MAX_VALUES
            or self.containers > MAX_CONTAINERS
            or self.keys > MAX_KEYS
            or self.quotes > 2 * MAX_STRINGS
        )


def decode_json(body: bytearray, what: str = "body") -> Any:
    """Return the decoded JSON and empty `body`; raise InvalidRequestError. what: for errors.

    Its numbers are finite, and have few enough digits for arithmetic and for messages.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise InvalidRequestError.fixed(f"the {what} must be UTF-8")
    images = _cut_images(body)
    counts = _Counts()
    is_large = len(body) > MAX_PYTHON_JSON
    if is_large or (len(body) > INLINE_BYTES and _at_most(body).too_many):
        for counts in _running_counts(body):
            if counts.too_many:
                raise InvalidRequestError.fixed(
                    f"the {what} has more than {MAX_VALUES} values, {MAX_STRINGS} strings, "
                    f"{MAX_KEYS} names of members or {MAX_CONTAINERS} objects and lists"
                )
    bad_numbers: list[_BadNumber] = []

    def refuse(text: str) -> _BadNumber:
        bad_numbers.append(_BadNumber())
        return bad_numbers[-1]

    def read_float(text: str) -> float | _BadNumber:
        number = float(text)
        return number if math.isfinite(number) else refuse(text)

    def read_long_integer(text: str) -> int | _BadNumber:
        return int(text) if len(text) <= MAX_DIGITS else refuse(text)

    may_be_deep = body.count(b"{") + body.count(b"[") > MAX_DEPTH
    try:
        if is_large:
            fields = from_large_json(body)
        else:
            fields = json.loads(
                body,
                object_pairs_hook=_unique_keys,
                parse_float=read_float,
                parse_int=read_long_integer if _may_have_long_number(body) else None,
                parse_constant=refuse,
            )
    except RecursionError:
        raise InvalidRequestError.fixed(f"the {what} is nested too deeply") from None
    except ValueError as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):  # without the character that it may quote
            why = error.msg.partition(": ")[0]
            if not images:  # with them, what was decoded is shorter
                why += f": line {error.lineno} column {error.colno}"
        raise InvalidRequestError.fixed(f"the {what} is not valid JSON: {why}") from None
    finally:
        body.clear()
    if bad_numbers:
        path = _path_of(bad_numbers[0], fields)
        raise InvalidRequestError(
            f"{shown(path_text(path)) or f'the {what}'} must be a finite number of at most "
            f"{MAX_DIGITS} digits",
            shown(path[0]) if path else None,
        )
    if images:
        _put_back(images, fields)
    if may_be_deep and is_nested_deeper(fields):
        raise InvalidRequestError.fixed(f"the {what} is nested more than {MAX_DEPTH} deep")
    if is_large and _num_keys(fields) != counts.keys:
        raise InvalidRequestError.fixed(f"a key appears more than once in an object of the {what}")
    return fields


def _cut_images(body: bytearray) -> dict[str, str]:
    """Replace long strings of images in JSON by short texts, and return them by these.

        {"url": "data:image/png;base64,iVBO…"}  ─▶  {"url": "f81c…,0"}
        {"type": "base64", "data": "iVBO…"}     ─▶  {"type": "base64", "data": "f81c…,1"}

    In valid JSON a quotation mark without a backslash before it begins or ends a string. A string
    is its own text if that is printable ASCII without a backslash. One that is the name of a member
    is not cut.
    """
    images: dict[str, str] = {}
    nonce = secrets.token_hex(16)
    pieces: list[bytes | bytearray] = []
    done, place = 0, body.find(_IMAGE)
    while place >= 0:
        start, end = _long_string(body, place)
        if end:
            name = f"{nonce},{len(images)}"
            with memoryview(body) as view:  # a slice would be one more copy
                images[name] = str(view[start:end], "ascii")
            pieces += [body[done:start], name.encode()]
            done = end
        place = body.find(_IMAGE, max(end, place + 1))
    if images:
        body[:] = b"".join([*pieces, body[done:]])
    return images


def _long_string(body: bytearray, place: int) -> tuple[int, int]:
    """Return where the image that may begin at a place has its text; 0, 0 for none to cut."""
    found = _OPENING.match(body, place)
    if found is None or body[place - 1 : place] == b"\\":
        return 0, 0
    start = place + 1 if found[0].endswith(b"data:") else found.end()
    end = body.find(b'"', start)
    if (
        end - start < _LONG_STRING
        or not body[end + 1 : end + _SPACE].lstrip().startswith((b",", b"}", b"]"))
        or not _is_plain(body, start, end)
    ):
        return 0, 0
    return start, end


def _is_plain(body: bytearray, start: int, end: int) -> bool:
    """Return whether a part of a body is printable ASCII without a backslash."""
    characters = np.frombuffer(body, np.uint8, end - start, start)
    is_ascii = characters.min() >= 0x20 and characters.max() < 0x7F
    return bool(is_ascii) and body.find(b"\\", start, end) < 0


def _put_back(images: dict[str, str], fields: Any) -> None:
    """Put images into decoded JSON in place of the texts that stand for them."""
    containers = [fields]
    while containers:
        container = containers.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, str):
                if value in images:
                    container[key] = images[value]
            elif isinstance(value, dict | list):
                containers.append(value)


def num_values(text: str, enough: int) -> int:
    """Return the number of values in JSON, or one up to `enough` that may be too high."""
    body = bytearray(text.encode(errors="surrogatepass"))
    counts = _at_most(body)
    if counts.commas + counts.containers > enough:
        *_, counts = _running_counts(body)
    return counts.commas + counts.containers + 1


def _at_most(body: bytearray) -> _Counts:
    """Return counts that include what is inside strings."""
    num_containers = body.count(b"[") + body.count(b"{")
    return _Counts(body.count(b","), num_containers, body.count(b'"'), body.count(b":"))


def _running_counts(body: bytearray) -> Iterator[_Counts]:
    """Yield the counts after each piece of JSON."""
    counts, start, in_string = _Counts(), 0, 0
    while start < len(body):
        piece = body[start : start + _SCANNED_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends within an escape
            piece = body[start : start + len(piece) + 1]
        start += len(piece)
        # Escapes go first: without its n, the backslash of a line break would escape what follows
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _UNCOUNTED)
        parts = piece.split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2
        counts = _Counts(
            counts.commas + outside.count(b","),
            counts.containers + outside.count(b"[") + outside.count(b"{"),
            counts.quotes + len(parts) - 1,
            counts.keys + outside.count(b":"),
        )
        yield counts


def _num_keys(fields: Any) -> int:
    number, containers = 0, [fields]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            number += len(container)
            container = container.values()
        elif not isinstance(container, list):
            continue
        containers += [each for each in container if isinstance(each, dict | list)]
    return number


class _BadNumber:
    """Stands in a decoded body for a number that is refused, so that its field can be named."""


def _may_have_long_number(body: bytearray) -> bool:
    """Return whether a body may have an integer of more than MAX_DIGITS digits.

    Such a number fills one of these windows, wherever it begins.
    """
    size = MAX_DIGITS // 2
    return any(body[start : start + size].isdigit() for start in range(0, len(body), size))


def _path_of(number: _BadNumber, fields: Any) -> list[str | int]:
    """Return the keys and indices that lead to a number of a decoded body, level by level."""
    level: list[tuple[Any, _Path]] = [([fields], ())]
    while level:
        below: list[tuple[Any, _Path]] = []
        for container, path in level:
            pairs = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in pairs:
                if value is number:
                    return _keys((path, key))[1:]
                if isinstance(value, dict | list):
                    below.append((value, (path, key)))
        level = below
    raise AssertionError("the number is in the body")


def _keys(path: _Path) -> list[str | int]:
    keys: list[str | int] = []
    while path:
        path, key = path
        keys.append(key)
    return keys[::-1]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the body; raises InvalidRequestError for a repeated key.

    JSON does not define which value counts, so a filter before this server might see another
    request than the server.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(
                    f"{shown(key)} appears more than once in an object", shown(key)
                )
            seen.add(key)
    return fields
