"""Who brought the daemon down, and how to say it.

Processes die in chains: the engine gives up because a worker is gone. The
culprit is the first cause, not the first that was noticed.
"""

import signal
import textwrap
from collections.abc import Sequence
from typing import Final, Protocol

from proto.errors import ConfigError, ErrorInfo, ModelError
from proto.lifecycle import Role

_INNERMOST_FIRST: Final[tuple[Role, ...]] = ("worker", "engine_core", "api_server")
_USER_ERRORS: Final = (ConfigError.__name__ + ": ", ModelError.__name__ + ": ")


class Deceased(Protocol):
    """What is known of a process that failed. `exit_status` is None while it ends."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def index(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def exit_status(self) -> int | None: ...
    @property
    def last_words(self) -> ErrorInfo | None: ...


def culprit_of(failed: Sequence[Deceased]) -> Deceased:
    """The first cause among processes that failed at nearly the same time.

    Who is killed did not choose to end, so a signal counts before an error, and an
    error before an end without a word; among equals the one nearest to the device.
    """

    def rank(each: Deceased) -> tuple[int, int]:
        if each.exit_status is not None and each.exit_status < 0:
            manner = 0
        else:
            manner = 1 if each.last_words is not None else 2
        return manner, _INNERMOST_FIRST.index(each.role)

    return min(failed, key=rank)


def user_error(error: ErrorInfo | None) -> str | None:
    """The message of an error that the user can mend, such as a model of an unknown kind."""
    if error is None:
        return None
    for prefix in _USER_ERRORS:
        if error.message.startswith(prefix):
            return error.message.removeprefix(prefix)
    return None


def render(culprit: Deceased, moment: str) -> str:
    """The block that names the culprit. `moment` is what the daemon was doing."""
    lines = [f"tokend: {culprit.name} (pid {culprit.pid}) {manner(culprit)} {moment}"]
    error = culprit.last_words
    if error is not None:
        lines.append(textwrap.indent(error.traceback.rstrip() or error.message, "  "))
    lines.append("tokend: the other processes were ended")
    return "\n".join(lines)


def manner(deceased: Deceased) -> str:
    """How a process ended: "was killed by SIGKILL", "ended with exit status 3"."""
    status = deceased.exit_status
    if status is not None and status < 0:
        return f"was killed by {_signal_name(-status)}"
    if deceased.last_words is not None:
        return f"failed with {deceased.last_words.message}"
    return f"ended by itself with exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal
