"""Routes that change what the daemon does: POST /admin/drain.

Who has the key of --api-key is heard from everywhere. Whoever else is let in, a tenant with a
key of --api-key-file or anybody where there are no keys, is heard as a program on this machine
only: no other address, no browser (a page of any site may send a POST to localhost), no proxy
(which speaks for others from an address of this machine).
"""

import ipaddress
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.routes.access import services_of
from proto.config import FrontEndConfig
from proto.errors import ForbiddenError

router = APIRouter()

_SIGNS_OF_OTHERS: Final = ("origin", "sec-fetch-site", "forwarded", "x-forwarded-for", "via")
"""Headers of browsers and proxies."""


@router.post("/admin/drain")
async def drain(request: Request) -> Response:
    """202: no more requests are taken; the daemon ends when those under way have finished."""
    services = services_of(request)
    if not _has_operators_key(request, services.config):
        _check_is_local(request)
    services.door.ask_drain()
    return JSONResponse(
        {"status": "draining", "requests_under_way": services.visitors.number}, status_code=202
    )


def _has_operators_key(request: Request, config: FrontEndConfig) -> bool:
    """Only the keys of tenants have names."""
    return config.api_key is not None and not request.state.key_name


def _check_is_local(request: Request) -> None:
    """Raise ForbiddenError unless a program on this machine asks by itself."""
    address = request.client.host if request.client is not None else ""
    if not _is_loopback(address) or any(name in request.headers for name in _SIGNS_OF_OTHERS):
        raise ForbiddenError(
            "without the key of --api-key this is for programs on the same machine only, "
            "and neither for browsers nor through a proxy"
        )


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
