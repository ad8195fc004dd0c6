"""Who brought the daemon down, and how to say it.

Processes die in chains: the engine gives up because a worker is gone. The
culprit is the first cause, not the first that was noticed.
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
    """The first cause among processes that failed at nearly the same time.

    Who is killed did not choose to end, so a signal counts before an error, and an
    error before an end without a word; among equals the one nearest to the device.
    """

    def rank(each: Child) -> tuple[int, int]:
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


def render(culprit: Child, moment: str) -> str:
    """The block that names the culprit. `moment` is what the daemon was doing."""
    lines = [f"tokend: {culprit.name} (pid {culprit.pid}) {manner(culprit)} {moment}"]
    error = culprit.last_words
    if error is not None:
        lines.append(textwrap.indent(error.traceback.rstrip() or error.message, "  "))
    lines.append("tokend: the other processes were ended")
    return "\n".join(lines)


def manner(deceased: Child) -> str:
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


# What a daemon ends of: the processes that failed, and what the user is told of them.
#
# Processes die in chains. Owns the first failure and those that followed it at once.


CHAIN_SECONDS: Final = 0.1
"""Failures this close to the first are taken for one chain with one culprit."""


class Failures:
    """None, as long as the daemon does not end of one."""

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._failed: list[Child] = []
        self._begun_at = 0.0

    def begin(self, process: Child) -> None:
        """It failed, and the daemon ends of it."""
        self._begun_at = self._clock()
        self._failed.append(process)

    def add(self, process: Child, *, expected: bool) -> None:
        """One more, while the daemon ends. expected: we ended it in just this way."""
        if process in self._failed:
            return
        if self._failed and self._clock() - self._begun_at < CHAIN_SECONDS:
            self._failed.append(process)
        elif not self._failed and not expected:
            self._reporter.notice(f"{manner(process)} while it was ending", process.name)

    def conclude(self, status: int, *, serving: bool) -> int:
        """The exit status of the command, once it is said who the culprit is.

        status: where there is none. serving: the daemon had been ready.
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
