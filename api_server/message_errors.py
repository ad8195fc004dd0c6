"""Errors in Anthropic's shape, for the paths of /v1/messages.

Owns which paths these are and what a status is called there. Which error it is, and what it says,
is known elsewhere.
"""

import secrets
from typing import Any, Final

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
    """What clients of that API tell errors apart by."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def message_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """request_id: is in the header of that name as well."""
    error = {"type": error_type(status), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def new_request_id() -> str:
    """For an answer that has no other."""
    return f"req_{secrets.token_hex(12)}"
