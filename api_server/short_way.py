"""The short way to the routes that generate: past routing, dependencies and their many layers.

Owns how soon work on such a request begins. What these routes are, they say themselves
(`endpoints_of`); all other requests, and all other methods of theirs, go the framework's way.

    key ─▶ door ─▶ ShortWay ── POST /v1/completions ──▶ endpoint ─▶ response
                      └─────── anything else ─────────▶ router ─▶ …

A client that asks and leaves at once costs a fraction of its request where that is noticed
before the work. While others are served a new request waits for that for a moment, which is
short beside the step that computes meanwhile; on an idle daemon it does not wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api_server.errors import error_response
from api_server.http_protocol import has_left
from api_server.services import SERVICES, Services
from proto.errors import RequestError

MOMENT_SECONDS: Final = 0.002
"""What a request waits for its client to leave, while there are others."""

Endpoint = Callable[[Request], Awaitable[Response]]


def endpoints_of(*routers: APIRouter) -> dict[str, Endpoint]:
    """By path: what these routers do for a POST. They take the request and nothing else."""
    found = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
                assert not route.dependencies, "what a route depends on is not asked on this way"
                found[route.path] = route.endpoint
    return found


class ShortWay:
    """Calls an endpoint with the request, and answers what it raises as the application would."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope.get("path", ""))
        if endpoint is None or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        services: Services = scope[SERVICES]
        if services.client.num_open:
            await asyncio.sleep(MOMENT_SECONDS)
        if has_left(scope):
            services.metrics.cut_short("disconnect")
            await _gone(receive)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        except ClientDisconnect:
            return  # it left during its upload: nobody reads an answer


async def _gone(receive: Receive) -> None:
    """Return when the server knows it as well, and expects no answer any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
