"""How many HTTP requests were answered, by route and class of status, and how long it took.

Owns its cells of the sheet; the names are those of the instrumentation that vLLM uses. What
operators and load balancers ask for (`OUTSIDE`) is not counted; what no route takes is "none".
A stream counts when it ends.
"""

import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.metric_sheet import Counter, Histogram, MetricSheet
from api_server.request_figures import histogram_family

SECONDS: Final = (0.1, 0.5, 1.0)
STATUSES: Final = ("2xx", "3xx", "4xx", "5xx")
OUTSIDE: Final = frozenset({"metrics", "health", "load", "ping", "version", "view"})
"""First parts of paths that are not counted."""
_NONE: Final = ("none", "any")


class HttpCounters:
    """Of all front ends. Handlers are pairs of a path and a method."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._of: dict[tuple[str, str], tuple[dict[str, Counter], Histogram]] = {}

    def know(self, routers: Iterable[APIRouter]) -> None:
        """Count requests to these routes, the same in all front ends; once, before any comes."""
        found = {
            (route.path, method)
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and _first_part(route.path) not in OUTSIDE
            for method in route.methods or ()
        }
        for handler in (*sorted(found), _NONE):
            counters = {status: Counter(self._sheet) for status in STATUSES}
            self._of[handler] = counters, Histogram(self._sheet, SECONDS)

    def answered(self, path: str, method: str, status: int, seconds: float) -> None:
        """path: of the route, as it is written there."""
        counters, histogram = self._of.get((path, method)) or self._of[_NONE]
        counters[f"{status // 100}xx"].add()
        histogram.observe(seconds)

    def knows(self, path: str, method: str) -> bool:
        """Whether a path is that of a route, with no part that varies."""
        return (path, method) in self._of

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=("handler", "method", "status")
        )
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Time of one.", labels=("handler", "method")
        )
        for handler, (counters, histogram) in self._of.items():
            values: Mapping[str, float] = {each: counters[each].value for each in STATUSES}
            if any(values.values()):
                for status, value in values.items():
                    requests.add_metric((*handler, status), value)
                family = histogram_family(
                    histogram, durations.name, "", ("handler", "method"), handler
                )
                durations.samples += family.samples
        yield requests
        yield durations


class CountAnswers:
    """Tells `counters` of each request, by the status that was sent; without one of none."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _first_part(scope["path"]) in OUTSIDE:
            await self._app(scope, receive, send)
            return
        status = 0
        start = time.monotonic()

        def watched(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # the server will answer so
            raise
        finally:
            if status:
                path = self._path(scope)
                seconds = time.monotonic() - start
                self._counters.answered(path, scope["method"], status, seconds)

    def _path(self, scope: Scope) -> str:
        if self._counters.knows(scope["path"], scope["method"]):
            return str(scope["path"])
        return getattr(scope.get("route"), "path", "")


def _first_part(path: str) -> str:
    """What stands between the first two slashes."""
    return path.removeprefix("/").partition("/")[0]
