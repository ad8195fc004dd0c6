"""The values of --lora-modules and --lora-access."""

import re
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from proto.errors import ConfigError, shown

MAX_NAME_CHARACTERS: Final = 256
"""Of the name of an adapter."""
_FIELD: Final = "lora_modules"


class LoRAModule(msgspec.Struct, frozen=True):
    """An adapter to load. path: of its folder or file. base_model_name: not used, as in vLLM."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_lora_modules(values: tuple[str, ...]) -> list[LoRAModule]:
    """Return the adapters of NAME=PATH, or of JSON with name and path; raises ConfigError."""
    modules = [_parse_module(value) for value in values]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules names {name} twice")
    return modules


def check_lora_name(name: str) -> None:
    """Raise ValueError for a name that no adapter may have, because it could not be written."""
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"must have 1 to {MAX_NAME_CHARACTERS} characters")
    if not name.isprintable() or name != name.strip():
        raise ValueError("must be printable, without spaces at its ends")


def _parse_module(value: str) -> LoRAModule:
    if value.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(value, type=LoRAModule, strict=True)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--lora-modules {shown(value)}: {error}") from None
    else:
        name, found, path = value.partition("=")
        if not found or not path:
            raise ConfigError(
                f"--lora-modules takes NAME=PATH or JSON with name and path, got {shown(value)}"
            )
        module = LoRAModule(name, path)
    try:
        check_lora_name(module.name)
    except ValueError as error:
        raise ConfigError(f"--lora-modules: the name {shown(module.name)!r} {error}") from None
    return module


class LoRAAccess:
    """Who may see and use which adapters: the patterns of --lora-access.

    An adapter that no pattern matches is for all clients; one that several match, for the clients
    of any of them. Raises ConfigError for a value that cannot be read.
    """

    def __init__(self, values: tuple[str, ...]) -> None:
        self._rules: list[tuple[str, frozenset[str]]] = []
        for value in values:
            pattern, found, keys = value.partition("=")
            names = frozenset(re.split(r"\+", keys)) if keys else frozenset[str]()
            if not found or not pattern or not names or "" in names:
                raise ConfigError(f"--lora-access takes PATTERN=KEY[+KEY …], got {shown(value)}")
            self._rules.append((pattern, names))

    @property
    def key_names(self) -> set[str]:
        """The keys that it names."""
        return {key for _, keys in self._rules for key in keys}

    def allows(self, lora_name: str, key_name: str) -> bool:
        """Return whether a client with this key may use an adapter. key_name: empty for none."""
        rules = [keys for pattern, keys in self._rules if fnmatchcase(lora_name, pattern)]
        return not rules or any(key_name in keys for keys in rules)


FOR_ALL: Final = LoRAAccess(())
"""All clients may use all adapters."""
