"""`GET /view/events`: the live view as server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.http.http_protocol import close_after_response
from api_server.http.tenants import key_name_of, reader_of, tenant_of
from api_server.live_view.events import COMMENT, SubscriberScope
from api_server.live_view.publisher import LiveViewPublisher, Subscriber
from api_server.page.files import PageFile
from api_server.response import EVENT_STREAM_HEADERS
from api_server.routes.common import app_state_of, has_operators_key
from proto.errors import ForbiddenError

# `GET /` and `/page/…`: the page; it needs no key, unlike the routes that it calls.


def router_of(files: Sequence[PageFile]) -> APIRouter:
    """A route for each file."""
    router = APIRouter(include_in_schema=False)
    for each in files:
        router.add_api_route(each.path, _endpoint(each), methods=["GET", "HEAD"])
    return router


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    return send


router = APIRouter()

_FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site: the request comes from another site's page."""


# Not in the schema: a program that tries all operations would wait for its end.
@router.get("/view/events", include_in_schema=False)
async def view_events(request: Request) -> Response:
    """What the engine does: events hello, view (at most 4 a second) and notice.

    Requests of other tenants are shown without id and counts.
    """
    app_state = app_state_of(request)
    if request.headers.get("sec-fetch-site") in _FOREIGN:
        raise ForbiddenError("the live view is for pages of this server")
    tenant = tenant_of(request, app_state.config.tenant_by)
    reader = reader_of(tenant, key_name_of(request))
    live_view = app_state.live_view
    subscriber = live_view.subscribe(SubscriberScope(reader, sees_all=has_operators_key(request)))
    return LiveViewResponse(live_view, subscriber, app_state.config.sse_keep_alive)


class LiveViewResponse(Response):
    """The event stream of one subscriber. keep_alive: seconds of silence before a comment."""

    def __init__(
        self, live_view: LiveViewPublisher, subscriber: Subscriber, keep_alive: float
    ) -> None:
        super().__init__()
        self._live_view = live_view
        self._subscriber = subscriber
        self._keep_alive = keep_alive or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(scope, send))
        try:
            hearing = asyncio.create_task(_until_gone(receive))
            done, _ = await asyncio.wait((writing, hearing), return_when=asyncio.FIRST_COMPLETED)
            hearing.cancel()
            if writing in done:
                writing.result()
        finally:
            self._live_view.unsubscribe(self._subscriber)
            writing.cancel()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        subscriber = self._subscriber
        while True:
            events = await subscriber.take(self._keep_alive) or COMMENT
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


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
