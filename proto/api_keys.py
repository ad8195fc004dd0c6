"""The keys that clients and operators may come with: one from the settings, others from a file.

    # name   key
    alice    6d1f0c…
    alice    91aa7b…      a second key of the same tenant: the next one, while both are in use
    batch    c04e2d…

The supervisor reads them to see that they can be read, before anything loads; each front
end reads them for itself. A key never stands in a message of an error.
"""

from dataclasses import dataclass, field
from typing import Final

from proto.config import FrontEndConfig, flag_name
from proto.errors import ConfigError

MAX_KEYS: Final = 1024
"""Every request with a key is compared with all of them."""
MAX_NAME_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class ApiKey:
    """name: of the tenant whose key it is; empty for one from the settings, and for operators'."""

    name: str
    key: bytes = field(repr=False)
    operator: bool = False


def read_api_keys(config: FrontEndConfig) -> tuple[ApiKey, ...]:
    """All keys, none where everyone may come; raises ConfigError naming file and line."""
    keys = []
    if config.api_key is not None:
        keys.append(ApiKey("", config.api_key.encode()))
    if config.api_key_file is not None:
        keys += _read_file("api_key_file", config.api_key_file)
    if config.admin_api_key is not None:
        keys.append(ApiKey("", config.admin_api_key.encode(), operator=True))
    if config.admin_api_key_file is not None:
        named = _read_file("admin_api_key_file", config.admin_api_key_file)
        keys += [ApiKey("", each.key, operator=True) for each in named]
    if len({each.key for each in keys}) < len(keys):
        raise ConfigError("the same API key was given twice", "api_key_file")
    return tuple(keys)


def _read_file(setting: str, path: str) -> list[ApiKey]:
    try:
        with open(path, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError as error:
        raise _wrong(setting, path, error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise _wrong(setting, path, "is not UTF-8 text") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[0]) > MAX_NAME_CHARACTERS:
            raise _wrong(setting, path, f"line {number} is not a name and a key")
        keys.append(ApiKey(words[0], words[1].encode()))
    if not keys:
        raise _wrong(setting, path, "there is no key in it")
    if len(keys) > MAX_KEYS:
        raise _wrong(setting, path, f"more than {MAX_KEYS} keys")
    return keys


def _wrong(setting: str, path: str, what: str) -> ConfigError:
    return ConfigError(f"{flag_name(setting)} {path}: {what}", setting)
