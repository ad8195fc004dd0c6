"""The fast path to generation routes: disconnected clients cost nothing, the rest is unchanged."""

import asyncio
import json
import socket

import pytest
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from api_server.middleware import endpoints_of
from tests.api_server.conftest import samples

LEFT = "tokend:requests_cut_short_total,disconnect"
BODY = json.dumps({"prompt": "hello", "stream": True}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)


def address(front_end) -> tuple[str, int]:
    host, port = front_end.url.removeprefix("http://").split(":")
    return host, int(port)


async def until_left(front_end) -> None:
    async with asyncio.timeout(10):
        while not (await samples(front_end))[LEFT]:
            await asyncio.sleep(0)


@pytest.mark.parametrize("half", [False, True])
async def test_a_client_that_left_before_processing_is_only_counted(start, caplog, half):
    """Also if only the client's half is closed, and while another request is served."""
    async with start() as front_end:
        other = asyncio.create_task(front_end.complete())
        running = await front_end.engine.requests.get()
        with socket.create_connection(address(front_end)) as client:
            client.sendall(HEAD + BODY)
            if half:
                client.shutdown(socket.SHUT_WR)
                await until_left(front_end)
                assert client.recv(1) == b""
        await until_left(front_end)
        assert front_end.engine.requests.empty()
        assert front_end.engine.aborts.empty()
        assert front_end.app_state.client.num_open == 1
        front_end.engine.emit(running, [5, 2])
        other.cancel()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_reset_connection_counts_as_disconnected(start, caplog):
    async with start() as front_end:
        with socket.create_connection(address(front_end)) as client:
            client.sendall(HEAD + BODY)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await until_left(front_end)
        assert front_end.engine.requests.empty()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_pipelined_requests_are_both_answered(start, scripted):
    """The second request does not mean that the client of the first one left."""
    async with start(scripted("!")) as front_end:
        reader, writer = await asyncio.open_connection(*address(front_end))
        writer.write(2 * (HEAD + BODY))
        text = b""
        while text.count(b"[DONE]") < 2:
            text += await asyncio.wait_for(reader.read(1 << 16), 10)
        writer.close()
        assert text.count(b"HTTP/1.1 200 ") == 2


def test_a_route_with_dependencies_has_no_fast_path() -> None:
    async def answer(request: Request) -> Response:
        return Response()

    plain, guarded = APIRouter(), APIRouter(dependencies=[Depends(lambda: None)])
    plain.post("/a")(answer)
    plain.get("/b")(answer)
    guarded.post("/c")(answer)
    assert endpoints_of(plain) == {"/a": answer}
    with pytest.raises(AssertionError):
        endpoints_of(guarded)
