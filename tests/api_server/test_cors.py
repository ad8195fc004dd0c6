"""CORS: origins whose pages may use the API, and the headers that their browsers need."""

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api_server.routes import system
from proto.settings.config import FrontEndConfig

CHAT, OTHER = "https://chat.example", "https://other.example"
KEY = {"authorization": "Bearer secret"}


def allowing(*origins: str, **fields: object) -> FrontEndConfig:
    return FrontEndConfig(allowed_origins=origins, api_key="secret", **fields)  # type: ignore[arg-type]


async def preflight(front_end, origin: str, method: str = "POST", **headers: str) -> httpx.Response:
    headers |= {"origin": origin, "access-control-request-method": method}
    return await front_end.http.options("/v1/chat/completions", headers=headers)


def allowed_origin(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def test_a_preflight_needs_no_key(start):
    asked = {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
    async with start(config=allowing(CHAT)) as front_end:
        response = await preflight(front_end, CHAT, **asked)
        assert response.status_code == 200
        assert allowed_origin(response) == CHAT
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == next(iter(asked.values()))
        refused = await preflight(front_end, OTHER)
        assert refused.status_code == 400
        assert allowed_origin(refused) is None


async def test_all_responses_have_cors_headers(start, scripted, monkeypatch):
    """Streams and errors too: without them a page cannot read why a request failed."""

    def fail() -> str:
        raise RuntimeError

    async with start(scripted("Hi"), config=allowing(CHAT)) as front_end:
        monkeypatch.setattr(system, "daemon_version", fail)
        body = {"prompt": "hello", "max_tokens": 2}
        for path, fields, headers, status in (
            ("/v1/completions", body, KEY, 200),
            ("/v1/completions", {**body, "stream": True}, KEY, 200),
            ("/v1/completions", {**body, "max_tokens": -1}, KEY, 400),
            ("/v1/completions", {**body, "model": "other"}, KEY, 404),
            ("/v1/completions", body, {}, 401),
            ("/v1/nothing", body, KEY, 404),
            ("/v1/messages", {}, KEY, 400),
            ("/version", None, KEY, 500),
        ):
            for origin, expected in ((CHAT, CHAT), (OTHER, None)):
                request = front_end.http.build_request(
                    "GET" if fields is None else "POST",
                    path,
                    json=fields,
                    headers={**headers, "origin": origin},
                )
                response = await front_end.http.send(request)
                assert response.status_code == status, response.text
                assert allowed_origin(response) == expected
                assert "X-Tokend-Ignored" in response.headers["access-control-expose-headers"]
                assert response.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("origins", "origin", "expected"),
    [((CHAT,), CHAT, CHAT), ((CHAT,), OTHER, None), (("*",), OTHER, "*"), ((), CHAT, None)],
)
async def test_refusals_of_large_headers_have_cors_headers(start, origins, origin, expected):
    async with start(config=FrontEndConfig(allowed_origins=origins)) as front_end:
        headers = {"origin": origin, "x-filler": "x" * 70_000}
        response = await front_end.http.get("/version", headers=headers)
        assert response.status_code == 431
        assert allowed_origin(response) == expected


async def test_allowed_origins_and_credentials(start, scripted):
    settings = {
        "allow_credentials": True,
        "allowed_methods": ("POST",),
        "allowed_headers": ("X-A", "Authorization"),
    }
    async with start(scripted("Hi"), config=allowing("*", **settings)) as front_end:
        response = await preflight(front_end, OTHER, **{"access-control-request-headers": "x-a"})
        assert response.status_code == 200
        assert allowed_origin(response) == OTHER, "with credentials an origin is named"
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-allow-methods"] == "POST"
        assert (await preflight(front_end, OTHER, "DELETE")).status_code == 400
        headers = {"access-control-request-headers": "x-b"}
        assert (await preflight(front_end, OTHER, **headers)).status_code == 400


@pytest.mark.parametrize(
    ("origins", "opened"),
    [((), False), ((OTHER,), False), ((CHAT,), True), (("*",), True)],
)
@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/responses"])
async def test_a_websocket_from_another_origin(start, path, origins, opened):
    async with start(config=FrontEndConfig(allowed_origins=origins)) as front_end:
        url = front_end.url.replace("http", "ws", 1) + path
        opening = connect(url, additional_headers={"origin": CHAT})
        if opened:
            async with opening:
                return
        with pytest.raises(InvalidStatus) as caught:
            async with opening:
                pass
        assert caught.value.response.status_code == 403


async def test_admin_routes_are_closed_to_pages_of_other_origins(start):
    """Without a key they accept local clients only, which a page is not."""
    async with start(config=FrontEndConfig(allowed_origins=("*",))) as front_end:
        response = await front_end.http.post("/pause", headers={"origin": CHAT})
        assert response.status_code == 403
