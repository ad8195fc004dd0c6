"""How a route comes by its services."""

from typing import cast

from starlette.requests import Request

from api_server.services import SERVICES, Services


def services_of(request: Request) -> Services:
    """The services that the request got at the door: a reload may have brought others since."""
    return cast(Services, request.scope[SERVICES])
