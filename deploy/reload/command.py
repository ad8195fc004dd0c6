"""`tokend reload`: requests a reload from a running daemon and reports its result.

Finds the daemon by its run directory, sends SIGHUP to its supervisor, and waits until the state
file in the run directory shows the end of the reload.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from deploy.daemons import running_daemons, select
from deploy.reload.reload import write_wanted_model
from proto.errors import ConfigError, ProtocolError, TokendError
from proto.lifecycle import DaemonState
from proto.run_directory import in_use, read_state

USAGE: Final = """\
usage: tokend reload [MODEL] [--pid PID | --run-directory DIRECTORY]

Replaces engine and workers of a running daemon: the new ones use the model files and the installed
code as they are now, and the same flags. Requests continue. MODEL: serve this model from now on, a
name or a path as for `tokend serve`; running requests finish on the old one. Without a flag the
only daemon of this user is reloaded. Waits for the end of the reload; the exit status is 1 if the
reload failed.
"""
_FLAGS: Final = ("--pid", "--run-directory")
_POLL_SECONDS: Final = 0.05


def main(words: Sequence[str], parents: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 if the daemon was reloaded, 1 if not.

    parents: folders with run directories.
    """
    if list(words) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    model, flags = _model_and_flags(list(words))
    directory = _find_run_directory(flags, parents)
    before = _wait_for_state(directory, lambda state: not state.under_way)
    if model is not None:
        write_wanted_model(directory, model)
    os.kill(before.pid, signal.SIGHUP)
    after = _wait_for_state(
        directory, lambda state: state.count > before.count and not state.under_way
    )
    if after.error:
        print(f"tokend: the reload failed, nothing has changed: {after.error}", file=sys.stderr)
        return 1
    print("reloaded" if model is None else f"reloaded: the model is {after.model} now")
    return 0


def _model_and_flags(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the model among the words, a path as an absolute one, and the other words."""
    models = [
        word
        for before, word in pairwise(["", *words])
        if not word.startswith("-") and before not in _FLAGS
    ]
    if not models:
        return None, words
    words.remove(models[0])
    given = os.path.expanduser(models[0])
    return os.path.abspath(given) if os.path.exists(given) else models[0], words


def _find_run_directory(words: list[str], parents: Sequence[str]) -> str:
    if not words:
        return select(None, running_daemons(parents)).directory
    flag, _, value = words[0].partition("=")
    rest = words[1:]
    if not value and rest:
        value = rest.pop(0)
    if flag not in _FLAGS or not value or rest:
        raise ConfigError("tokend reload takes MODEL, and --pid PID or --run-directory DIRECTORY")
    if flag == "--run-directory":
        if not in_use(value):
            raise ConfigError(f"{value} is not the run directory of a running daemon")
        return value
    for daemon in running_daemons(parents):
        if str(daemon.state.pid) == value:
            return daemon.directory
    raise ConfigError(f"process {value} is not the supervisor of a daemon of this user")


def _wait_for_state(directory: str, is_reached: Callable[[DaemonState], bool]) -> DaemonState:
    """Poll until a state is reached, and return it; raises TokendError if the daemon ends."""
    while True:
        try:
            state = read_state(directory)
        except (OSError, ProtocolError):
            raise TokendError(f"the daemon in {directory} has ended") from None
        if is_reached(state):
            return state
        if not in_use(directory):
            raise TokendError(f"the daemon in {directory} ended meanwhile")
        time.sleep(_POLL_SECONDS)
