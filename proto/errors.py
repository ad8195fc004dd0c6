"""Exceptions and error messages, as one tree.

    TokendError
    ├── ConfigError            an invalid setting: exit status 2, one line
    ├── ModelError             a model folder or file cannot be used
    ├── RequestError           one request fails; carries the HTTP status
    │   ├── InvalidRequestError   400  names the parameter
    │   │   └── ContextLengthError   400  prompt and output do not fit into the context
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
    ├── ProtocolError          a peer sent an invalid message, or has another version
    └── ProcessDiedError       a process of this daemon ended unexpectedly

Between processes an error is sent as `ErrorInfo`.
"""

import re
import shlex
import sys
from typing import Final, Literal, Self

import msgspec

ErrorKind = Literal[
    "invalid_request",
    "overloaded",
    "internal",
    "engine_dead",
    "queue_full",
    "queue_timeout",
    "time_limit",
    "unknown_model",
]

MAX_SHOWN: Final = 100
_FLAG: Final = re.compile(r"--([a-z0-9-]+)")


def shown(value: object) -> str:
    """Return a client's value for an error message: at most about `MAX_SHOWN` characters.

    Unpaired surrogates are escaped, because they cannot be encoded as UTF-8.
    """
    text = str(value)
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
    return text.encode(errors="backslashreplace").decode()


class TokendError(Exception):
    """Root of every error that tokend raises on purpose."""


class ConfigError(TokendError):
    """A setting that is invalid, or in conflict with another.

    param: its name; by default that of the flag with which the message begins.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        flag = _FLAG.match(message)
        self.param = flag[1].replace("-", "_") if param is None and flag else param


class ModelError(TokendError):
    """A model that cannot be found, read or run; the message names the file or key."""


class ProtocolError(TokendError):
    """A peer sent an invalid message, or has another protocol version."""


class ProcessDiedError(TokendError):
    """A process of the daemon ended unexpectedly."""


class RequestError(TokendError):
    """Failure of one request.

    `message` is shown to the client, `param` names the offending field.
    code: `code` of the error in OpenAI's format; "" for the HTTP status.
    retry_after_seconds: value of the Retry-After header; 0 for none.
    cause: label in the metric of aborted requests; "" if it is not counted there.
    is_logged: whether the log has a line about the request that failed of it.
    quotes_client: whether the message may quote the request; the log does not have it then.
    """

    status = 500
    type = "InternalServerError"
    code = ""
    cause = ""
    retry_after_seconds = 0
    is_logged = False
    quotes_client = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    status = 400
    type = "BadRequestError"
    quotes_client = True

    @classmethod
    def fixed(cls, message: str, param: str | None = None) -> Self:
        """Return an error whose message has nothing of the request, so that the log has it, too."""
        error = cls(message, param)
        error.quotes_client = False
        return error

    def in_field(self, field: str) -> Self:
        """Return the error as one of a field, whose name the message then begins with."""
        return type(self)(f"{field}: {self.message}", field)


class ContextLengthError(InvalidRequestError):
    """The context is too short for prompt and output; `context_length_error` makes it."""

    code = "context_length_exceeded"


def context_length_error(
    max_model_len: int, problem: str, param: str, *, generates: bool = True
) -> ContextLengthError:
    """Return the error with the words by which LiteLLM, LangChain and agents recognise it.

    max_model_len: most tokens of prompt and output together. problem: a sentence about the request.
    generates: whether the request has output.
    """
    of_what = " of prompt and output together" if generates else ""
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens{of_what}. {problem}", param
    )


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
    """The path does not exist, or the settings disable it."""

    status = 404
    type = "NotFoundError"


class ConflictError(RequestError):
    """The operation conflicts with one that has not finished."""

    status = 409
    type = "ConflictError"


class RequestAbortedError(RequestError):
    """An operator aborted the request. Status 410, so that client libraries do not retry."""

    status = 410
    type = "RequestAbortedError"
    cause = "operator"

    def __init__(self) -> None:
        super().__init__("the request was aborted by an operator")


class RequestCancelledError(RequestError):
    """The client cancelled the request before the engine accepted it."""

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
    """The queue is full; `param` names the setting of the limit."""

    type = "overloaded_error"


class QueueTimeoutError(OverloadedError):
    """The request waited for its first step longer than the queue timeout."""

    type = "overloaded_error"
    cause = "queue_timeout"


class TimeLimitError(RequestError):
    """The deadline of the request has passed."""

    status = 504
    type = "timeout_error"
    cause = "timeout"


class InternalRequestError(RequestError):
    status = 500
    type = "InternalServerError"


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An error on the wire.

    `traceback` is for the log of the daemon and is never shown to a client.
    `retry_after_seconds`: 0 for the default of the kind of error.
    """

    kind: ErrorKind
    message: str
    param: str | None = None
    rank: int | None = None
    traceback: str = ""
    retry_after_seconds: int = 0

    def to_exception(self) -> RequestError:
        """Return the exception that a front end raises for the request."""
        classes: dict[str, type[RequestError]] = {
            "invalid_request": InvalidRequestError,
            "overloaded": OverloadedError,
            "engine_dead": OverloadedError,
            "queue_full": QueueFullError,
            "queue_timeout": QueueTimeoutError,
            "time_limit": TimeLimitError,
            "unknown_model": UnknownModelError,
        }
        error = classes.get(self.kind, InternalRequestError)(self.message, self.param)
        error.retry_after_seconds = self.retry_after_seconds or error.retry_after_seconds
        return error


def require(condition: bool, param: str, rule: str) -> None:
    """Raise InvalidRequestError for a parameter that breaks a rule."""
    if not condition:
        raise InvalidRequestError(f"{param} {rule}", param)


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra beside this Python's others.

    It names the packages, since no index need have tokend itself.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("tokend") or []
    except PackageNotFoundError:  # run from its sources
        return f"pip install '.[{extra}]'"
    parts = (line.partition(";") for line in lines)
    packages = [package.strip() for package, _, marker in parts if f'"{extra}"' in marker]
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])
