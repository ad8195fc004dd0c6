"""The words after `tokend trace`."""

from collections.abc import Sequence
from typing import Final

from deploy.trace import view
from proto.errors import ConfigError

USAGE: Final = """\
usage: tokend trace view FILE [flags]; flags: tokend trace view --help

Shows a trace of the scheduler (tokend serve --sched-trace FILE) as a page.
"""


def main(words: Sequence[str]) -> int:
    """Run the command. Return the exit status; raise ConfigError for unknown words."""
    if list(words) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not words or words[0] != "view":
        raise ConfigError(USAGE.rstrip())
    return view.main(words[1:])
