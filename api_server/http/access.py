"""Which key a route needs at which listener: the table, and the rules it names.

docs/security.md has the same table. `AccessMiddleware` and the operators' routes take their
decisions from it.
"""

import re
import socket
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from api_server.http.addresses import is_loopback
from proto.errors import AuthenticationError, ForbiddenError
from proto.settings.config import FrontEndConfig

ListenerKind = Literal["public", "admin_port", "admin_socket"]

LISTENER: Final = "tokend.listener"
"""Name of an ASGI extension: the `Listener` of a request."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, as rules see it. only_local: only this machine reaches it."""

    kind: ListenerKind = "public"
    only_local: bool = False

    @classmethod
    def of(cls, listening: socket.socket, *, admin: bool = False) -> "Listener":
        if listening.family == socket.AF_UNIX:
            return cls("admin_socket", only_local=True)
        local = is_loopback(listening.getsockname()[0])
        return cls("admin_port" if admin else "public", local)


PUBLIC: Final = Listener()
"""A listener that all may reach."""


def listener_of(scope: Scope) -> Listener:
    """Return the listener of a request; under another HTTP server PUBLIC."""
    found: Listener = scope.get("extensions", {}).get(LISTENER, PUBLIC)
    return found


class Access(NamedTuple):
    """A row of the table: routes, and what a request needs at each listener.

    paths: a path that ends in /… covers all that begin with it; none: all other routes.
    public, admin_port, admin_socket: the rule, as a key of RULES.
    """

    what: str
    paths: tuple[str, ...]
    public: str
    admin_port: str
    admin_socket: str

    def rule(self, listener: Listener) -> str:
        rule: str = getattr(self, listener.kind)
        return rule


RULES: Final = {
    "open": "no key",
    "client": "a client's key, if there are client keys",
    "metrics": "a client's key, if there are client keys; none with `--metrics-open`",
    "operator": "an admin key; without admin keys and admin listeners: a local program, where "
    "`--host` is a loopback address (with a client's key, if there are client keys)",
    "admin": "an admin key; without admin keys: a local program",
    "owner": "no key: the mode of the file is 0600",
    "absent": "404",
}
"""Rules in the words of docs/security.md."""

HEALTH: Final = Access(
    "health",
    ("/health", "/health/live", "/health/ready", "/ping", "/version"),
    "open",
    "open",
    "open",
)
METRICS: Final = Access("metrics", ("/metrics",), "metrics", "admin", "owner")
LOAD: Final = Access("load", ("/load", "/kv_event_sources"), "client", "admin", "owner")
OPERATORS: Final = Access(
    "operators",
    (
        *("/admin/drain", "/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
        *("/reset_encoder_cache", "/abort_requests", "/start_profile", "/stop_profile"),
        "/server_info",
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"),
    ),
    "operator",
    "admin",
    "owner",
)
PAGE: Final = Access("files of the pages", ("/", "/docs", "/page/…"), "open", "absent", "absent")
LIVE_VIEW: Final = Access("the live view", ("/view/events",), "client", "absent", "absent")
API: Final = Access("the API, and all else", (), "client", "absent", "absent")
TABLE: Final = (HEALTH, METRICS, LOAD, OPERATORS, PAGE, LIVE_VIEW, API)

_BY_PATH: Final = {path: access for access in TABLE for path in access.paths}


def access_of(path: str) -> Access:
    """Return the row of a path, exactly as routing sees it."""
    folder = f"{path[: path.find('/', 1)]}/…" if path.count("/") > 1 else ""
    return _BY_PATH.get(path) or _BY_PATH.get(folder) or API


# ---- Operators ----


def check_operator(scope: Scope, config: FrontEndConfig) -> None:
    """Raise AuthenticationError or ForbiddenError unless the client is an operator.

    AuthenticationError (401): the key is missing or wrong. ForbiddenError (403): it is a client's,
    or there are no admin keys and the client is no local program.
    """
    listener, state = listener_of(scope), scope.setdefault("state", {})
    if listener.kind == "admin_socket":
        state["is_operator"] = True
    elif config.has_admin_keys:
        if state.get("is_operator"):
            return
        flag = "--admin-api-key" if config.admin_api_key is not None else "--admin-api-key-file"
        if state.get("has_key"):
            raise ForbiddenError(f"this route is for operators and needs a key of {flag}")
        raise AuthenticationError(f"missing or wrong key: this route needs one of {flag}")
    elif listener.kind == "public" and config.has_admin_listener:
        raise ForbiddenError("this route is served at --admin-port or --admin-socket only")
    elif not listener.only_local:
        raise ForbiddenError(
            "without --admin-api-key this route is served at --admin-port, at --admin-socket, or "
            "where --host is an address of the loopback interface"
        )
    elif not _is_local_program(scope):
        raise ForbiddenError(
            "without --admin-api-key this route is for programs on the same machine only, which "
            "call it as localhost, not for browsers or through a proxy"
        )
    elif listener.kind == "admin_port":
        state["is_operator"] = True


_REMOTE_HEADERS: Final = frozenset(
    {
        *("origin", "sec-fetch-site"),
        *("forwarded", "via", "x-real-ip", "x-client-ip", "x-cluster-client-ip"),
        *("true-client-ip", "cf-connecting-ip", "fastly-client-ip", "x-azure-clientip"),
        *(
            "x-original-forwarded-for",
            "x-original-host",
            "x-original-url",
            "x-envoy-external-address",
        ),
        *("x-amzn-trace-id", "cf-ray", "cdn-loop"),
    }
)
"""Headers that browsers and proxies add, beside those that begin with x-forwarded-."""

_LOOPBACK_HOST: Final = re.compile(
    r"(?:(?P<name>(?:[\w-]+\.)*localhost)\.?|\[(?P<v6>[0-9a-f:.]+)\]|(?P<v4>[0-9.]+))(?::\d*)?",
    re.ASCII | re.IGNORECASE,
)


def _is_local_program(scope: Scope) -> bool:
    """Return whether a program on this machine sends a request itself, as far as one can see.

    nginx, by default, speaks HTTP/1.0 to servers, which programs do not.
    """
    client = scope.get("client")
    if client is None or not is_loopback(client[0]) or scope.get("http_version") == "1.0":
        return False
    names = [name.decode("latin-1") for name, _ in scope["headers"]]
    if any(name in _REMOTE_HEADERS or name.startswith("x-forwarded-") for name in names):
        return False
    hosts = Headers(scope=scope).getlist("host")
    found = _LOOPBACK_HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return False
    return found["name"] is not None or is_loopback(found["v6"] or found["v4"])
