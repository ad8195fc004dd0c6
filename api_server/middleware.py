"""What happens to a request before its route: the API key, and the door.

Denies by default: a path is open only when it is listed here, exactly as routing
sees it.
"""

import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from api_server.errors import DrainingError, error_response
from api_server.services import SERVICES, Services
from proto.errors import AuthenticationError

OPEN_PATHS: Final = frozenset({"/health", "/ping", "/version"})
OPERATORS: Final = frozenset({"health", "ping", "version", "metrics", "admin"})
"""First parts of paths that pass by the door: they answer to the end, which waits for none."""


class RequireApiKey:
    """Answers 401 unless the key comes as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            response = error_response(AuthenticationError("missing or wrong API key"))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                if scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key):
                    return True
            elif name == b"x-api-key" and hmac.compare_digest(value, self._key):
                return True
        return False


class PassTheDoor:
    """Counts who is inside, and answers 503 when nobody is let in any more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services: Services = scope["app"].state.services
        scope[SERVICES] = services
        if scope["type"] != "http" or _first_part(scope["path"]) in OPERATORS:
            await self._app(scope, receive, send)
        elif services.door.closed:
            await error_response(DrainingError())(scope, receive, send)
        else:
            with services.visitors:
                await self._app(scope, receive, send)


def _first_part(path: str) -> str:
    """What stands between the first two slashes."""
    return path.removeprefix("/").partition("/")[0]
