"""The tenant of a request: a hash of its API key's name and, if configured, of a proxy's header.

The engine sees only the number. Every front end derives the same number from the same names, so
tenants survive the restart of a process.
"""

import contextlib
import re
from hashlib import blake2b
from typing import Final

from starlette.requests import HTTPConnection

from proto.errors import InvalidRequestError
from proto.settings.config import TenantBy

TENANT_HEADER: Final = "X-Tenant-ID"
MAX_TENANT_CHARACTERS: Final = 128
DEFAULT_TENANT: Final = 0
"""The tenant of all requests without a key name and header."""

_NAME: Final = re.compile(rf"[A-Za-z0-9._:@/+=-]{{1,{MAX_TENANT_CHARACTERS}}}")


def tenant_of(request: HTTPConnection, by: TenantBy) -> int:
    """Return the tenant of a request; raises InvalidRequestError for an invalid header.

    by: with "header", key name and header together make a tenant, so clients of one key cannot
    pass for those of another.
    """
    if by == "none":
        return DEFAULT_TENANT
    key_name = key_name_of(request)
    name = _header(request) if by == "header" else ""
    return _number(key_name, name)


def tenant_name(request: HTTPConnection, by: TenantBy) -> str:
    """Return the tenant of a request in words, for the log: KEY, HEADER or KEY/HEADER.

    Empty for the default tenant. An invalid header counts as none.
    """
    names = [] if by == "none" else [key_name_of(request)]
    if by == "header":
        with contextlib.suppress(InvalidRequestError):
            names.append(_header(request))
    return "/".join(filter(None, names))


def reader_of(tenant: int, key_name: str) -> int:
    """Return the id of the clients that may see a request in the live view: its tenant.

    Without tenants, the clients with the same API key.
    """
    return tenant or _number(key_name, "")


def key_name_of(request: HTTPConnection) -> str:
    """Return the name of the request's key in --api-key-file; empty for any other key or none."""
    return str(getattr(request.state, "key_name", ""))


def _number(key_name: str, name: str) -> int:
    if not key_name and not name:
        return DEFAULT_TENANT
    digest = blake2b(f"{key_name}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _header(request: HTTPConnection) -> str:
    """Return the tenant header; refuses two, because the proxy may have written either of them."""
    names = request.headers.getlist(TENANT_HEADER)
    if not names:
        return ""
    if len(names) > 1 or not _NAME.fullmatch(names[0]):
        raise InvalidRequestError.fixed(
            f"{TENANT_HEADER} takes one name of 1 to {MAX_TENANT_CHARACTERS} letters, digits and "
            "any of ._:@/+=-",
            TENANT_HEADER,
        )
    return names[0]
