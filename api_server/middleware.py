"""What happens to a request before its route: the key, and the door.

Denies by default: a path is open only when it is listed, exactly as routing sees it. What
only operators may do is not told by paths: its routes look themselves (`routes/access.py`)
whether the key was an operator's.
"""

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from api_server.errors import DrainingError, error_response
from api_server.services import SERVICES, Services
from proto.api_keys import ApiKey
from proto.errors import AuthenticationError

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/version"})
OPERATORS: Final = frozenset(
    {
        *("health", "ping", "version", "metrics", "load", "server_info", "admin"),
        *("pause", "resume", "is_paused", "reset_prefix_cache", "abort_requests"),
        *("", "page", "view"),
    }
)
"""First parts of paths that pass by the door: they answer to the end, which waits for none.

The live view is among them, because a drain would wait for whoever watches it, and the page with
it ("" is that of /), to show that it drains."""


class KnowKeys:
    """Answers 401 unless a key comes as `Authorization: Bearer` or `x-api-key`.

    Whose key it is, is `key_name` in the state of the request, and `is_operator` whether it is
    an operator's. Where only operators have keys, everybody else may come without one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._clients_need_one = not all(each.operator for each in keys)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            known = self._known(scope)
            if self._clients_need_one and not known:
                response = error_response(
                    AuthenticationError("missing or wrong API key"), scope["path"]
                )
                await response(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["key_name"] = known[0].name if known else ""
            state["is_operator"] = any(each.operator for each in known)
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> list[ApiKey]:
        """Of the keys that came, each compared with all there are."""
        known = []
        for name, value in scope["headers"]:
            given = _bearer(value) if name == b"authorization" else value
            if name in (b"authorization", b"x-api-key") and given is not None:
                known += [each for each in self._keys if hmac.compare_digest(given, each.key)]
        return known


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
            await error_response(DrainingError(), scope["path"])(scope, receive, send)
        else:
            with services.visitors, services.metrics.in_flight:
                await self._app(scope, receive, send)


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _first_part(path: str) -> str:
    """What stands between the first two slashes."""
    return path.removeprefix("/").partition("/")[0]
