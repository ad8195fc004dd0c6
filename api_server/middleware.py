"""What happens to a request before its route: the API key.

Denies by default: a path is open only when it is listed here, exactly as routing
sees it.
"""

import hmac
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from api_server.errors import error_response
from proto.errors import AuthenticationError

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/version"})


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
