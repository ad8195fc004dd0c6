"""Every error as the body that clients of the path expect: OpenAI's, or Anthropic's.

Owns the mapping from exceptions to statuses and bodies. What is not a RequestError
is logged in full and answered in general words.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from proto.errors import OverloadedError, RequestError, shown

logger = logging.getLogger("tokend.api")


class BodyTooLargeError(RequestError):
    status = 413
    type = "RequestTooLargeError"


class SlowUploadError(RequestError):
    """The body did not come in time; the rest of it is not waited for."""

    status = 408
    type = "RequestTimeoutError"


class SlowReaderError(RequestError):
    """The client does not read its stream as fast as it is produced."""

    status = 408
    type = "RequestTimeoutError"
    cause = "slow_reader"


class HeadersTooLargeError(RequestError):
    status = 431
    type = "RequestHeadersTooLargeError"


class NotAvailableError(OverloadedError):
    """The daemon is starting or stopping."""


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
"""What Python shows of an object that has no better words for itself."""
_PATH = re.compile(r"(?<![\w.-])(?<!:/)/(?!v1/)[\w.@+~-]+(?:/[\w.@+~-]+)+")
"""A file, as an error of the system or of a library names it; the API's own paths may be said."""


class DrainingError(NotAvailableError):
    """The daemon is about to end: what is under way finishes, nothing else begins."""

    def __init__(self) -> None:
        super().__init__("draining: the server is shutting down and takes no more requests")


_PASSING = frozenset({408, 409, 429})
"""Errors of a client that may be none when it asks again. Of others Anthropic's clients are told
that they are not to: an agent may ask ten times with a wrong key before it says so."""
_HTTP_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def public_message(error: RequestError) -> str:
    """What it says, without addresses of the heap or files."""
    return _PATH.sub("/…", _ADDRESS.sub("0x…", error.message))


def error_body(error: RequestError) -> dict[str, Any]:
    """The body that clients of OpenAI's API expect, without addresses of the heap or files."""
    return {
        "error": {
            "message": public_message(error),
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


def error_response(error: RequestError, path: str = "") -> JSONResponse:
    """path: of the request, which says in whose words it is answered; "" where it is not known."""
    headers = {}
    if error.retry_after_seconds:
        headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 431) or isinstance(error, DrainingError):
        headers["connection"] = "close"
    if is_of_messages(path):
        return _message_error(error.status, public_message(error), headers)
    return JSONResponse(error_body(error), error.status, headers)


def install(app: FastAPI) -> None:
    """Answer every exception of a route."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def _message_error(status: int, message: str, headers: Mapping[str, str]) -> JSONResponse:
    request_id = new_request_id()
    body = message_error_body(status, message, request_id)
    named = {**headers, "request-id": request_id}
    if status < 500 and status not in _PASSING:
        named["x-should-retry"] = "false"
    return JSONResponse(body, status, named)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _HTTP_TYPES.get(error.status_code, "BadRequestError")
    message = f"{request.method} {shown(request.url.path)}: {error.detail}"
    if is_of_messages(request.url.path):
        return _message_error(error.status_code, message, error.headers or {})
    body = {"message": message, "type": kind, "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    """The client left during its upload: the answer is not read."""
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("a route failed", exc_info=error)
    return error_response(RequestError("internal error"), request.url.path)


# Errors in Anthropic's shape, for the paths of /v1/messages.


PATH: Final = "/v1/messages"

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_of_messages(path: str) -> bool:
    """Whether a path is answered in Anthropic's words."""
    return path == PATH or path.startswith(PATH + "/")


def error_type(status: int) -> str:
    """The error types of that API."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def message_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """request_id: is in the header of that name as well."""
    error = {"type": error_type(status), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def new_request_id() -> str:
    """For an answer that has no other."""
    return f"req_{secrets.token_hex(12)}"
