"""Reports which process caused the daemon to end, and how.

Processes fail in chains: an engine exits because a worker has died. The report is about the first
cause, which is not always the failure that the supervisor notices first.
"""

import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Final

from deploy.display import Display
from deploy.supervisor.processes import Child
from proto.errors import ConfigError, ErrorInfo, ModelError
from proto.messages.lifecycle import Role

_INNERMOST_FIRST: Final[tuple[Role, ...]] = ("worker", "engine_core", "api_server")
_USER_ERRORS: Final = (ConfigError.__name__ + ": ", ModelError.__name__ + ": ")


def first_cause(failed: Sequence[Child]) -> Child:
    """Return the first cause among processes that failed at nearly the same time.

    Death by a signal ranks before a reported error, and that before an exit without a report;
    among equals, the process closest to the device is the cause.
    """

    def rank(process: Child) -> tuple[int, int]:
        if process.exit_status is not None and process.exit_status < 0:
            kind = 0
        else:
            kind = 1 if process.fatal_error is not None else 2
        return kind, _INNERMOST_FIRST.index(process.role)

    return min(failed, key=rank)


def user_error(error: ErrorInfo | None) -> str | None:
    """Return the message of an error that the user can fix, such as an unknown model; else None."""
    if error is None:
        return None
    for prefix in _USER_ERRORS:
        if error.message.startswith(prefix):
            return error.message.removeprefix(prefix)
    return None


def exit_report(cause: Child, moment: str) -> str:
    """Return the report about the process that failed first. moment: "while serving"."""
    lines = [f"{cause.name} (pid {cause.pid}) {describe_exit(cause)} {moment}"]
    error = cause.fatal_error
    if error is not None:
        lines.append(textwrap.indent(error.traceback.rstrip() or error.message, "  "))
    lines.append("  the other processes were ended")
    return "\n".join(lines)


def describe_exit(dead: Child) -> str:
    """Describe how a process ended: "was killed by SIGKILL", "ended with exit status 3"."""
    status = dead.exit_status
    if status is not None and status < 0:
        return f"was killed by {_signal_name(-status)}"
    if dead.fatal_error is not None:
        return f"failed with {dead.fatal_error.message}"
    return f"ended by itself with exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


CHAIN_SECONDS: Final = 0.1
"""Failures within this time of the first one have the same cause."""


class FailureLog:
    """The failures that end the daemon, if any."""

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = display
        self._clock = clock
        self._failed: list[Child] = []
        self._first_at = 0.0

    def record_first(self, process: Child) -> None:
        """Record the failure that ends the daemon."""
        self._first_at = self._clock()
        self._failed.append(process)

    def record_later(self, process: Child, *, expected: bool) -> None:
        """Record a failure during shutdown. expected: the supervisor caused this exit status."""
        if process in self._failed:
            return
        if self._failed and self._clock() - self._first_at < CHAIN_SECONDS:
            self._failed.append(process)
        elif not self._failed and not expected:
            what = f"{describe_exit(process)} during the shutdown"
            self._display.event(process.name, what, "WARNING")

    def report(self, status: int, *, serving: bool) -> int:
        """Print the report about the first cause, if any; return the exit status of the command.

        status: the exit status without a failure. serving: whether the daemon had been ready.
        """
        if not self._failed:
            return status
        cause = first_cause(self._failed)
        message = user_error(cause.fatal_error)
        if message is not None:
            self._display.error(message)
            return 2
        moment = "while serving" if serving else "while starting"
        self._display.error(exit_report(cause, moment))
        return 1
