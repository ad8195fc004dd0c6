"""`tokend reload`: asks a daemon for a reload and says how it went.

Finds the daemon by its run directory, sends SIGHUP to its supervisor, and waits for the file
in which that one writes down how reloads end.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from deploy.reload.progress import read_state
from proto.errors import ConfigError, ProtocolError, TokendError
from proto.lifecycle import ReloadState
from proto.run_directory import in_use, run_directories

USAGE: Final = """\
usage: tokend reload [--pid PID | --run-directory DIRECTORY]

Brings a running daemon a new engine and new workers, with the model as it is now and the code
that is installed now; the flags stay. Requests go on. Without a flag the one daemon of this user
is meant. Waits for the end of the reload; the exit status is 1 when nothing has changed.
"""
_LOOK_SECONDS: Final = 0.05


def main(words: Sequence[str], parent: str) -> int:
    """parent: where run directories lie. Exit status 0 when the daemon was reloaded."""
    if list(words) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    directory = _find(list(words), parent)
    before = _await(directory, lambda state: not state.under_way)
    os.kill(before.pid, signal.SIGHUP)
    after = _await(directory, lambda state: state.count > before.count and not state.under_way)
    if after.problem:
        print(f"tokend: the reload failed, nothing has changed: {after.problem}", file=sys.stderr)
        return 1
    print("reloaded")
    return 0


def _find(words: list[str], parent: str) -> str:
    if not words:
        return _only_one(run_directories(parent), parent)
    flag, _, value = words[0].partition("=")
    rest = words[1:]
    if not value and rest:
        value = rest.pop(0)
    if flag not in ("--pid", "--run-directory") or not value or rest:
        raise ConfigError("tokend reload takes --pid PID or --run-directory DIRECTORY")
    if flag == "--run-directory":
        if not in_use(value):
            raise ConfigError(f"no daemon lives in {value}")
        return value
    found = [path for path in run_directories(parent) if str(_pid_or_none(path)) == value]
    if not found:
        raise ConfigError(f"process {value} is no supervisor of a daemon under {parent}")
    return found[0]


def _only_one(directories: list[str], parent: str) -> str:
    if not directories:
        raise ConfigError(f"no daemon of this user is running under {parent}")
    if len(directories) > 1:
        pids = ", ".join(str(_pid_or_none(path)) for path in directories)
        raise ConfigError(f"several daemons are running: say which with --pid, one of {pids}")
    return directories[0]


def _pid_or_none(directory: str) -> int | None:
    """None where the daemon has only begun to start, or is another user's."""
    try:
        return read_state(directory).pid
    except (OSError, ProtocolError):
        return None


def _await(directory: str, is_it: Callable[[ReloadState], bool]) -> ReloadState:
    """The state of the daemon, once it is so; raises TokendError when the daemon ends before."""
    while True:
        try:
            state = read_state(directory)
        except (OSError, ProtocolError):
            raise TokendError(f"the daemon in {directory} has ended") from None
        if is_it(state):
            return state
        if not in_use(directory):
            raise TokendError(f"the daemon in {directory} ended meanwhile")
        time.sleep(_LOOK_SECONDS)
