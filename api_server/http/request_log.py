"""The log lines of requests: where a request came from, and one line for each that is refused.

    refused ── error_response ──▶ RequestLog.log_refusal ──▶ line
    computed ─────────────────▶ TokenStream ─────────────▶ line, also if it fails
    an operator's POST ── AccessMiddleware ──▶ RequestLog.log_operation ──▶ line

No line contains a prompt, an answer or a key. The message of most 400s may quote the body, so their
lines have the parameter in its place.
"""

import asyncio
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Scope

from api_server.http.addresses import Proxies, network_of
from api_server.http.tenants import TENANT_HEADER, tenant_name
from proto.errors import RequestError, shown
from proto.runtime.log_lines import FIELDS
from proto.settings.config import FrontEndConfig

logger = logging.getLogger("tokend.requests")

Fields = dict[str, str | int | float | None]

STATUS: Final = "status"
REASON: Final = "reason"
"""Fields of the line of a refused request."""
SESSION_HEADER: Final = "x-session-id"
"""Sets session_id of a body."""

ADDRESS_LINES: Final = 50
"""Lines that refused requests of one address (IPv6: of one /64) may have at once."""
ADDRESS_LINES_PER_SECOND: Final = 5
"""Further lines of one address per second."""
ALL_LINES: Final = 200
"""Lines of all addresses together at once, for floods from many."""
ALL_LINES_PER_SECOND: Final = 50
"""Further lines of all addresses per second."""
MAX_ADDRESSES: Final = 1024
"""Addresses whose lines are counted; the least recently refused one is forgotten first."""
REPORT_SECONDS: Final = 1.0
"""Time from the first line that is left out to the line that says how many were."""

_PLAIN: Final = re.compile(r"[!#-~]+")
_FIELD: Final = re.compile(r"[a-z_]{1,40}")


class RequestLog:
    """Writes the lines of refused requests, and knows the origin of any request."""

    def __init__(self, config: FrontEndConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_on = not config.disable_log_requests
        self._shows_address = config.log_client_address
        self._tenant_by = config.tenant_by
        self._proxies = Proxies(config.trusted_proxies)
        self._clock = clock
        self._all = TokenBucket(ALL_LINES, ALL_LINES_PER_SECOND, clock())
        self._by_address: OrderedDict[str, TokenBucket] = OrderedDict()
        self._num_left_out = 0

    def origin(
        self, scope: Scope, session: str | None = None, adapter: str | None = None
    ) -> Fields | None:
        """Return endpoint, tenant, client, session and adapter of a request, as fields of its line.

        session: that of the body; by default the one in the request's header. adapter: its name;
        None for the model alone, which has no such field. None if there are no lines.
        """
        if not self._is_on:
            return None
        fields: Fields = {
            "endpoint": _endpoint(scope),
            "tenant": tenant_name(HTTPConnection(scope), self._tenant_by) or None,
        }
        if self._shows_address:
            fields["client"] = self._proxies.client_of(scope)
        session = session or Headers(scope=scope).get(SESSION_HEADER)
        fields["session"] = None if session is None else shown(session)
        if adapter is not None:
            fields["adapter"] = shown(adapter)
        return fields

    def log_refusal(self, error: RequestError, scope: Scope) -> None:
        """Write the line of a refused request, unless its stream has written one.

        Of a client that floods, only some requests have a line, and another line counts the rest.
        """
        if not self._is_on or error.is_logged:
            return
        error.is_logged = True
        if not self._take_line(network_of(self._proxies.client_of(scope))):
            self._leave_out()
            return
        fields = self.origin(scope) or {}
        log_fields(fields | {"finish": f"error {error.status}"} | error_fields(error))

    def log_operation(self, scope: Scope, status: int) -> None:
        """Write the line of an operator's request that was carried out."""
        fields = self.origin(scope)
        if fields is not None:
            if query := scope["query_string"]:
                fields["query"] = shown(query.decode("latin-1"))
            log_fields(fields | {"finish": str(status), STATUS: status})

    def _take_line(self, address: str) -> bool:
        now = self._clock()
        budget = self._by_address.pop(address, None)
        if budget is None:
            budget = TokenBucket(ADDRESS_LINES, ADDRESS_LINES_PER_SECOND, now)
        self._by_address[address] = budget
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        return budget.take(now) and self._all.take(now)

    def _leave_out(self) -> None:
        self._num_left_out += 1
        if self._num_left_out == 1:
            asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report_left_out)

    def _report_left_out(self) -> None:
        number, self._num_left_out = self._num_left_out, 0
        fields: Fields = {"left_out": number}
        logger.warning(
            "%d refused requests have no line: their clients send too many",
            number,
            extra={FIELDS: fields},
        )


class TokenBucket:
    """A limit on a rate: `most` at once, and `per_second` further ones in each second."""

    __slots__ = ("_at", "_left", "_most", "_per_second")

    def __init__(self, most: int, per_second: int, now: float) -> None:
        self._most, self._per_second = most, per_second
        self._left, self._at = float(most), now

    def take(self, now: float, number: int = 1) -> bool:
        """Take tokens if the bucket has them; return whether it had. Otherwise take none."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < number:
            return False
        self._left -= number
        return True


def error_fields(error: RequestError) -> Fields:
    """Return what the line of a request that failed says of its error."""
    fields: Fields = {STATUS: error.status, "error": error.type}
    if error.code:
        fields["code"] = error.code
    if error.param == TENANT_HEADER:
        fields["param"] = TENANT_HEADER
    elif field := _FIELD.match(error.param or ""):
        fields["param"] = field[0]
    if not error.quotes_client:
        fields[REASON] = error.message.encode(errors="backslashreplace").decode()
    return fields


def log_fields(fields: Fields) -> None:
    """Write a line with these fields; every float is a time in seconds.

    As text without the status, which `finish` has, and with the beginning of a long reason.
    """
    text = " ".join(
        f"{name}={_as_text(name, value)}" for name, value in fields.items() if name != STATUS
    )
    logger.info("%s", text, extra={FIELDS: fields})


def _as_text(name: str, value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}s"
    if not isinstance(value, str) or name in ("finish", "ignored_fields"):
        return str(value)
    value = shown(value) if name == REASON else value
    # what a client has chosen cannot end the line, or pass for another field
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _endpoint(scope: Scope) -> str | None:
    """Return the path template of a request's route, or its path if it has none."""
    path = getattr(scope.get("route"), "path", None) or scope.get("path")
    return None if path is None else shown(path.replace(":path}", "}"))
