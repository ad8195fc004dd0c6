"""TLS and API keys of the HTTP port, loaded from the files that the settings name.

The supervisor loads both before the model, to report errors early; each front end loads its own.
"""

import os
import ssl
import stat
from dataclasses import dataclass, field, replace
from typing import Final

from proto.errors import ConfigError
from proto.settings.config import FrontEndConfig, flag_name

MAX_KEYS: Final = 1024
"""Limit of keys, because each request's key is compared with all of them."""
MAX_NAME_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class ApiKey:
    """name: of the tenant; empty for a key from the settings and for admin keys.

    source: the flag, and the file and line, for messages.
    """

    name: str
    key: bytes = field(repr=False)
    operator: bool = False
    source: str = field(default="", compare=False)


def read_api_keys(config: FrontEndConfig) -> tuple[ApiKey, ...]:
    """Return all keys, none if none are required; raises ConfigError with file and line.

    Lines of a key file, where a tenant may have several keys; messages never contain a key:

        # name   key
        alice    6d1f0c…
        alice    91aa7b…   # of the laptop
    """
    keys = []
    if config.api_key is not None:
        keys.append(ApiKey("", config.api_key.encode(), source="--api-key"))
    if config.api_key_file is not None:
        keys += _read_file("api_key_file", config.api_key_file)
    if config.admin_api_key is not None:
        key = config.admin_api_key.encode()
        keys.append(ApiKey("", key, operator=True, source="--admin-api-key"))
    if config.admin_api_key_file is not None:
        named = _read_file("admin_api_key_file", config.admin_api_key_file)
        keys += [replace(entry, name="", operator=True) for entry in named]
    sources: dict[bytes, str] = {}
    for entry in keys:
        if entry.key in sources:
            raise ConfigError(
                f"the same API key was given twice: {sources[entry.key]} and {entry.source}",
                "api_key_file",
            )
        sources[entry.key] = entry.source
    return tuple(keys)


def readable_key_files(config: FrontEndConfig) -> list[str]:
    """Return the key files that every user of this machine may read, each with its flag."""
    return [
        f"{flag_name(setting)} {path}"
        for setting in ("api_key_file", "admin_api_key_file", "ssl_keyfile")
        if (path := getattr(config, setting)) is not None and os.stat(path).st_mode & stat.S_IROTH
    ]


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
        if len(words) > 2 and words[2].startswith("#"):
            del words[2:]
        if len(words) != 2 or len(words[0]) > MAX_NAME_CHARACTERS:
            raise _wrong(setting, path, f"line {number} is not a name and a key")
        source = f"{flag_name(setting)} {path} line {number}"
        keys.append(ApiKey(words[0], words[1].encode(), source=source))
    if not keys:
        raise _wrong(setting, path, "contains no key")
    if len(keys) > MAX_KEYS:
        raise _wrong(setting, path, f"more than {MAX_KEYS} keys")
    return keys


def _wrong(setting: str, path: str, what: str) -> ConfigError:
    return ConfigError(f"{flag_name(setting)} {path}: {what}")


_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secrecy and authenticated encryption, as always in 1.3."""


def server_context(config: FrontEndConfig) -> ssl.SSLContext:
    """Create the TLS context of the HTTP port; raises ConfigError naming the invalid file.

    `config.ssl_certfile` must be set; without a key file it contains the key, too.
    """
    assert config.ssl_certfile is not None, "TLS is not configured"
    for setting in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(setting, getattr(config, setting))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    try:
        # without a password OpenSSL would prompt on the terminal
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        if config.ssl_keyfile is None and _has_only_certificates(config.ssl_certfile):
            raise ConfigError(
                f"--ssl-certfile {config.ssl_certfile} has no private key; give --ssl-keyfile",
                "ssl_keyfile",
            ) from None
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in "
            f"{config.ssl_keyfile or 'the same file'}: {_reason(error)}"
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(error)}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _has_only_certificates(path: str) -> bool:
    with open(path, "rb") as file:
        content = file.read()
    return b"-----BEGIN CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content


def _check_readable(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag_name(field)} {path}: {error.strerror}") from None


def _reason(error: Exception) -> str:
    """OpenSSL's message without its codes, such as "key values mismatch"."""
    reason = getattr(error, "reason", None)
    if not reason:
        return "not a valid PEM file, or encrypted with a password"
    return str(reason).replace("_", " ").lower()
