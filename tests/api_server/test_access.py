"""Who may use which route at which listener: the table, and operators' routes without keys."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter

from api_server.app import create_app
from api_server.http.access import (
    API,
    HEALTH,
    LIVE_VIEW,
    OPERATORS,
    PAGE,
    RULES,
    TABLE,
    access_of,
)
from api_server.page.files import page_files
from api_server.routes import adapters, admin, live_view, system
from proto.messages.lifecycle import AbortRequests
from proto.settings.config import FrontEndConfig

ROOT = Path(__file__).parents[2]
OPERATOR = {"x-api-key": "op"}


def paths_of(router: APIRouter) -> set[str]:
    return {route.path for route in router.routes}


def markdown_table() -> str:
    """Return the table for docs/security.md."""
    lines = [
        "| routes | public port | `--admin-port` | `--admin-socket` |",
        "|---|---|---|---|",
    ]
    for access in TABLE:
        paths = ", ".join(f"`{path}`" for path in access.paths)
        rules = (RULES[access.public], RULES[access.admin_port], RULES[access.admin_socket])
        lines.append(f"| {access.what}{': ' if paths else ''}{paths} | {' | '.join(rules)} |")
    return "\n".join(lines)


def test_the_table_of_the_documentation_is_current() -> None:
    """To update it: `print(markdown_table())` of this file."""
    assert f"\n\n{markdown_table()}\n\n" in (ROOT / "docs" / "security.md").read_text()


def test_the_table_has_all_operators_routes_and_only_routes_that_exist() -> None:
    operators = paths_of(admin.router) | paths_of(adapters.router)
    assert set(OPERATORS.paths) == operators
    listed = [path for access in TABLE for path in access.paths]
    assert len(listed) == len(set(listed))
    page = {each.path for each in page_files()}
    existing = operators | paths_of(system.router) | paths_of(live_view.router)
    assert set(listed) <= existing | {"/", "/docs", "/page/…"}
    assert {access_of(path) for path in page} == {PAGE}
    assert access_of("/view/events") is LIVE_VIEW


async def test_every_route_has_a_row(start):
    """What is in no other row is the API: it needs a client's key and is at no admin listener."""
    async with start() as front_end:
        for route in create_app(front_end.app_state).routes:
            path = getattr(route, "path", "")
            if path in OPERATORS.paths:
                continue
            if path.startswith(("/v1/", "/tokenize", "/openapi", "/{")):
                assert access_of(path) is API
    for path in ("/pause/", "//pause", "/v1/../pause", "/health/x", "/page", "/PAUSE"):
        assert access_of(path) is API, path


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "llm.example"},
        {"host": "192.0.2.1"},
        {"host": "localhost.example"},
        {"host": "[2001:db8::1]:8000"},
        {"x-real-ip": "192.0.2.1"},
        {"x-forwarded-for": "127.0.0.1"},
        {"x-forwarded-proto": "https"},
        {"x-forwarded-host": "localhost"},
        {"forwarded": "for=192.0.2.1"},
        {"via": "1.1 proxy"},
        {"cf-connecting-ip": "192.0.2.1"},
        {"true-client-ip": "192.0.2.1"},
        {"origin": "http://localhost"},
        {"sec-fetch-site": "same-origin"},
    ],
)
@pytest.mark.parametrize("at", ["public", "admin_port"])
async def test_without_admin_keys_only_local_programs(start, headers, at):
    """Allowed host names are names for clients, and make nothing local."""
    config = FrontEndConfig(
        allowed_hosts=("*",), admin_port=None if at == "public" else 0, api_key=None
    )
    listener = socket.create_server(("127.0.0.1", 0))
    admin_sockets = [] if at == "public" else [listener]
    async with start(config=config, admin_sockets=admin_sockets) as front_end:
        port = listener.getsockname()[1]
        url = front_end.url if at == "public" else f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as http:
            for path in OPERATORS.paths:
                refused = await http.request("POST", path, headers=headers)
                if refused.status_code != 405:
                    assert refused.status_code == 403, path
            assert front_end.engine.calls == []
            for host in ("127.0.0.1", "localhost:99", "[::1]", "a.localhost", "127.9.9.9:1"):
                answer = await http.post("/pause", headers={"host": host})
                assert answer.status_code == 200, (host, answer.text)


