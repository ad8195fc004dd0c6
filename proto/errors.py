"""The errors users and other processes meet, as one tree.

    TokendError
    ├── ConfigError            a setting is wrong: exit status 2, one line
    ├── ModelError             a model folder or file cannot be used
    ├── RequestError           one request fails; carries the HTTP status
    │   ├── InvalidRequestError   400  names the parameter
    │   ├── UnsupportedMediaError 415
    │   ├── AuthenticationError   401
    │   ├── ForbiddenError        403
    │   ├── UnknownModelError     404
    │   ├── UnknownPathError      404
    │   ├── ConflictError         409
    │   ├── RequestAbortedError   410
    │   ├── RequestCancelledError 410
    │   ├── OverloadedError       503  may be retried
    │   │   ├── QueueFullError       503
    │   │   └── QueueTimeoutError    503
    │   ├── TimeLimitError        504
    │   └── InternalRequestError  500
    ├── ProtocolError          a peer sent what it must not, or speaks another version
    └── ProcessDiedError       a process of this daemon ended unasked

An error crosses a process as `ErrorInfo`.
"""

from typing import Final, Literal

import msgspec

ErrorKind = Literal[
    "invalid_request",
    "overloaded",
    "internal",
    "engine_dead",
    "queue_full",
    "queue_timeout",
    "time_limit",
]

MAX_SHOWN: Final = 100


def shown(value: object) -> str:
    """A client's value as a message shows it: about `MAX_SHOWN` characters, of which none is half
    of a surrogate pair, as no message with one could be sent."""
    text = str(value)
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
    return text.encode(errors="backslashreplace").decode()


class TokendError(Exception):
    """Root of every error that tokend raises on purpose."""


class ConfigError(TokendError):
    """A setting that is wrong, or in conflict with another."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ModelError(TokendError):
    """A model that cannot be found, read or run; the message names the file or key."""


class ProtocolError(TokendError):
    """A message that this process must not receive, or a peer of another version."""


class ProcessDiedError(TokendError):
    """A process of the daemon ended without being asked to."""


class RequestError(TokendError):
    """One request fails and nothing else does.

    `message` is shown to the client, `param` names the offending field.
    retry_after_seconds: when to try again; 0 says nothing of it.
    cause: by which it is counted among the requests that were cut short; "" for none.
    """

    status = 500
    type = "InternalServerError"
    cause = ""
    retry_after_seconds = 0

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    status = 400
    type = "BadRequestError"


class AuthenticationError(RequestError):
    status = 401
    type = "AuthenticationError"


class ForbiddenError(RequestError):
    status = 403
    type = "PermissionDeniedError"


class UnknownModelError(RequestError):
    status = 404
    type = "NotFoundError"


class UnknownPathError(RequestError):
    """There is nothing, as the daemon is set."""

    status = 404
    type = "NotFoundError"


class ConflictError(RequestError):
    """Not now: something has to end before."""

    status = 409
    type = "ConflictError"


class RequestAbortedError(RequestError):
    """An operator has ended it. Clients retry most other failures by themselves, not this one."""

    status = 410
    type = "RequestAbortedError"
    cause = "operator"

    def __init__(self) -> None:
        super().__init__("the request was aborted by an operator")


class RequestCancelledError(RequestError):
    """Its client has ended it before it was taken in."""

    status = 410
    type = "RequestCancelledError"
    cause = "cancel"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class UnsupportedMediaError(RequestError):
    status = 415
    type = "UnsupportedMediaTypeError"


class OverloadedError(RequestError):
    status = 503
    type = "ServiceUnavailableError"
    retry_after_seconds = 1


class QueueFullError(OverloadedError):
    """As many wait as may wait; `param` is the setting that says how many."""

    type = "overloaded_error"


class QueueTimeoutError(OverloadedError):
    """It waited for its first step for as long as it was to wait."""

    type = "overloaded_error"
    cause = "queue_timeout"


class TimeLimitError(RequestError):
    """Its time is over, whether or not it has begun."""

    status = 504
    type = "timeout_error"
    cause = "timeout"


class InternalRequestError(RequestError):
    status = 500
    type = "InternalServerError"


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An error on the wire.

    `traceback` is for the log of the daemon and is never shown to a client.
    `retry_after_seconds` is 0 where nothing better is known than the kind of error.
    """

    kind: ErrorKind
    message: str
    param: str | None = None
    rank: int | None = None
    traceback: str = ""
    retry_after_seconds: int = 0

    def to_exception(self) -> RequestError:
        """The exception that a front end raises for the request."""
        classes: dict[str, type[RequestError]] = {
            "invalid_request": InvalidRequestError,
            "overloaded": OverloadedError,
            "engine_dead": OverloadedError,
            "queue_full": QueueFullError,
            "queue_timeout": QueueTimeoutError,
            "time_limit": TimeLimitError,
        }
        error = classes.get(self.kind, InternalRequestError)(self.message, self.param)
        error.retry_after_seconds = self.retry_after_seconds or error.retry_after_seconds
        return error


def require(condition: bool, param: str, rule: str) -> None:
    """Raise InvalidRequestError for a parameter that breaks a rule."""
    if not condition:
        raise InvalidRequestError(f"{param} {rule}", param)
