"""How a route comes by its services."""

from typing import cast

from starlette.requests import Request

from api_server.services import Services


def services_of(request: Request) -> Services:
    """The services of the application that the request came to."""
    return cast(Services, request.app.state.services)
