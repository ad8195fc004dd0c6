"""`GET /`, `/page/…` and `/view/events`: the page, and its live view as server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.base import KEEP_ALIVE
from api_server.generation.response import EVENT_STREAM_HEADERS
from api_server.http.connection import wait_disconnect
from api_server.http.http_protocol import close_after_response
from api_server.live_view import Subscriber, SubscriberScope
from api_server.page.files import PageFile
from api_server.routes.common import has_operators_key
from proto.errors import ForbiddenError, InvalidRequestError, shown


def page_router(files: Sequence[PageFile]) -> APIRouter:
    """Return the routes of the page, `/` and `/page/…`; unlike the others they need no key."""
    router = APIRouter(include_in_schema=False)
    for file in files:
        router.add_api_route(file.path, _endpoint(file), methods=["GET", "HEAD"])
    return router


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=file.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, headers=file.headers | {"content-encoding": "gzip"})
        return Response(file.content, headers=file.headers)

    return send


router = APIRouter()

_FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site of requests from another site's page."""


# Not in the schema: a program that tries all operations would wait for the end of the stream.
@router.get("/view/events", include_in_schema=False)
async def view_events(request: Request) -> Response:
    """Stream the events hello, view (at most 4 a second) and notice.

    Requests of other tenants appear without id and counts. engine=1: of that engine; by default 0.
    """
    context = RequestContext(request)
    app_state = context.app_state
    if request.headers.get("sec-fetch-site") in _FOREIGN:
        raise ForbiddenError("the live view is for pages of this server")
    engine = _engine(request.query_params.get("engine", "0"), app_state.client.num_engines)
    scope = SubscriberScope(
        context.reader,
        sees_all=has_operators_key(request),
        key_name=context.key_name,
        engine=engine,
    )
    subscriber = app_state.live_view.subscribe(scope, app_state.client.properties_of(engine))
    app_state.client.update_view_subscription()
    return LiveViewResponse(app_state, subscriber)


def _engine(text: str, num_engines: int) -> int:
    """Return the index of an engine; raises InvalidRequestError if there is none."""
    if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) < num_engines):
        raise InvalidRequestError(
            f"engine takes 0 to {num_engines - 1}, got {shown(text)}", "engine"
        )
    return int(text)


class LiveViewResponse(Response):
    """The event stream of one subscriber, which it unsubscribes at the end."""

    def __init__(self, app_state: AppState, subscriber: Subscriber) -> None:
        super().__init__()
        self._app_state = app_state
        self._subscriber = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._send_events(scope, send))
        try:
            disconnect = asyncio.create_task(wait_disconnect(receive))
            done, _ = await asyncio.wait((writing, disconnect), return_when=asyncio.FIRST_COMPLETED)
            disconnect.cancel()
            if writing in done:
                writing.result()
        finally:
            self._app_state.live_view.unsubscribe(self._subscriber)
            self._app_state.client.update_view_subscription()
            writing.cancel()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        subscriber = self._subscriber
        silence_seconds = self._app_state.config.sse_keep_alive or None
        while True:
            events = await subscriber.drain_events(silence_seconds) or KEEP_ALIVE.encode()
            if subscriber.finished:
                close_after_response(scope)
            body = {
                "type": "http.response.body",
                "body": events,
                "more_body": not subscriber.finished,
            }
            await send(body)
            if subscriber.finished:
                return
