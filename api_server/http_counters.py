"""HTTP requests by route, under the names of FastAPI's usual instrumentation.

Owns its cells of the sheet, one lot for each route, so every front end has to have the same routes.
What operators and probes ask for all the time is left out, as there.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.metric_sheet import Counter, Histogram, MetricSheet

DURATION_SECONDS: Final = (0.1, 0.5, 1.0)
LEFT_OUT: Final = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""And what is below these."""
NO_ROUTE: Final = "none"
_STATUSES: Final = ("2xx", "3xx", "4xx", "5xx")
_NO_METHOD: Final = "none"

_Place = tuple[str, str]
"""Handler, which is a route's template, and method."""


class HttpCounters:
    """routes: those that there are; whatever is none of them counts as no route."""

    def __init__(self, sheet: MetricSheet, routes: Iterable[BaseRoute]) -> None:
        places = sorted(
            (route.path, method)
            for route in routes
            if isinstance(route, Route) and not _is_left_out(route.path)
            for method in (route.methods or set()) - {"HEAD"}
        )
        self._requests: dict[_Place, dict[str, Counter]] = {}
        self._seconds: dict[_Place, Histogram] = {}
        for place in (*places, (NO_ROUTE, _NO_METHOD)):
            self._requests[place] = {status: Counter(sheet) for status in _STATUSES}
            self._seconds[place] = Histogram(sheet, DURATION_SECONDS)

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """status: that was sent. seconds: from the headers to the last byte."""
        path = str(getattr(scope.get("route"), "path", scope["path"]))
        if _is_left_out(path):
            return
        place = (path, scope["method"])
        if place not in self._requests:
            place = (NO_ROUTE, _NO_METHOD)
        self._requests[place][f"{min(max(status // 100, 2), 5)}xx"].add()
        self._seconds[place].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Routes that were asked for."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=("handler", "method", "status")
        )
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "Headers to last byte.",
            labels=("handler", "method"),
        )
        bounds = [*map(repr, DURATION_SECONDS), "+Inf"]
        for place, by_status in self._requests.items():
            counts = {status: counter.value for status, counter in by_status.items()}
            if not any(counts.values()):
                continue
            for status, number in counts.items():
                if number:
                    requests.add_metric((*place, status), number)
            in_buckets, total = self._seconds[place].totals()
            buckets = list(zip(bounds, accumulate(in_buckets), strict=True))
            seconds.add_metric(place, buckets, total)
        yield requests
        yield seconds


class CountRequests:
    """Middleware that counts what goes through it."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = 0, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # which the server will say
            raise
        finally:
            if status:  # else its client left before there was one
                self._counters.answered(scope, status, time.perf_counter() - begun)


def _is_left_out(path: str) -> bool:
    return "/" + path.removeprefix("/").partition("/")[0] in LEFT_OUT
