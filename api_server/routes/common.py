"""What handlers share: the application state, operators' keys, reading the body of a request."""

import asyncio
import ipaddress
import json
import math
import re
from typing import Any, Final, cast

from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection, Request

from api_server.app_state import APP_STATE, AppState
from api_server.errors import BodyTooLargeError, SlowUploadError
from api_server.protocol.common import REQUEST_ID
from api_server.protocol.fields import MAX_DEPTH, IgnoredFields, is_nested_deeper
from proto.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    UnsupportedMediaError,
    shown,
)

_REMOTE_HEADERS: Final = ("origin", "sec-fetch-site", "forwarded", "x-forwarded-for", "via")
"""Headers that browsers and proxies add."""


def app_state_of(request: HTTPConnection) -> AppState:
    """Return the AppState that was current when the request arrived; a reload replaces it."""
    return cast(AppState, request.scope[APP_STATE])


def has_operators_key(request: Request) -> bool:
    return bool(getattr(request.state, "is_operator", False))


def check_operator(request: Request) -> None:
    """Raise AuthenticationError or ForbiddenError unless the client is an operator.

    AuthenticationError (401): the key is missing or wrong. ForbiddenError (403): it is a client's.
    """
    config = app_state_of(request).config
    if not config.has_admin_keys:
        _check_is_local(request)
    elif not has_operators_key(request):
        if config.has_client_keys:
            raise ForbiddenError("this route is for operators and needs a key of --admin-api-key")
        raise AuthenticationError("missing or wrong key: this route needs one of --admin-api-key")


def _check_is_local(request: Request) -> None:
    """Raise ForbiddenError unless a program on this machine sends the request itself."""
    address = request.client.host if request.client is not None else ""
    if not is_loopback(address) or any(name in request.headers for name in _REMOTE_HEADERS):
        raise ForbiddenError(
            "without --admin-api-key this route is for programs on the same machine only, "
            "not for browsers or through a proxy"
        )


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


MAX_BODY_BYTES: Final = 32 << 20
NUMBER_HEADERS: Final = {"x-vllm-priority": "priority", "x-request-timeout-ms": "timeout_ms"}
"""Headers that set a field of the body: header → field."""
SESSION_HEADER: Final = "x-session-id"
"""Sets session_id."""


def page_limit(query: QueryParams, maximum: int) -> int:
    """Return the `limit` of a request for a page of a list; raise InvalidRequestError."""
    text = query.get("limit", "20")
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise InvalidRequestError(f"limit must be 1 to {maximum}", "limit")
    return int(text)


REQUEST_ID_HEADER: Final = "x-request-id"
"""Sets request_id, if its value is a valid one."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
MAX_DIGITS: Final = 308
"""Of a number in a body: a float holds every integer of so many digits."""
_Path = tuple[()] | tuple["_Path", str | int]
"""A key, after the path of the container that has it."""
MIB: Final = 1 << 20
SECONDS_PER_MIB: Final = 60.0
"""Time limit of a body: this, and as much again for each whole MiB that has arrived."""


async def read_fields(request: Request, ignored: IgnoredFields) -> Any:
    """Return the decoded body, with fields from headers where the body has none.

    ignored: collects an invalid X-Request-Id, which some proxies send.
    Raises the same errors as `read_json`.
    """
    fields = await read_json(request)
    if isinstance(fields, dict):
        add_header_fields(fields, request.headers, ignored)
    return fields


def add_header_fields(fields: dict[str, Any], headers: Headers, ignored: IgnoredFields) -> None:
    """Add the fields that headers set and that `fields` lacks; raises InvalidRequestError."""
    for header, name in NUMBER_HEADERS.items():
        text = headers.get(header)
        if text is None or fields.get(name) is not None:
            continue
        if not _INTEGER.fullmatch(text):
            raise InvalidRequestError(f"{header} must be a whole number", name)
        fields[name] = int(text)
    session_id = headers.get(SESSION_HEADER)
    if session_id is not None and fields.get("session_id") is None:
        fields["session_id"] = _as_utf8(session_id)
    request_id = headers.get(REQUEST_ID_HEADER)
    if request_id is not None and fields.get("request_id") is None:
        if re.fullmatch(REQUEST_ID, request_id):
            fields["request_id"] = request_id
        else:
            ignored.add(REQUEST_ID_HEADER)


def _as_utf8(value: str) -> str:
    """Return the text of a header in UTF-8, as in a body; otherwise in Latin-1, as HTTP has it."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


async def read_json(request: Request) -> Any:
    """Return the decoded body.

    Raises UnsupportedMediaError (415), BodyTooLargeError (413), SlowUploadError (408) or
    InvalidRequestError; starlette's ClientDisconnect when the client leaves.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedMediaError("the content type must be application/json")
    return decode_json(await _read_body(request))


def decode_json(body: bytes, what: str = "body") -> Any:
    """Return the decoded text; raise InvalidRequestError. what: for errors.

    Its numbers are finite, and have few enough digits for arithmetic and for messages.
    """
    bad_numbers: list[_BadNumber] = []

    def refuse(text: str) -> _BadNumber:
        bad_numbers.append(_BadNumber())
        return bad_numbers[-1]

    def read_float(text: str) -> float | _BadNumber:
        number = float(text)
        return number if math.isfinite(number) else refuse(text)

    def read_long_integer(text: str) -> int | _BadNumber:
        return int(text) if len(text) <= MAX_DIGITS else refuse(text)

    try:
        fields = json.loads(
            body,
            object_pairs_hook=_unique_keys,
            parse_float=read_float,
            parse_int=read_long_integer if _may_have_long_number(body) else None,
            parse_constant=refuse,
        )
    except RecursionError:
        raise InvalidRequestError(f"the {what} is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the {what} is not valid JSON: {error}") from None
    if bad_numbers:
        path = _path_of(bad_numbers[0], fields)
        raise InvalidRequestError(
            f"{shown(_joined(path)) or f'the {what}'} must be a finite number of at most "
            f"{MAX_DIGITS} digits",
            shown(path[0]) if path else None,
        )
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and is_nested_deeper(fields):
        raise InvalidRequestError(f"the {what} is nested more than {MAX_DEPTH} deep")
    return fields


class _BadNumber:
    """Stands in a decoded body for a number that is refused, so that its field can be named."""


def _may_have_long_number(body: bytes) -> bool:
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


def _joined(path: list[str | int]) -> str:
    """Return a path as text, such as messages[0].content."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    return "".join(parts).removeprefix(".")


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


async def _read_body(request: Request) -> bytes:
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(SECONDS_PER_MIB) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                limit.reschedule(start + SECONDS_PER_MIB * (1 + len(body) // MIB))
    except TimeoutError:
        raise SlowUploadError(f"only {len(body)} bytes of the body arrived in time") from None
    return bytes(body)
