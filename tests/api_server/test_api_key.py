"""Routes that an API key protects, and keys that are accepted."""

import asyncio
import hmac
import importlib
import itertools
import pkgutil

import httpx
import pytest
from fastapi import APIRouter

from api_server import middleware, routes
from api_server.app import create_app
from api_server.page.files import page_files
from api_server.routes import admin
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import concurrently


async def test_api_key(start, scripted):
    config = FrontEndConfig(api_key="sésame")
    key = "sésame".encode()
    async with start(scripted("!"), config=config) as front_end:
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
            assert (await front_end.http.get(path)).status_code == 200
        guarded = ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/health/")
        for path in guarded:
            assert (await front_end.http.get(path)).status_code == 401, path
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": b"Basic " + key},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
        ):
            response = await front_end.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "AuthenticationError"
        for headers in ({"authorization": b"Bearer " + key}, {"x-api-key": key}):
            response = await front_end.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert response.status_code == 200


async def test_keys_are_compared_in_constant_time(start, monkeypatch):
    compared = []

    def watched(given, key):
        compared.append((given, key))
        return compare_digest(given, key)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(middleware.hmac, "compare_digest", watched)
    async with start(config=FrontEndConfig(api_key="right")) as front_end:
        for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wr"}):
            assert (await front_end.http.get("/v1/models", headers=headers)).status_code == 401
    assert compared == [(b"wrong", b"right"), (b"wr", b"right")]


OPEN = {"/health", "/health/live", "/health/ready", "/ping", "/version"}
"""All paths that are open without a key, beside the page's."""
ADMIN = {route.path for route in admin.router.routes}
TRICKS = (
    *("//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/health/../v1/models"),
    *("//metrics", "/page;/../metrics", "/page/main.js/../../metrics"),
    *("/v1/%6dodels", "/%76%31/models", "/v1%2fmodels", "/health%2f..%2fmetrics", "/metrics%00"),
    *("/metrics;/health", "/metrics?/health", "/health;/../metrics", "/HEALTH", "/health%20"),
    *("/health/", "//health", "/version/../metrics", "\\health", "/openapi.json", "/docs/"),
    *("/page", "/page/", "/page//main.js", "/page/../metrics", "/page/%2e%2e/metrics", "//"),
    *("http://x/metrics", "http://health/v1/models", "/nowhere", "*"),
)
"""Unusual spellings of protected paths, or of paths that do not exist."""


def all_paths(app) -> set[str]:
    """Return the routes of the application and of every module with routes."""
    modules = [
        importlib.import_module(f"{routes.__name__}.{each.name}")
        for each in pkgutil.iter_modules(routes.__path__)
    ]
    routers = [each.__dict__.get("router", APIRouter()) for each in modules]
    found = [*app.routes, *(route for router in routers for route in router.routes)]
    return {route.path for route in found if hasattr(route, "path")}


async def test_metrics_without_a_key_if_configured(start):
    for keys in ({"api_key": "k"}, {"api_key": "k", "admin_api_key": "op"}):
        async with start(config=FrontEndConfig(metrics_open=True, **keys)) as front_end:
            assert (await front_end.http.get("/metrics")).status_code == 200
            for path in ("/metrics/", "/v1/models", "/load", "/server_info"):
                assert (await front_end.http.get(path)).status_code == 401, path


async def test_every_other_route_needs_the_key(start):
    """All routes of the application, documented or not."""
    async with start(config=FrontEndConfig(api_key="k", admin_api_key="op")) as front_end:
        paths = all_paths(create_app(front_end.app_state))
        assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/tokenize"} <= paths
        assert paths >= OPEN
        page = {each.path for each in page_files()}
        assert {"/", "/page/main.js"} <= page
        paths |= page
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE")

        is_open = OPEN | page

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            # Without the body, since the live view never ends.
            written = path.replace("{name:path}", "x")
            async with front_end.http.stream(method, written, headers=headers) as response:
                return response.status_code

        async def try_keys(path: str) -> None:
            for method in methods:
                allowed = await status(method, path, next(keys)) != 401
                assert allowed == (path in is_open), (method, path)
            for method in ("GET", "POST"):
                found = await status(method, path, {"authorization": "Bearer k"})
                assert found in {403, 405} if path in ADMIN else found != 401, (method, path)

        # 9 methods and 4 wrong keys are combined differently on every path
        wrong = ({}, {"x-api-key": "kk"}, {"authorization": "Bearer op2"}, {"x-api-key": ""})
        keys = itertools.cycle(wrong)
        await concurrently(try_keys, sorted(paths))


async def raw_status(front_end, target: str, *lines: str) -> int:
    """Return the status for a raw request target, which client libraries would normalise."""
    url = httpx.URL(front_end.url)
    reader, writer = await asyncio.open_connection("127.0.0.1", url.port)
    head = [f"GET {target} HTTP/1.1", *(lines or ["Host: localhost"]), "Connection: close", "", ""]
    writer.write("\r\n".join(head).encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


async def test_no_spelling_of_path_or_host_bypasses_the_key(start):
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        for target in TRICKS:
            assert await raw_status(front_end, target) in (400, 401), target
        for host in ("", "localhost", "127.0.0.1", "/health", "health", "x:y", "x@health"):
            assert await raw_status(front_end, "/metrics", f"Host: {host}") in (400, 401), host
        for name in ("X-Forwarded-Prefix", "X-Original-URL", "X-Rewrite-URL", "X-HTTP-Method"):
            lines = ("Host: localhost", f"{name}: /health")
            assert await raw_status(front_end, "/metrics", *lines) == 401, name
        assert await raw_status(front_end, "/health") == 200
        assert await raw_status(front_end, "/metrics", "Host: localhost", "X-Api-Key: k") == 200


@pytest.mark.parametrize(("key", "status"), [(None, 405), ("secret", 401)])
async def test_browsers_of_other_origins_are_refused(start, key, status):
    headers = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    async with start(config=FrontEndConfig(api_key=key)) as front_end:
        preflight = await front_end.http.options("/v1/completions", headers=headers)
        health = await front_end.http.get("/health", headers=headers)
    assert preflight.status_code == status
    assert health.status_code == 200
    for response in (preflight, health):
        assert not [name for name in response.headers if name.startswith("access-control")]
