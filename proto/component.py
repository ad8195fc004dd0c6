"""Classes by name, imported when they are used and not before.

A registry maps names to "module:class", so that nobody pays for what is not configured; a class
that is not in any is named by its module's path.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from proto.errors import ConfigError


def load_class(target: str, field: str) -> Any:
    """What "module:class" names; raises ConfigError about the setting `field` where it is not."""
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
    """The class registered under a name; raises ConfigError listing the names for another."""
    if name not in known:
        raise ConfigError(
            f"{field}: {name} is not registered; there are {', '.join(sorted(known))}", field
        )
    return load_class(known[name], field)
