"""The TLS side of the listening socket: from files that the user named to a context.

The supervisor makes one to see that it can be made, before anything loads; each
front end makes its own. Knows nothing of HTTP.
"""

import ssl
from typing import Final

from proto.config import FrontEndConfig, flag_name
from proto.errors import ConfigError

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secrecy and authenticated encryption; 1.3 has nothing else."""


def server_context(config: FrontEndConfig) -> ssl.SSLContext:
    """What connections are encrypted with; raises ConfigError naming the file at fault.

    `config.ssl_certfile` must be given; without a key file it holds the key, too.
    """
    assert config.ssl_certfile is not None, "nothing says that there is TLS"
    for field in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(field, getattr(config, field))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    try:
        # without a password of ours OpenSSL would ask the terminal for one
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in "
            f"{config.ssl_keyfile or 'the same file'}: {_reason(error)}",
            "ssl_certfile",
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(error)}", "ssl_ca_certs"
            ) from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _check_readable(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag_name(field)} {path}: {error.strerror}", field) from None


def _reason(error: Exception) -> str:
    """OpenSSL's words, without its numbers: "key values mismatch"."""
    reason = getattr(error, "reason", None)
    if not reason:
        return "not what belongs in a PEM file, or encrypted with a password"
    return str(reason).replace("_", " ").lower()
