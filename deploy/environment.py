"""Environment variables of tokend, read once by the command line and passed on.

No other part of `deploy` reads environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.supervisor import notify
from proto.run_directory import default_parent

FAULTS_VARIABLE: Final = "TOKEND_FAULTS"
"""Faults to inject, see proto/faults.py; needs --enable-fault-injection."""
API_KEY_VARIABLE: Final = "TOKEND_API_KEY"
"""The API key, for users who keep it off the command line, which other users can read."""
ADMIN_KEY_VARIABLE: Final = "TOKEND_ADMIN_API_KEY"
"""The admin key."""


@dataclass(frozen=True)
class HostEnvironment:
    """The environment that tokend was started in.

    cache: tokend's cache folder. variables: environment variables of child processes.
    settings: configuration fields set by the environment; flags and file override them.
    service_manager: variables that a service manager such as systemd has set.
    faults: value of TOKEND_FAULTS.
    """

    cache: str
    variables: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    service_manager: Mapping[str, str] = field(default_factory=dict)
    faults: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "HostEnvironment":
        """Create from environment variables; the cache folder follows the XDG rules."""
        home = os.path.expanduser("~")
        base = variables.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
        inherited = dict(variables)
        secrets = {"api_key": API_KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
        settings = {
            field: inherited.pop(name) for field, name in secrets.items() if name in inherited
        }
        manager: dict[str, str] = {
            name: inherited.pop(name) for name in notify.VARIABLES if name in inherited
        }
        faults = inherited.pop(FAULTS_VARIABLE, "")
        cache = os.path.join(os.path.abspath(base), "tokend")
        return cls(cache, inherited, settings, manager, faults)

    @property
    def hugging_face_cache(self) -> str:
        """Folder of the models that `hf download` has fetched, by the rules of its library."""
        root = self.variables.get("HF_HOME")
        if not root:
            base = self.variables.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
            root = os.path.join(base, "huggingface")
        return os.path.expanduser(self.variables.get("HF_HUB_CACHE") or os.path.join(root, "hub"))

    def run_parent(self) -> str:
        """Return the folder of run directories; raises TokendError if none is writable."""
        return default_parent(self.variables.get("XDG_RUNTIME_DIR"))
