"""Reports which process caused the daemon to end, and how.

Processes fail in chains: the engine exits because a worker is gone. The culprit is the first cause,
not the failure that was noticed first.
"""

import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Final

from deploy.display import Reporter
from deploy.supervisor.processes import Child
from proto.errors import ConfigError, ErrorInfo, ModelError
from proto.lifecycle import Role

_INNERMOST_FIRST: Final[tuple[Role, ...]] = ("worker", "engine_core", "api_server")
_USER_ERRORS: Final = (ConfigError.__name__ + ": ", ModelError.__name__ + ": ")


def culprit_of(failed: Sequence[Child]) -> Child:
    """Return the first cause among processes that failed at nearly the same time.

    Death by a signal ranks before a reported error, and that before an exit without a report;
    among equals, the process closest to the device is the culprit.
    """

    def rank(each: Child) -> tuple[int, int]:
        if each.exit_status is not None and each.exit_status < 0:
            manner = 0
        else:
            manner = 1 if each.last_words is not None else 2
        return manner, _INNERMOST_FIRST.index(each.role)

    return min(failed, key=rank)


def user_error(error: ErrorInfo | None) -> str | None:
    """Return the message of an error that the user can fix, such as an unknown model; else None."""
    if error is None:
        return None
    for prefix in _USER_ERRORS:
        if error.message.startswith(prefix):
            return error.message.removeprefix(prefix)
    return None


def render(culprit: Child, moment: str) -> str:
    """Return the report about the culprit. moment: what the daemon was doing, for the message."""
    lines = [f"tokend: {culprit.name} (pid {culprit.pid}) {manner(culprit)} {moment}"]
    error = culprit.last_words
    if error is not None:
        lines.append(textwrap.indent(error.traceback.rstrip() or error.message, "  "))
    lines.append("tokend: the other processes were ended")
    return "\n".join(lines)


def manner(deceased: Child) -> str:
    """Describe how a process ended: "was killed by SIGKILL", "ended with exit status 3"."""
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


CHAIN_SECONDS: Final = 0.1
"""Failures within this time of the first belong to one chain with one culprit."""


class Failures:
    """The failures that end the daemon, if any."""

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._failed: list[Child] = []
        self._begun_at = 0.0

    def begin(self, process: Child) -> None:
        """Record the failure that ends the daemon."""
        self._begun_at = self._clock()
        self._failed.append(process)

    def add(self, process: Child, *, expected: bool) -> None:
        """Record a failure during shutdown. expected: the supervisor caused this exit status."""
        if process in self._failed:
            return
        if self._failed and self._clock() - self._begun_at < CHAIN_SECONDS:
            self._failed.append(process)
        elif not self._failed and not expected:
            self._reporter.notice(f"{manner(process)} while it was ending", process.name)

    def conclude(self, status: int, *, serving: bool) -> int:
        """Print the report about the culprit, if any, and return the exit status of the command.

        status: without a culprit. serving: whether the daemon had been ready.
        """
        if not self._failed:
            return status
        culprit = culprit_of(self._failed)
        message = user_error(culprit.last_words)
        if message is not None:
            print(f"tokend: {message}", file=sys.stderr, flush=True)
            return 2
        moment = "while serving" if serving else "while starting"
        print(render(culprit, moment), file=sys.stderr, flush=True)
        return 1
