"""Parts from outside: classes and objects of other packages that a setting names.

A setting that chooses a part takes the name of a built-in one, `module:name`, or the name under
which an installed package registers one. There is one group of entry points for all kinds:

    [project.entry-points."tokend.plugins"]
    "scheduling_policy.shortest" = "shortest_first:ShortestFirst"     # --scheduling-policy shortest

Nothing is imported before a setting asks for it. docs/extending.md says what each kind is.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal

from proto.errors import ConfigError, shown

GROUP: Final = "tokend.plugins"
Kind = Literal[
    "scheduling_policy",
    "scheduler_feature",
    "eviction_policy",
    "kv_connector",
    "draft_proposer",
    "device",
    "model_family",
    "tool_parser",
]


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def installed_names(kind: Kind) -> list[str]:
    """Return the names under which installed packages register parts of a kind."""
    start = f"{kind}."
    return sorted(name.removeprefix(start) for name in _installed() if name.startswith(start))


def target_of(kind: Kind, name: str) -> str:
    """Return the `module:name` of a part from outside; "" for a name that nothing registers."""
    if ":" in name:
        return name
    entry = _installed().get(f"{kind}.{name}")
    return "" if entry is None else entry.value


def load_part(kind: Kind, name: str, field: str, base: type | None = None) -> Any:
    """Return a part from outside, an attribute of its module.

    base: the class that it must be a subclass of, if it must be one. Raises ConfigError about the
    setting `field` if there is none.
    """
    target = target_of(kind, name)
    if not target:
        raise ConfigError(f"{field}: {shown(name)} is not registered in {GROUP}", field)
    found = load_class(target, field)
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{field}: {target} is no subclass of {base.__module__}.{base.__qualname__}", field
        )
    return found


def load_class(target: str, field: str) -> Any:
    """Import "module:name"; raises ConfigError about the setting `field` if that fails."""
    module_path, _, name = target.partition(":")
    try:
        module = import_module(module_path)
    except ImportError as error:
        raise ConfigError(f"{field}: {module_path} cannot be imported: {error}", field) from None
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{field}: {module_path} has no {name}", field)
    return found


def medium_part(
    name: str,
    module: str | None,
    known: Mapping[str, str],
    half: Literal["manager", "handlers"],
    field: str,
) -> Any:
    """Return the function that makes one half of a medium for offloaded KV.

    known: built-in functions as "module:function", by name. A medium from outside is two functions
    of `module`, NAME_manager and NAME_handlers. field: the setting that has the name. Raises
    ConfigError if there is none.
    """
    if module:
        return load_class(f"{module}:{name}_{half}", field)
    if name not in known:
        raise ConfigError(
            f"{field}: {name} is not registered; there are {', '.join(sorted(known))}", field
        )
    return load_class(known[name], field)


def connector_class(
    name: str,
    module: str | None,
    known: Mapping[str, str],
    half: Literal["Scheduler", "Worker"],
    field: str,
) -> Any:
    """Return one half of a KV connector.

    known: built-in classes as "module:class", by name. A connector from outside is two classes,
    NAMEScheduler and NAMEWorker, of `module`, or of the module that a package registers for the
    name, or of MODULE:NAME. field: the setting that has the name. Raises ConfigError if there is
    none.
    """
    if not module and name in known:
        return load_class(known[name], field)
    if not module and ":" in name:
        module, name = name.split(":", 1)
    module = module or target_of("kv_connector", name)
    if not module:
        names = ", ".join([*sorted(known), *installed_names("kv_connector")])
        raise ConfigError(f"{field}: {name} is not registered; there are {names}", field)
    return load_class(f"{module}:{name}{half}", field)
