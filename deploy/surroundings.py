"""What tokend takes from the environment it was started in.

Read once, by the command line, and passed to whoever needs it; nothing else
looks at environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from proto.run_directory import default_parent


@dataclass(frozen=True)
class Surroundings:
    """cache: tokend's own cache folder. variables: what child processes inherit."""

    cache: str
    variables: Mapping[str, str]

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "Surroundings":
        """From environment variables, by the XDG rules for where things go."""
        home = os.path.expanduser("~")
        base = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
        return cls(os.path.join(os.path.abspath(base), "tokend"), dict(variables))

    def run_parent(self) -> str:
        """Where run directories go; raises TokendError when there is no place."""
        return default_parent(self.variables.get("XDG_RUNTIME_DIR"))
