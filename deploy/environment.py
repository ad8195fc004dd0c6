"""Environment variables of tokend, read once by the command line and passed on.

No other part of `deploy` reads environment variables.
"""

import contextlib
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final

from deploy import notify
from proto.errors import ConfigError
from proto.runtime.run_directory import default_parent, parents

FAULTS_VARIABLE: Final = "TOKEND_FAULTS"
"""Faults to inject, see proto/runtime/faults.py; needs --enable-fault-injection."""
API_KEY_VARIABLE: Final = "TOKEND_API_KEY"
"""The API key, for users who keep it off the command line, which other users can read."""
ADMIN_KEY_VARIABLE: Final = "TOKEND_ADMIN_API_KEY"
"""The admin key."""
_VARIABLES: Final = (FAULTS_VARIABLE, API_KEY_VARIABLE, ADMIN_KEY_VARIABLE)


@dataclass(frozen=True)
class HostEnvironment:
    """The environment that tokend was started in.

    variables: environment variables of child processes.
    settings: configuration fields set by the environment; flags and file override them.
    service_manager: variables that a service manager such as systemd has set.
    faults: value of TOKEND_FAULTS.
    misspelt: names of variables that mean nothing, each with the one that was probably meant.
    headers_folder: temporary folder for models of the Hugging Face hub that are not downloaded yet,
        of whose weights only the headers are wanted; None to download them.
    """

    variables: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    service_manager: Mapping[str, str] = field(default_factory=dict)
    faults: str = ""
    misspelt: Mapping[str, str] = field(default_factory=dict)
    headers_folder: str | None = None

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "HostEnvironment":
        """Create from environment variables.

        Libraries of child processes would create a folder called ~ for a user without a home, such
        as an unknown user id in a container: their HOME is tokend's cache folder then.
        """
        inherited = dict(variables)
        secrets = {"api_key": API_KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
        settings = {
            field: inherited.pop(name) for field, name in secrets.items() if name in inherited
        }
        manager: dict[str, str] = {
            name: inherited.pop(name) for name in notify.VARIABLES if name in inherited
        }
        faults = inherited.pop(FAULTS_VARIABLE, "")
        misspelt = {
            name: meant[0]
            for name in inherited
            if name.startswith("TOKEND_") and (meant := get_close_matches(name, _VARIABLES, 1, 0.8))
        }
        environment = cls(inherited, settings, manager, faults, misspelt)
        home = _home(variables)
        if not home or inherited.get("HOME", home) != home:
            with contextlib.suppress(ConfigError):
                inherited["HOME"] = home or environment.cache
        return environment

    @property
    def cache(self) -> str:
        """tokend's cache folder, by the XDG rules; raises ConfigError if there is no place for it.

        A relative path in XDG_CACHE_HOME counts as none, as the rules demand.
        """
        base, home = self.variables.get("XDG_CACHE_HOME", ""), _home(self.variables)
        if os.path.isabs(base):
            return os.path.join(os.path.normpath(base), "tokend")
        if home:
            return os.path.join(home, ".cache", "tokend")
        raise ConfigError(
            f"no folder for models: user {os.getuid()} has no home; set XDG_CACHE_HOME, or HOME, "
            "to the absolute path of a folder that this user can write to"
        )

    @property
    def hugging_face_cache(self) -> str:
        """Folder of the models that `hf download` has fetched, by the rules of its library."""
        root = self.variables.get("HF_HOME")
        if not root:
            base = self.variables.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
            root = os.path.join(base, "huggingface")
        return os.path.expanduser(self.variables.get("HF_HUB_CACHE") or os.path.join(root, "hub"))

    def with_hub_token(self, token: str | None) -> "HostEnvironment":
        """Return the environment with a token for the Hugging Face hub; None: as it is."""
        if token is None:
            return self
        return replace(self, variables={**self.variables, "HF_TOKEN": token})

    def run_parent(self) -> str:
        """Return the folder of run directories; raises TokendError if none is writable."""
        return default_parent(self.variables.get("XDG_RUNTIME_DIR"))

    def run_parents(self) -> list[str]:
        """Return all folders in which run directories of this user's daemons may be."""
        return parents(self.variables.get("XDG_RUNTIME_DIR"))


def _home(variables: Mapping[str, str]) -> str:
    """Return the user's home folder; "" if there is none.

    Container runtimes set HOME to / for a user id without an entry in /etc/passwd.
    """
    homes = [variables.get("HOME", "")]
    with contextlib.suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    return next((home for home in homes if os.path.isabs(home) and _may_be_home(home)), "")


def _may_be_home(folder: str) -> bool:
    return folder.strip("/") != "" or os.access(folder, os.W_OK)
