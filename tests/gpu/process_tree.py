"""Run a command with a time limit and end all of its processes.

    python -m tests.gpu.process_tree SECONDS COMMAND ...

Processes of the command end with it, also those in sessions of their own: this process is a
subreaper, so orphans become its children. The exit status is the command's; 124 after the limit,
143 after a SIGTERM.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

TIMED_OUT: Final = 124
TERMINATED: Final = 143
_SET_PARENT_DEATH_SIGNAL: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_KILL_SECONDS: Final = 15.0


def children() -> dict[int, list[int]]:
    """Processes of this host by parent id."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The command's name, in brackets, may contain spaces and brackets.
                state = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found.setdefault(int(state[1]), []).append(int(folder.name))
    return found


def descendants(root: int) -> list[int]:
    """All descendants of a process."""
    below, found = children(), [root]
    for each in found:
        found += below.get(each, [])
    return found[1:]


def end_descendants() -> list[int]:
    """Kill all descendants of this process and wait; returns the remaining ones."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for each in left:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.01)
    return descendants(os.getpid())


class _Terminated(Exception):
    """SIGTERM has reached this process."""


def _terminate(*_: Any) -> None:
    raise _Terminated


def main(seconds: float, command: Sequence[str]) -> int:
    """Return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    control = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_SET_CHILD_SUBREAPER, 1), (_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)):
        if control(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    try:
        status = subprocess.Popen(command).wait(seconds)
    except subprocess.TimeoutExpired:
        status = TIMED_OUT
    except _Terminated:
        status = TERMINATED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        left = end_descendants()
    if left:
        print(f"processes that could not be ended: {left}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
