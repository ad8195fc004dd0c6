"""Reading the body of a request: size, time, content type, JSON, and the headers that add to it."""

import asyncio
import ipaddress
import json
import re
from typing import Any, Final, cast

from starlette.requests import Request

from api_server.app_state import APP_STATE, AppState
from api_server.errors import BodyTooLargeError, SlowUploadError
from api_server.protocol.common import REQUEST_ID
from api_server.protocol.fields import IgnoredFields
from proto.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    UnsupportedMediaError,
    shown,
)

# How a route comes by its app_state, and which requests are an operator's.


_SIGNS_OF_OTHERS: Final = ("origin", "sec-fetch-site", "forwarded", "x-forwarded-for", "via")
"""Headers of browsers and proxies."""


def app_state_of(request: Request) -> AppState:
    """The app_state that the request got at the door: a reload may have brought others since."""
    return cast(AppState, request.scope[APP_STATE])


def has_operators_key(request: Request) -> bool:
    """Whether it came with one."""
    return bool(getattr(request.state, "is_operator", False))


def check_operator(request: Request) -> None:
    """Raise AuthenticationError or ForbiddenError unless the client is an operator.

    401 says that a key is missing or wrong, 403 that a client's is not enough.
    """
    config = app_state_of(request).config
    if not config.has_admin_keys:
        _check_is_local(request)
    elif not has_operators_key(request):
        if config.has_client_keys:
            raise ForbiddenError("this is for operators: it takes a key of --admin-api-key")
        raise AuthenticationError("missing or wrong key: this takes one of --admin-api-key")


def _check_is_local(request: Request) -> None:
    """Raise ForbiddenError unless a program on this machine asks by itself."""
    address = request.client.host if request.client is not None else ""
    if not is_loopback(address) or any(name in request.headers for name in _SIGNS_OF_OTHERS):
        raise ForbiddenError(
            "without --admin-api-key this is for programs on the same machine only, "
            "and neither for browsers nor through a proxy"
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine alone."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


MAX_BODY_BYTES: Final = 32 << 20
NUMBER_HEADERS: Final = {"x-vllm-priority": "priority", "x-request-timeout-ms": "timeout_ms"}
"""Headers that stand for a field of the body."""
SESSION_HEADER: Final = "x-session-id"
"""Stands for session_id."""
REQUEST_ID_HEADER: Final = "x-request-id"
"""Stands for one as well, where it has the form of one."""
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
MAX_DEPTH: Final = 64
"""Most objects and lists around a value of a body."""
MIB: Final = 1 << 20
SECONDS_PER_MIB: Final = 60.0
"""A body has so long to arrive, and so long again for each whole MiB that has arrived."""


async def read_fields(request: Request, ignored: IgnoredFields) -> Any:
    """The decoded body; a header that stands for a field counts where the body has none.

    ignored: collects an invalid X-Request-Id, as some proxies send it.
    Raises what `read_json` does.
    """
    fields = await read_json(request)
    if isinstance(fields, dict):
        for header, name in NUMBER_HEADERS.items():
            text = request.headers.get(header)
            if text is None or fields.get(name) is not None:
                continue
            if not _WHOLE.fullmatch(text):
                raise InvalidRequestError(f"{header} must be a whole number", name)
            fields[name] = int(text)
        session_id = request.headers.get(SESSION_HEADER)
        if session_id is not None and fields.get("session_id") is None:
            fields["session_id"] = session_id
        request_id = request.headers.get(REQUEST_ID_HEADER)
        if request_id is not None and fields.get("request_id") is None:
            if re.fullmatch(REQUEST_ID, request_id):
                fields["request_id"] = request_id
            else:
                ignored.add(REQUEST_ID_HEADER)
    return fields


async def read_json(request: Request) -> Any:
    """The decoded body.

    Raises UnsupportedMediaError (415), BodyTooLargeError (413), SlowUploadError (408) or
    InvalidRequestError; starlette's ClientDisconnect when the client leaves.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedMediaError("the content type must be application/json")
    body = await _read(request)
    try:
        fields = json.loads(body, object_pairs_hook=_object)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _is_deeper(fields, MAX_DEPTH):
        raise InvalidRequestError(f"the body is nested more than {MAX_DEPTH} deep")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the body; raises InvalidRequestError where a key is there twice.

    JSON leaves open which of them counts, so a filter before this server and the server
    itself may mean different requests.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(
                    f"{shown(key)} is there more than once in an object", shown(key)
                )
            seen.add(key)
    return fields


def _is_deeper(value: Any, most: int) -> bool:
    """Whether there are more than so many objects and lists around a value; level by level."""
    level: list[Any] = [[value]]
    for _ in range(most + 1):
        level = [
            each
            for holder in level
            for each in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(each, dict | list)
        ]
        if not level:
            return False
    return True


async def _read(request: Request) -> bytes:
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(SECONDS_PER_MIB) as limit:
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                limit.reschedule(start + SECONDS_PER_MIB * (1 + len(body) // MIB))
    except TimeoutError:
        raise SlowUploadError(f"only {len(body)} bytes of the body came in time") from None
    return bytes(body)
