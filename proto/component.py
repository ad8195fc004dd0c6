"""Classes found by name and imported on use.

A registry maps names to "module:class", so that components that are not configured are not
imported.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from proto.errors import ConfigError


def load_class(target: str, field: str) -> Any:
    """Import "module:class"; raises ConfigError about the setting `field` if that fails."""
    module_path, _, name = target.partition(":")
    try:
        module = import_module(module_path)
    except ImportError as error:
        raise ConfigError(f"{field}: {module_path} cannot be imported: {error}", field) from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{field}: {module_path} has no class {name}", field)
    return found


def find_class(known: Mapping[str, str], name: str, field: str) -> Any:
    """Return the class of a name; raises ConfigError with the known names for an unknown one."""
    if name not in known:
        raise ConfigError(
            f"{field}: {name} is not registered; there are {', '.join(sorted(known))}", field
        )
    return load_class(known[name], field)
