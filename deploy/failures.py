"""What a daemon ends of: the processes that failed, and what the user is told of them.

Processes die in chains. Owns the first failure and those that followed it at once.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

from deploy import obituary
from deploy.obituary import Deceased
from deploy.reporting import Reporter

CHAIN_SECONDS: Final = 0.1
"""Failures this close to the first are taken for one chain with one culprit."""


class Failures:
    """None, as long as the daemon does not end of one."""

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._failed: list[Deceased] = []
        self._begun_at = 0.0

    def begin(self, process: Deceased) -> None:
        """It failed, and the daemon ends of it."""
        self._begun_at = self._clock()
        self._failed.append(process)

    def add(self, process: Deceased, *, expected: bool) -> None:
        """One more, while the daemon ends. expected: we ended it in just this way."""
        if process in self._failed:
            return
        if self._failed and self._clock() - self._begun_at < CHAIN_SECONDS:
            self._failed.append(process)
        elif not self._failed and not expected:
            self._reporter.notice(f"{obituary.manner(process)} while it was ending", process.name)

    def conclude(self, status: int, *, serving: bool) -> int:
        """The exit status of the command, once it is said who the culprit is.

        status: where there is none. serving: the daemon had been ready.
        """
        if not self._failed:
            return status
        culprit = obituary.culprit_of(self._failed)
        message = obituary.user_error(culprit.last_words)
        if message is not None:
            print(f"tokend: {message}", file=sys.stderr, flush=True)
            return 2
        moment = "while serving" if serving else "while starting"
        print(obituary.render(culprit, moment), file=sys.stderr, flush=True)
        return 1
