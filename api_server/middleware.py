"""What happens to a request before its route: metrics, access, host, drain state, fast path.

    metrics ─▶ access ─▶ host, origin ─▶ client ─▶ drain ─▶ FastPath ─ POST of a model ─▶ endpoint
                                                                └───── anything else ──▶ router

Which path needs a key, and at which listener it is, stands in `access.py`. The routes for operators
check themselves that the client is one.
"""

import hmac
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.errors import NotAvailableError, error_response
from api_server.generation.app_state import APP_STATE, AppState
from api_server.http.access import API, OPERATORS, PAGE, access_of, check_operator, listener_of
from api_server.http.connection import client_disconnected, wait_disconnect
from api_server.http.request_log import RequestLog
from api_server.http.tenants import DEFAULT_TENANT, tenant_of
from api_server.turns import CLIENT, Client
from proto.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    RequestError,
    UnknownPathError,
    shown,
)
from proto.runtime.security import ApiKey
from proto.settings.config import FrontEndConfig


class AccessMiddleware:
    """Apply the table of routes, listeners and keys: 401 without a key, 404 at another listener.

    A key is in `Authorization: Bearer` or `x-api-key`. Sets `has_key`, `key_name` and `is_operator`
    in the state of the request. If all configured keys are operators', requests without a key pass
    as clients'. page_paths: files of the page; another path below /page/ needs a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: FrontEndConfig,
        keys: Sequence[ApiKey],
        page_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._clients_need_key = not all(key.operator for key in keys)
        self._page_paths = page_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if access_of(scope["path"]) is OPERATORS and scope.get("method") == "POST":
            send = _logging_operation(scope, send)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise UnknownPathError, AuthenticationError or ForbiddenError."""
        path, listener = scope["path"], listener_of(scope)
        access = access_of(path)
        rule = access.rule(listener)
        if rule == "absent":
            raise UnknownPathError(f"this listener is for operators and has no {shown(path)}")
        if rule == "open" and (access is not PAGE or path in self._page_paths):
            return
        if rule == "metrics" and self._config.metrics_open:
            return
        known = self._known_keys(scope)
        if listener.kind == "public" and self._clients_need_key and not known:
            raise AuthenticationError("missing or wrong API key")
        state = scope.setdefault("state", {})
        state["has_key"] = bool(known)
        state["key_name"] = known[0].name if known else ""
        state["is_operator"] = any(key.operator for key in known)
        if rule in ("admin", "owner"):
            check_operator(scope, self._config)

    def _known_keys(self, scope: Scope) -> list[ApiKey]:
        """Return the valid keys in the headers; compares in constant time, with all keys."""
        known = []
        for name, value in scope["headers"]:
            given = _bearer(value) if name == b"authorization" else value
            if name in (b"authorization", b"x-api-key") and given is not None:
                known += [key for key in self._keys if hmac.compare_digest(given, key.key)]
        return known


