"""`tokend reload`: requests a reload from a running daemon and reports its result.

Finds the daemon by its run directory, sends SIGHUP to its supervisor, and waits until the state
file in the run directory shows the end of the reload.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from deploy.daemons import running_daemons, select
from deploy.flags import parse_words
from deploy.reload.reload import write_wanted_model
from proto.errors import ConfigError, ProtocolError, TokendError
from proto.lifecycle import DaemonState
from proto.run_directory import in_use, read_state

_FLAGS: Final = ("--pid", "--run-directory")
_POLL_SECONDS: Final = 0.05


def main(words: Sequence[str], parents: Sequence[str]) -> int:
    """Run the command and return its exit status: 0 if the daemon was reloaded, 1 if not.

    parents: folders with run directories.
    """
    models, values = parse_words(words, _FLAGS)
    if len(models) > 1 or len(values) > 1:
        raise ConfigError("tokend reload takes MODEL, and --pid PID or --run-directory DIRECTORY")
    model = _absolute(models[0]) if models else None
    directory = _find_run_directory(values, parents)
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


def _absolute(model: str) -> str:
    """Return a model's name, or the absolute path of its file or folder."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


def _find_run_directory(values: Mapping[str, str], parents: Sequence[str]) -> str:
    """Return that of the daemon which the flags name; without flags, of the only one."""
    directory = values.get("--run-directory")
    if directory is None:
        return select(values.get("--pid"), running_daemons(parents)).directory
    if not in_use(directory):
        raise ConfigError(f"{directory} is not the run directory of a running daemon")
    return directory


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
