"""Exceptions → HTTP statuses and bodies: OpenAI's, or Anthropic's for clients of that API.

An exception that is not a RequestError is logged in full; the client gets a general message.
"""

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from proto.errors import OverloadedError, RequestError, TimeLimitError, shown

logger = logging.getLogger("tokend.api")


class BodyTooLargeError(RequestError):
    status = 413
    type = "RequestTooLargeError"


class SlowUploadError(RequestError):
    """Headers or body did not arrive in time; the rest is not read."""

    status = 408
    type = "RequestTimeoutError"


class SlowReaderError(RequestError):
    """The client reads its stream more slowly than the engine produces it."""

    status = 408
    type = "RequestTimeoutError"
    cause = "slow_reader"


class HeadersTooLargeError(RequestError):
    status = 431
    type = "RequestHeadersTooLargeError"


class NotAvailableError(OverloadedError):
    """The daemon is starting or stopping."""


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
"""A heap address, as in Python's default repr of an object."""
_PATH = re.compile(r"(?<![\w.#-])(?<!:/)/(?!v1/)[\w.@+~-]+(?:/[\w.@+~-]+)+")
"""A file path in an error of the system or of a library; the API's own paths are excepted, and
places in a JSON schema (#/properties/a)."""


class DrainingError(NotAvailableError):
    """The daemon drains: running requests finish, new ones are refused."""

    def __init__(self) -> None:
        super().__init__("draining: the server is shutting down and accepts no more requests")


class SwitchingModelError(NotAvailableError):
    """Another model replaces the present one in place: running requests finish first."""

    def __init__(self) -> None:
        super().__init__("another model is being loaded: retry soon")


_RETRYABLE = frozenset({408, 409, 429})
"""4xx statuses that may disappear on a retry. With the others, Anthropic's clients get
x-should-retry: false; without it, an agent may try a wrong key ten times."""
_HTTP_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def public_message(error: RequestError) -> str:
    """Return the error's message without heap addresses and file paths."""
    return _PATH.sub("/…", _ADDRESS.sub("0x…", error.message))


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the error in OpenAI's format, without heap addresses and file paths."""
    return {
        "error": {
            "message": public_message(error),
            "type": error.type,
            "param": error.param,
            "code": error.code or error.status,
        }
    }


def error_response(error: RequestError, scope: Scope | None = None) -> JSONResponse:
    """Log that a request is refused and return the response, in the format that the client expects.

    scope: of the request; None for OpenAI's format and no line, if the caller writes it.
    """
    if scope is not None:
        _log_refusal(error, scope)
    headers = {}
    if error.retry_after_seconds:
        headers["retry-after"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 431) or isinstance(error, DrainingError):
        headers["connection"] = "close"
    if isinstance(error, TimeLimitError):
        headers["x-should-retry"] = "false"  # clients would have it computed again, to the same end
    if scope is not None and expects_anthropic(scope):
        return _message_error(error.status, public_message(error), headers)
    return JSONResponse(error_body(error), error.status, headers)


def install(app: FastAPI) -> None:
    """Register handlers for all exceptions of the routes."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def _message_error(status: int, message: str, headers: Mapping[str, str]) -> JSONResponse:
    request_id = new_request_id()
    body = message_error_body(status, message, request_id)
    named = {**headers, "request-id": request_id}
    if status < 500 and status not in _RETRYABLE:
        named["x-should-retry"] = "false"
    return JSONResponse(body, status, named)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _HTTP_TYPES.get(error.status_code, "BadRequestError")
    message = f"{request.method} {shown(request.url.path)}: {error.detail}"
    refusal = RequestError(message)
    refusal.status, refusal.type = error.status_code, kind
    _log_refusal(refusal, request.scope)
    if expects_anthropic(request.scope):
        return _message_error(error.status_code, message, error.headers or {})
    body = {"message": message, "type": kind, "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    """Return an empty response: the client disconnected during its upload."""
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("a route failed", exc_info=error)
    return error_response(RequestError("internal error"), request.scope)


def _log_refusal(error: RequestError, scope: Scope) -> None:
    """Write the line of a refused request; a health check of an unready daemon has none."""
    if error.status < 500 or not scope["path"].startswith(("/health", "/ping")):
        scope["app"].state.app_state.request_log.log_refusal(error, scope)


# Errors in Anthropic's format, for the paths of /v1/messages and Anthropic's clients at /v1/models.


MESSAGES_PATH: Final = "/v1/messages"
MODELS_PATH: Final = "/v1/models"
VERSION_HEADER: Final = "anthropic-version"
"""Header that all clients of Anthropic's API send."""

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


def expects_anthropic(scope: Scope) -> bool:
    """Return whether responses to a request are in Anthropic's format."""
    path = f"{scope['path']}/"
    if path.startswith(f"{MESSAGES_PATH}/"):
        return True
    return path.startswith(f"{MODELS_PATH}/") and VERSION_HEADER in Headers(scope=scope)


def message_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format. request_id: of the request-id header."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def new_request_id() -> str:
    """Return a random id in Anthropic's format, for a response that has no id of its own."""
    return f"req_{secrets.token_hex(12)}"
