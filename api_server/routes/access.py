"""How a route comes by its services, and which requests are an operator's.

With keys of operators (--admin-api-key) exactly those are heard, from everywhere. Without, whoever
is let in is heard as a program on this machine only: no other address, no browser (a page of
any site may send a POST to localhost), no proxy (which speaks for others from an address of this
machine). The key of clients is many people's and does not count.
"""

import ipaddress
from typing import Final, cast

from starlette.requests import Request

from api_server.services import SERVICES, Services
from proto.errors import AuthenticationError, ForbiddenError

_SIGNS_OF_OTHERS: Final = ("origin", "sec-fetch-site", "forwarded", "x-forwarded-for", "via")
"""Headers of browsers and proxies."""


def services_of(request: Request) -> Services:
    """The services that the request got at the door: a reload may have brought others since."""
    return cast(Services, request.scope[SERVICES])


def has_operators_key(request: Request) -> bool:
    """Whether it came with one."""
    return bool(getattr(request.state, "is_operator", False))


def check_operator(request: Request) -> None:
    """Raise AuthenticationError or ForbiddenError for whoever is no operator; of every admin route.

    401 says that a key is missing or wrong, 403 that a client's is not enough.
    """
    config = services_of(request).config
    if not config.has_admin_keys:
        _check_is_local(request)
    elif not has_operators_key(request):
        if config.has_client_keys:
            raise ForbiddenError("this is for operators: it takes a key of --admin-api-key")
        raise AuthenticationError("missing or wrong key: this takes one of --admin-api-key")


def _check_is_local(request: Request) -> None:
    """Raise ForbiddenError unless a program on this machine asks by itself."""
    address = request.client.host if request.client is not None else ""
    if not is_loopback(address) or any(name in request.headers for name in _SIGNS_OF_OTHERS):
        raise ForbiddenError(
            "without --admin-api-key this is for programs on the same machine only, "
            "and neither for browsers nor through a proxy"
        )


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine alone."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
