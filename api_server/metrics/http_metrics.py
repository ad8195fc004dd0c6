"""Counts and durations of HTTP requests by route, under the names of FastAPI's instrumentation."""

import time
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_server.metrics.metric_sheet import Counter, Histogram, MetricSheet
from api_server.page.files import FOLDER

DURATION_SECONDS: Final = (0.1, 0.5, 1.0)
UNCOUNTED_PATHS: Final = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""First components of the paths that are not counted."""
NO_ROUTE: Final = "none"
_STATUSES: Final = ("2xx", "3xx", "4xx", "5xx")
_NO_METHOD: Final = "none"

_Handler = tuple[str, str]
"""A label for a route's path template, and its method."""


class HttpMetrics(Collector):
    """Counts of HTTP requests. routes: of the application; any other path counts as no route."""

    def __init__(self, sheet: MetricSheet, routes: Iterable[BaseRoute]) -> None:
        handlers = sorted(
            {
                (_label(route.path), method)
                for route in routes
                if isinstance(route, Route) and not _is_uncounted(route.path)
                for method in (route.methods or set()) - {"HEAD"}
            }
        )
        self._requests: dict[_Handler, dict[str, Counter]] = {}
        self._seconds: dict[_Handler, Histogram] = {}
        for handler in (*handlers, (NO_ROUTE, _NO_METHOD)):
            self._requests[handler] = {status: Counter(sheet) for status in _STATUSES}
            self._seconds[handler] = Histogram(sheet, DURATION_SECONDS)

    def record_response(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a response. seconds: from the headers to the last byte."""
        path = str(getattr(scope.get("route"), "path", scope["path"]))
        if _is_uncounted(path):
            return
        handler = (_label(path), scope["method"])
        if handler not in self._requests:
            handler = (NO_ROUTE, _NO_METHOD)
        self._requests[handler][f"{min(max(status // 100, 2), 5)}xx"].increment()
        self._seconds[handler].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the routes that had requests."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=("handler", "method", "status")
        )
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From the headers to the last byte.",
            labels=("handler", "method"),
        )
        for handler, by_status in self._requests.items():
            counts = {status: counter.value for status, counter in by_status.items()}
            if not any(counts.values()):
                continue
            for status, number in counts.items():
                if number:
                    requests.add_metric((*handler, status), number)
            seconds.add_metric(handler, *self._seconds[handler].buckets())
        yield requests
        yield seconds


class HttpMetricsMiddleware:
    """Record status and duration of every response."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 0, time.perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:
            status = status or 500  # uvicorn will send it
            raise
        finally:
            if status:  # 0: the client disconnected before the response
                self._metrics.record_response(scope, status, time.perf_counter() - start)


def _label(path: str) -> str:
    """Return the label of a route: that of the page's files is their folder."""
    return FOLDER if path.startswith(FOLDER) else path


def _is_uncounted(path: str) -> bool:
    return "/" + path.removeprefix("/").partition("/")[0] in UNCOUNTED_PATHS
