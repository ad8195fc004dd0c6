"""The words after `tokend trace`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Final

from proto.errors import ConfigError

USAGE: Final = """\
usage: tokend trace NAME FILE [flags]; flags: tokend trace NAME --help

  view      a trace of the scheduler (tokend serve --sched-trace FILE) as a page to look at
  replay    its arrivals through the scheduler again, under other policies and settings
"""
_NAMES: Final = {"view": "deploy.trace.view", "replay": "deploy.trace.replay"}


def main(words: Sequence[str]) -> int:
    """The exit status; raises ConfigError for words that make no sense."""
    if list(words) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not words or words[0] not in _NAMES:
        raise ConfigError(USAGE.rstrip())
    status: int = import_module(_NAMES[words[0]]).main(words[1:])
    return status
