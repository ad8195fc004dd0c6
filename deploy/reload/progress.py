"""Tells everybody how a reload goes: people, the service manager, and `tokend reload`.

Owns the file RELOAD in the run directory, which says how often there was one and how the
last one went; `tokend reload` waits for it to change.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from deploy.display import Reporter
from deploy.supervisor.notify import Notifier
from proto.codec import from_json, to_json
from proto.lifecycle import ReloadState

RELOAD_FILE: Final = "reload"


def read_state(run_dir: str) -> ReloadState:
    """Raises OSError or ProtocolError where there is none."""
    return from_json(Path(run_dir, RELOAD_FILE).read_bytes(), ReloadState)


class ReloadNews:
    """run_dir: of this daemon."""

    def __init__(self, run_dir: str, reporter: Reporter, notifier: Notifier) -> None:
        self._path = os.path.join(run_dir, RELOAD_FILE)
        self._reporter = reporter
        self._notifier = notifier
        self._count = 0
        self._write()

    def reload_begins(self) -> None:
        self._write(under_way=True)
        self._notifier.reloading()
        self._reporter.notice("reloading: requests go on meanwhile")

    def reload_waits(self, reason: str) -> None:
        self._reporter.notice(reason)

    def reload_ends(self, problem: str, seconds: float, *, another: bool) -> None:
        self._count += 1
        self._write(another, problem)
        follows = "; another one follows" if another else ""
        if problem:
            self._reporter.notice(f"the reload failed, nothing has changed: {problem}{follows}")
        else:
            self._reporter.notice(f"reloaded after {seconds:.1f} s{follows}")
        self._notifier.reloaded()

    def _write(self, under_way: bool = False, problem: str = "") -> None:
        """Whole or not at all, for whoever reads it at this moment."""
        state = ReloadState(os.getpid(), self._count, under_way, problem)
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            Path(self._path + ".new").write_bytes(to_json(state))
            os.replace(self._path + ".new", self._path)
