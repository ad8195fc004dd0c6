"""`GET /` and `/page/…`: the page, for everybody who reaches the server; what it asks for is not.

The files are read when the application is made, so no path of a request ever becomes one of a file.
"""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.page.files import PageFile


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