async def test_clients_of_http_1_0_are_proxies(start):
    async with start() as front_end:
        port = int(front_end.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client.dup())
            writer.write(b"POST /pause HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 403 " in await reader.readline()
            writer.close()
        assert front_end.engine.calls == []


async def test_a_public_port_for_all_has_no_operators_routes_without_a_key(start):
    async with start(host="0.0.0.0") as front_end:
        refused = await front_end.http.post("/pause")
        assert refused.status_code == 403
        assert "--admin-socket" in refused.json()["error"]["message"]
    async with start(host="0.0.0.0", config=FrontEndConfig(admin_api_key="op")) as front_end:
        afar = OPERATOR | {"x-real-ip": "192.0.2.1"}
        assert (await front_end.http.post("/pause", headers=afar)).status_code == 200


@contextlib.asynccontextmanager
async def admin_client(listener: socket.socket) -> AsyncIterator[httpx.AsyncClient]:
    if listener.family == socket.AF_UNIX:
        transport = httpx.AsyncHTTPTransport(uds=listener.getsockname())
        client = httpx.AsyncClient(transport=transport, base_url="http://tokend.invalid")
    else:
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    async with client:
        yield client


def admin_listener(kind: str, run_dir: str) -> socket.socket:
    if kind == "admin_port":
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{run_dir}/admin.sock")
    listener.listen()
    return listener


@pytest.mark.parametrize("kind", ["admin_port", "admin_socket"])
@pytest.mark.parametrize("keys", [{}, {"api_key": "k"}, {"api_key": "k", "admin_api_key": "op"}])
async def test_an_admin_listener(start, run_dir, kind, keys):
    """It has operators' routes, health and metrics; the public port has no operators' routes then,
    unless there are admin keys, which the admin port needs, too."""
    listener = admin_listener(kind, run_dir)
    fields = {"admin_port": 0} if kind == "admin_port" else {"admin_socket": "x"}
    config = FrontEndConfig(**fields, **keys)
    async with (
        start(config=config, admin_sockets=[listener]) as front_end,
        admin_client(listener) as http,
    ):
        needs_key = kind == "admin_port" and "admin_api_key" in keys
        for path in HEALTH.paths:
            assert (await http.get(path)).status_code == 200
        for path in ("/metrics", "/load", "/is_paused", "/server_info"):
            assert (await http.get(path)).status_code == (401 if needs_key else 200), path
            client = await http.get(path, headers={"x-api-key": "k"})
            assert client.status_code == (403 if needs_key else 200), path
            assert (await http.get(path, headers=OPERATOR)).status_code == 200
        for path in ("/v1/models", "/", "/page/main.js", "/view/events", "/openapi.json", "/x"):
            refused = await http.get(path, headers={"x-api-key": "k"})
            assert refused.status_code == 404, path
        body = {"prompt": "hello"}
        assert (await http.post("/v1/completions", json=body)).status_code == 404
        upgrade = {
            **{"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"},
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        assert (await http.get("/v1/sessions", headers=upgrade)).status_code == 404
        client_key = {"x-api-key": "k"} if "api_key" in keys else {}
        at_public = await front_end.http.post("/pause", headers=client_key)
        assert at_public.status_code == 403
        if "admin_api_key" in keys:
            assert (await front_end.http.post("/pause", headers=OPERATOR)).status_code == 200
        assert (await http.post("/pause", headers=OPERATOR)).status_code == 200
        headers = OPERATOR if needs_key else {}
        ids = {"request_ids": ["cmpl-1"]}
        assert (await http.post("/abort_requests", json=ids, headers=headers)).status_code == 202
        assert front_end.supervisor.sent.get_nowait() == AbortRequests(["cmpl-1"], None), "of all"
