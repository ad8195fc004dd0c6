"""What tokend takes from the environment it was started in.

Read once, by the command line, and passed to whoever needs it; nothing else
looks at environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.supervisor import notify
from proto.run_directory import default_parent

FAULTS_VARIABLE: Final = "TOKEND_FAULTS"
"""What is to break on purpose, see proto/faults.py; only with --enable-fault-injection."""
API_KEY_VARIABLE: Final = "TOKEND_API_KEY"
"""Holds the API key for those who do not want it on a command line that others can see."""
ADMIN_KEY_VARIABLE: Final = "TOKEND_ADMIN_API_KEY"
"""The same for the key of operators."""


@dataclass(frozen=True)
class HostEnvironment:
    """cache: tokend's own cache folder. variables: what child processes inherit.

    settings: config fields that the environment sets; flags and file go before them.
    service_manager: what a service manager such as systemd told the process it started.
    faults: what is to break on purpose, as written.
    """

    cache: str
    variables: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    service_manager: Mapping[str, str] = field(default_factory=dict)
    faults: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "HostEnvironment":
        """From environment variables, by the XDG rules for where things go."""
        home = os.path.expanduser("~")
        base = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
        inherited = dict(variables)
        secrets = {"api_key": API_KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
        settings = {
            field: inherited.pop(name) for field, name in secrets.items() if name in inherited
        }
        manager = {name: inherited.pop(name) for name in notify.VARIABLES if name in inherited}
        faults = inherited.pop(FAULTS_VARIABLE, "")
        cache = os.path.join(os.path.abspath(base), "tokend")
        return cls(cache, inherited, settings, manager, faults)

    def run_parent(self) -> str:
        """Where run directories go; raises TokendError when there is no place."""
        return default_parent(self.variables.get("XDG_RUNTIME_DIR"))