def _logging_operation(scope: Scope, send: Send) -> Send:
    """Return a `send` that writes the line of an operator's request when it is carried out."""

    async def send_and_log(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            request_log: RequestLog = scope["app"].state.app_state.request_log
            request_log.log_operation(scope, message["status"])
        await send(message)

    return send_and_log


EXPOSED_HEADERS: Final = (
    "X-Request-Id",
    "Request-Id",
    "X-Tokend-Ignored",
    "X-Should-Retry",
    "Retry-After",
)
"""Headers of answers that pages of other origins can read; browsers hide the rest from them."""


class _LoggingCors(CORSMiddleware):
    """starlette's middleware with a log line for each preflight that it refuses."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(app, **options)
        self._request_log: RequestLog = app.state.app_state.request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                response = self.preflight_response(headers)
                if response.status_code == 400:
                    error = InvalidRequestError.fixed(bytes(response.body).decode(), "origin")
                    self._request_log.log_refusal(error, scope)
                await response(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def with_cors(app: FastAPI, config: FrontEndConfig) -> ASGIApp:
    """Return an application that lets pages of the allowed origins use this one.

    It has to be around the whole application: preflights carry no API key, and starlette answers
    the failure of a route outside of all middleware.
    """
    if not config.allowed_origins:
        return app
    return _LoggingCors(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )


_HOST: Final = re.compile(
    r"(?:\[[0-9a-f:.]+\]|(?:[\w-]+\.)*(?:\d+|0x[0-9a-f]+)|(?P<name>[\w.~-]+))(?::\d*)?",
    re.ASCII | re.IGNORECASE,
)
"""An address, as which browsers also take names that end with a number, or a name; and a port."""


class SiteMiddleware:
    """Refuse what pages of other sites send from a user's browser.

    Host (RFC 9112, 3.2): a page of a name that its owner lets resolve to this machine (DNS
    rebinding) counts as one of this server, but the browser sends that name. So only this
    machine's names and `allowed_hosts` are served; an address is no name. Three kinds of requests
    are not of such a page: those with a key of operators, all if clients need a key, and those
    over TLS, whose certificate the browser has compared with the name.

    Origin: browsers do not apply the same-origin policy to WebSockets (RFC 6455, 10.2), so without
    this any page that a user visits could open one. `allowed_origins` may; "*" for all.
    """

    def __init__(self, app: ASGIApp, config: FrontEndConfig) -> None:
        self._app = app
        self._allowed_origins = config.allowed_origins
        own_name = socket.gethostname().lower()
        names = {"localhost", "*.localhost", own_name, f"{own_name}.local", config.host.lower()}
        names |= {name.lower() for name in config.allowed_hosts}
        self._names = frozenset(names)
        self._checks_names = "*" not in config.allowed_hosts and not config.has_client_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            self._check_host(scope, headers)
            if scope["type"] == "websocket":
                self._check_origin(headers)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        """Raise InvalidRequestError (400) or ForbiddenError (403) for the header."""
        hosts = headers.getlist("host")
        if not hosts and scope["http_version"] == "1.0":
            return  # browsers do not speak it
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise InvalidRequestError.fixed(
                "a request has one Host header, with a name or an address"
            )
        name = match["name"]
        if name is None or not self._checks_names or scope["scheme"] in ("https", "wss"):
            return
        if listener_of(scope).kind == "admin_socket":
            return
        if scope.get("state", {}).get("is_operator"):
            return
        if not self._is_known(name.lower().removesuffix(".")):
            raise ForbiddenError(
                f"this server has no name {shown(name)}; --allowed-hosts gives it more names"
            )

    def _is_known(self, name: str) -> bool:
        """Return whether a name is one of this server, or below one such as *.example."""
        if name in self._names:
            return True
        parts = name.split(".")
        return any("*." + ".".join(parts[n:]) in self._names for n in range(1, len(parts)))

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or {origin, "*"}.intersection(self._allowed_origins):
            return
        try:
            site = urlsplit(origin).netloc
        except ValueError:
            site = None
        if site != headers.get("host"):
            raise ForbiddenError("pages of another site cannot open a WebSocket here")


class ClientMiddleware:
    """Set the application state and the client of a request, with which the client ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[APP_STATE] = scope["app"].state.app_state
        client = Client(partial(_tenant, scope), scope)
        CLIENT.set(client)
        try:
            await self._app(scope, receive, send)
        finally:
            client.end_request()


class DrainMiddleware:
    """Count requests in flight; answer 503 to new requests and WebSockets while none are taken.

    Only requests of the API: the live view never ends, and the page shows the drain.
    The routes of WebSockets count what a drain and a reload wait for: an idle one may stay open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app_state: AppState = scope[APP_STATE]
        if access_of(scope["path"]) is not API:
            await self._app(scope, receive, send)
            return
        try:
            app_state.health.check_takes_requests()
        except NotAvailableError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            with app_state.in_flight, app_state.metrics.in_flight:
                await self._app(scope, receive, send)


def _tenant(scope: Scope) -> int:
    """Return the tenant for turns; the route refuses an invalid header."""
    try:
        return tenant_of(HTTPConnection(scope), scope[APP_STATE].config.tenant_by)
    except InvalidRequestError:
        return DEFAULT_TENANT


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


Endpoint = Callable[[Request], Awaitable[Response]]


def endpoints_of(*routers: APIRouter) -> dict[str, Endpoint]:
    """Return the POST endpoints of these routers by path; they take only the request."""
    found = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
                assert not route.dependencies, "the fast path resolves no dependencies"
                found[route.path] = route.endpoint
    return found


class FastPath:
    """Call the handlers of generation and pooling without routing and dependency injection.

    Their exceptions are answered as the application would answer them.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope.get("path", ""))
        if endpoint is None or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        app_state: AppState = scope[APP_STATE]
        if client_disconnected(scope):
            app_state.metrics.count_cut_short("disconnect")
            await wait_disconnect(receive)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
        except ClientDisconnect:  # during its upload, or while its request was built
            await wait_disconnect(receive)
