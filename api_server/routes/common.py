"""What handlers share: the application state, operators' keys, reading the body of a request."""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast

from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection, Request

from api_server.errors import BodyTooLargeError, SlowUploadError
from api_server.generation.app_state import APP_STATE, AppState, RequestContext
from api_server.http import access
from api_server.http.connection import MAX_BODY_BYTES, UPLOAD_BYTES, UPLOAD_SECONDS
from api_server.http.request_log import SESSION_HEADER
from api_server.protocol.agents import MAX_SESSION_ID_CHARACTERS
from api_server.protocol.common import REQUEST_ID
from api_server.protocol.decoding import decode_json
from api_server.protocol.fields import IgnoredFields, Model, parse
from api_server.turns import current_client, run_for_body
from proto.errors import InvalidRequestError, UnsupportedMediaError, shown


def app_state_of(request: HTTPConnection) -> AppState:
    """Return the AppState that was current when the request arrived; a reload replaces it."""
    return cast(AppState, request.scope[APP_STATE])


def has_operators_key(request: Request) -> bool:
    return bool(getattr(request.state, "is_operator", False))


def check_operator(request: Request) -> None:
    """Raise AuthenticationError or ForbiddenError unless the client is an operator."""
    access.check_operator(request.scope, app_state_of(request).config)


NUMBER_HEADERS: Final = {
    "x-vllm-priority": "priority",
    "x-request-timeout-ms": "timeout_ms",
    "x-data-parallel-rank": "data_parallel_rank",
}
"""Headers that set a field of the body: header → field."""


def page_limit(query: QueryParams, maximum: int) -> int:
    """Return the `limit` of a request for a page of a list; raise InvalidRequestError."""
    text = query.get("limit", "20")
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise InvalidRequestError(f"limit must be 1 to {maximum}", "limit")
    return int(text)


REQUEST_ID_HEADER: Final = "x-request-id"
"""Sets request_id, if its value is a valid one."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")


Parsed = TypeVar("Parsed")


async def read_request(
    context: RequestContext, model: type[Model], neutral: Mapping[str, tuple[Any, ...]]
) -> Model:
    """Return the body as a model, with fields from headers; errors as of `read_json`."""
    return await read_fields(context, partial(parse, model, neutral=neutral))


async def read_fields(context: RequestContext, parse: Callable[..., Parsed]) -> Parsed:
    """Return what `parse` makes of the body, with fields from headers where the body has none.

    `ignored` also collects an invalid X-Request-Id, as some proxies send it. Errors as of
    `read_json`.
    """

    model: object = None

    def parse_with_headers(fields: Any, ignored: IgnoredFields) -> Parsed:
        nonlocal model
        if isinstance(fields, dict):
            add_header_fields(fields, context.connection.headers, ignored)
            model = fields.get("model")
        return parse(fields, ignored=ignored)

    parsed = await read_json(context, parse_with_headers)
    adapters = context.app_state.adapters
    if adapters is not None:
        await adapters.prepare(model, context.key_name)
    return parsed


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
        fields["session_id"] = name = _as_utf8(session_id)
        if len(name) > MAX_SESSION_ID_CHARACTERS:
            raise InvalidRequestError.fixed(
                f"X-Session-ID is longer than {MAX_SESSION_ID_CHARACTERS} characters", "session_id"
            )
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


async def read_json(context: RequestContext, parse: Callable[..., Parsed]) -> Parsed:
    """Return what `parse` makes of the decoded body, on a thread if the body is large.

    parse: a function of the decoded body and, by its name, of `ignored`.
    Raises UnsupportedMediaError (415), BodyTooLargeError (413), SlowUploadError (408),
    OverloadedError (503) or InvalidRequestError; starlette's ClientDisconnect when the client
    leaves.
    """
    request = context.request
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedMediaError("the content type must be application/json")
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaError(f"a body with content-encoding {shown(encoding)} is not read")
    body = await _read_body(request)
    await current_client().hold_body(body)
    return await run_for_body(lambda: parse(decode_json(body), ignored=context.ignored))


async def _read_body(request: Request) -> bytearray:
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length[:20]) > MAX_BODY_BYTES:
        raise too_large
    body, mark = bytearray(), UPLOAD_BYTES
    client, loop = current_client(), asyncio.get_running_loop()
    client.count_body(0)
    try:
        async with client.waiting(UPLOAD_SECONDS) as limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                client.count_body(len(body))
                if len(body) >= mark:
                    mark = len(body) + UPLOAD_BYTES
                    limit.reschedule(loop.time() + UPLOAD_SECONDS)
    except TimeoutError:
        raise SlowUploadError(f"only {len(body)} bytes of the body arrived in time") from None
    return body
