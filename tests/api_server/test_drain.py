"""Draining a front end: open requests finish, new ones are refused; who may start a drain."""

import asyncio
import json

import httpx
import pytest

from api_server.http.addresses import is_loopback
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import Drain, DrainProgress, DrainRequested, FrontEndReady, Shutdown
from proto.settings.config import FrontEndConfig
from tests.api_server.test_process import running


def begin(http: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    body = {"prompt": "hello", "max_tokens": 2, **fields}
    return asyncio.create_task(http.post("/v1/completions", json=body))


async def test_open_requests_finish_and_new_ones_are_refused(run_dir, model):
    """New requests on existing connections as well, which are then closed."""
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        assert (await process.http.get("/v1/models")).headers.get("connection") is None
        answer = begin(process.http)
        request = await process.engine.requests.get()
        process.supervisor.send(Drain())
        assert await process.next_message(DrainProgress) == DrainProgress(0, 1)
        for refused in (
            await process.http.get("/v1/models"),
            await begin(process.http),
            await process.http.post("/v1/chat/completions", content=b"{"),
        ):
            assert refused.status_code == 503
            assert "draining" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
        health = await process.http.get("/health")
        assert health.status_code == 503
        assert "draining" in health.json()["error"]["message"]
        ready = await process.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["draining"])
        assert (await process.http.get("/health/live")).status_code == 200
        assert (await process.http.get("/metrics")).status_code == 200
        process.engine.emit(request, [40, 41], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["finish_reason"] == "length"
        assert await process.next_message(DrainProgress) == DrainProgress(0, 0)
        process.supervisor.send(Shutdown())
        assert await process.status() == 0


async def test_a_request_counts_as_open_from_its_headers_on(start):
    """A request whose body has not arrived yet is served."""
    async with start(accepts=True) as front_end:
        visitors = front_end.app_state.in_flight
        reader, writer = await asyncio.open_connection("127.0.0.1", front_end.http.base_url.port)
        body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        while not visitors.number:
            await asyncio.sleep(0)
        front_end.app_state.health.start_drain()
        gone = asyncio.create_task(visitors.wait_until_idle())
        writer.write(body)
        request = await front_end.engine.requests.get()
        assert not gone.done()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert b"200 OK" in await reader.readline()
        await gone
        writer.close()


async def test_an_operator_starts_a_drain(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        asked = await process.http.post("/admin/drain")
        assert (asked.status_code, asked.json()["status"]) == (202, "draining")
        assert await process.next_message(DrainRequested) == DrainRequested(0)
        assert (await begin(process.http)).status_code == 503, "the drain starts at once"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://example.org"},
        {"sec-fetch-site": "cross-site"},
        {"x-forwarded-for": "192.0.2.1"},
        {"forwarded": "for=192.0.2.1"},
    ],
)
async def test_without_a_key_browsers_and_proxies_cannot_start_a_drain(start, headers):
    async with start() as front_end:
        refused = await front_end.http.post("/admin/drain", headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "PermissionDeniedError"
        assert not front_end.app_state.health.draining


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("", False),
        ("testclient", False),
    ],
)
def test_local_addresses(address, local):
    assert is_loopback(address) is local


async def test_an_admin_key_can_start_a_drain_from_anywhere(start):
    config = FrontEndConfig(api_key="k", admin_api_key="op")
    async with start(config=config) as front_end:
        assert (await front_end.http.post("/admin/drain")).status_code == 401
        refused = await front_end.http.post("/admin/drain", headers={"x-api-key": "k"})
        assert refused.status_code == 403
        assert not front_end.app_state.health.draining
        headers = {"authorization": "Bearer op", "x-forwarded-for": "192.0.2.1"}
        asked = await front_end.http.post("/admin/drain", headers=headers)
        assert asked.status_code == 202
        assert front_end.app_state.health.draining


async def test_a_remote_client_key_cannot_start_a_drain(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice a-key\n")
    for api_key in (None, "k"):
        config = FrontEndConfig(api_key=api_key, api_key_file=str(keys))
        async with start(config=config) as front_end:
            headers = {"authorization": "Bearer a-key", "x-forwarded-for": "192.0.2.1"}
            refused = await front_end.http.post("/admin/drain", headers=headers)
            assert refused.status_code == 403
            assert "--admin-api-key" in refused.json()["error"]["message"]
            assert not front_end.app_state.health.draining
            del headers["x-forwarded-for"]
            asked = await front_end.http.post("/admin/drain", headers=headers)
            assert asked.status_code == 202, "a local client may"
