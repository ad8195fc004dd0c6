"""Limits of connections of HTTP and WebSockets, over all connections of a front end."""

import asyncio
import contextlib
import json
import logging
import os
import threading
import time

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api_server import middleware, turns
from api_server.http import connection, websocket_protocol
from api_server.http.connection import (
    MAX_BODY_BYTES,
    MAX_CLIENT_UPLOAD_BYTES,
    UPLOAD_BYTES,
    UPLOAD_SECONDS,
    Uploads,
)
from proto.errors import OverloadedError
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import closed, message, websocket
from tests.api_server.test_bad_bodies import raw_exchange

MIB = 1 << 20
HOST = b"Host: localhost\r\n"
GET = b"GET /health/live HTTP/1.1\r\n" + HOST
JSON_TYPE = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON_TYPE
BODY = b'{"prompt": "hello", "max_tokens": 1}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HANDSHAKE = (
    b"GET /v1/sessions HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


async def opened(front_end) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)


async def handshaken(front_end) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a WebSocket whose frames the test writes itself."""
    reader, writer = await opened(front_end)
    writer.write(HANDSHAKE + HOST + b"\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def close_frame(reader: asyncio.StreamReader) -> int:
    """Return the code of the last frame, when the server has closed."""
    async with asyncio.timeout(20):
        data = await reader.read()
    begin = data.rindex(b"\x88")
    return int.from_bytes(data[begin + 2 : begin + 4])


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


# pipelined requests


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 1 << 20])
async def test_pipelined_requests_are_answered_in_order(start, scripted, size):
    """However the data is cut: headers, bodies with a length, and chunks with a trailer."""
    crlf = b'{"prompt": "a\\r\\n\\r\\n", "max_tokens": 1}\r\n\r\n\r\n\r\n'
    chunks = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n"
    sent = (
        GET + b"\r\n",
        POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
        GET.replace(b"/health/live", b"/nothing") + b"\r\n",
        POST + CHUNKED + chunks + b"\r\n",
        POST + b"Content-Length: %d\r\n\r\n" % len(crlf) + crlf,
        POST + CHUNKED + chunks + b"X-Trailer: a\r\n\r\n",
        GET + b"Content-Length: 4\r\n\r\n\r\n\r\n",
        GET.replace(b"/health/live", b"/nothing") + b"Connection: close\r\n\r\n",
    )
    data = b"".join(sent)
    async with start(scripted("!")) as front_end, asyncio.timeout(60):
        reader, writer = await opened(front_end)
        for begin in range(0, len(data), size):
            writer.write(data[begin : begin + size])
            if size < 1000:
                await writer.drain()
                await asyncio.sleep(0)
        assert statuses(await reader.read()) == [200, 200, 404, 200, 200, 200, 200, 404]
        writer.close()


@pytest.mark.parametrize("at_once", [False, True])
async def test_requests_far_ahead_of_a_response_are_dropped(start, at_once):
    """The response in progress is whole, then the connection ends, whose end is noticed.

    at_once: all arrive before the first of them is parsed, as in a flood on many connections.
    """
    first = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    others = (GET + b"\r\n") * 2000
    async with start(accepts=True) as front_end, asyncio.timeout(30):
        reader, writer = await opened(front_end)
        while not (front_end.server.server_state.connections - {None}):
            await asyncio.sleep(0.01)
        (protocol,) = front_end.server.server_state.connections - {None}
        if at_once:
            protocol.reception.turns._spent_seconds = connection.PASS_SECONDS
            protocol.data_received(first + others)
        else:
            writer.write(first)
        request = await front_end.engine.requests.get()
        if not at_once:
            writer.write(others)
        await writer.drain()
        while not protocol._refused:
            await asyncio.sleep(0.01)
        assert not protocol._unparsed
        assert not protocol.pipeline
        await asyncio.sleep(4 * connection.DISCARD_SECONDS)
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert statuses(await reader.read()) == [200]
        writer.close()


async def test_a_websocket_after_a_request_waits_for_its_response(start, scripted):
    async with start(scripted("!")) as front_end, asyncio.timeout(30):
        reader, writer = await opened(front_end)
        body = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        frame = b"\x81\x8e\0\0\0\0" + b'{"type":"end"}'
        writer.write(POST + body + HANDSHAKE + HOST + b"\r\n" + frame)
        answer = await reader.readuntil(b"101 Switching Protocols")
        assert statuses(answer) == [200, 101]
        await reader.readuntil(b"\x88\x02\x03\xe8")  # the frame was read: an end, and a close
        writer.close()


async def test_nothing_is_parsed_after_connect(start):
    async with start() as front_end, asyncio.timeout(30):
        answer = await raw_exchange(
            front_end, b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n", GET + b"\r\n"
        )
        assert statuses(answer)[0] in (400, 404, 405)
        assert len(statuses(answer)) == 1


async def test_the_connections_of_a_flood_take_turns(start, monkeypatch):
    """While hundreds of slices wait, an ordinary request is answered."""
    monkeypatch.setattr(connection, "PASS_SECONDS", 1e-9)
    async with start() as front_end, asyncio.timeout(60):
        flood = b"1\r\n \r\n" * 7000
        writers = [(await opened(front_end))[1] for _ in range(20)]
        for writer in writers:
            writer.write(POST + CHUNKED + flood)
        protocols = front_end.server.server_state.connections
        while not all(protocol._unparsed for protocol in protocols):
            await asyncio.sleep(0)
        assert (await front_end.http.get("/health/live")).status_code == 200
        assert sum(bool(protocol._unparsed) for protocol in protocols) >= 10
        for writer in writers:
            writer.transport.abort()


# WebSockets


BAD_HANDSHAKES = {
    "a long header": HANDSHAKE + HOST + b"X-Long: " + b"y" * 20_000 + b"\r\n\r\n",
    "a long URL": HANDSHAKE.replace(b"sessions", b"sessions?" + b"q" * 20_000) + HOST + b"\r\n",
    "no version": HANDSHAKE.replace(b"Sec-WebSocket-Version: 13\r\n", HOST) + b"\r\n",
    "two keys": HANDSHAKE + HOST + b"Sec-WebSocket-Key: AAAA\r\n\r\n",
    "a bad key": HANDSHAKE.replace(b"dGhl", b"\xe9\xe9\xe9\xe9") + HOST + b"\r\n",
    "two origins": HANDSHAKE + HOST + b"Origin: http://a\r\nOrigin: http://b\r\n\r\n",
    "odd protocols": HANDSHAKE + HOST + b"Sec-WebSocket-Protocol: a b,,\x80\r\n\r\n",
}


@pytest.mark.parametrize("handshake", BAD_HANDSHAKES)
async def test_a_bad_handshake_is_answered_closed_and_one_line_of_the_log(start, caplog, handshake):
    caplog.set_level(logging.INFO, "tokend.requests")
    async with start() as front_end, asyncio.timeout(20):
        answer = await raw_exchange(front_end, BAD_HANDSHAKES[handshake])
        assert statuses(answer) == [400]
    (record,) = [record for record in caplog.records if not record.name.startswith("asyncio")]
    assert "finish=error 400" in record.getMessage()
    assert "code=invalid_handshake" in record.getMessage()
    assert record.exc_info is None
    assert len(record.getMessage()) < 500


async def test_text_that_is_not_utf8_is_one_line_of_the_log(start, caplog):
    async with start() as front_end, asyncio.timeout(20):
        for frames in (
            b"\x81\x82\0\0\0\0\xff\xfe",
            b"\x01\x81\0\0\0\0\xff\x80\x81\0\0\0\0\xfe\x89\x80\0\0\0\0\x81\x81\0\0\0\0x",
        ):
            caplog.clear()
            reader, writer = await handshaken(front_end)
            writer.write(frames)
            assert await close_frame(reader) == 1007
            records = [each for each in caplog.records if each.levelno >= logging.WARNING]
            assert ["not valid UTF-8" in record.getMessage() for record in records] == [True]
            assert records[0].exc_info is None
            writer.close()


async def test_frames_before_the_handshake_is_answered_wait(start, caplog):
    """Valid ones are processed, invalid ones close the connection, without a traceback."""
    async with start() as front_end, asyncio.timeout(20):
        for frames in (b"\x81\x8e\0\0\0\0" + b'{"type":"end"}', b"\xff\xff\xff"):
            reader, writer = await opened(front_end)
            writer.write(HANDSHAKE + HOST + b"\r\n" + frames)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 101 ")
            await reader.readuntil(b"\x88")  # a close
            writer.close()
    assert not [record for record in caplog.records if record.exc_info is not None]


@pytest.mark.parametrize(
    ("first", "frame"),
    [
        (b"", b"\x89\x80\0\0\0\0"),
        (b"", b"\x8a\xfd\0\0\0\0" + b"p" * 125),
        (b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0"),
        (b"\x01\x80\0\0\0\0", b"\x00\x81\0\0\0\0x"),
        (b"", b"\x81\x82\0\0\0\0{}"),
    ],
    ids=["pings", "pongs", "empty fragments", "fragments of a byte", "short messages"],
)
async def test_a_flood_of_small_frames_ends_the_connection(start, first, frame):
    async with start() as front_end:
        reader, writer = await handshaken(front_end)
        writer.write(first + frame * (websocket_protocol.SMALL_FRAMES * 3))
        assert await close_frame(reader) == 1008
        writer.close()


async def test_pings_are_answered(start, monkeypatch):
    """As many as a client may send; of those that come while it does not read, the last."""
    async with start() as front_end, asyncio.timeout(20):
        reader, writer = await handshaken(front_end)
        pings = [b"\x89\x84\0\0\0\0%04d" % number for number in range(20)]
        writer.write(b"".join(pings))
        assert await reader.readexactly(20 * 6) == b"".join(
            b"\x8a\x04%04d" % number for number in range(20)
        )
        (protocol,) = front_end.server.server_state.connections
        protocol.pause_writing()
        writer.write(b"".join(pings))
        while not protocol._late_pong.endswith(b"0019"):
            await asyncio.sleep(0)
        protocol.resume_writing()
        assert await reader.readexactly(6) == b"\x8a\x040019"
        writer.close()


async def test_a_message_that_comes_too_slowly(start, monkeypatch):
    monkeypatch.setattr(websocket_protocol, "UPLOAD_SECONDS", 0.2)
    async with start() as front_end:
        for frames in (b"\x81\xfe\x10\0\0\0\0\0xxx", b"\x01\x80\0\0\0\0"):
            reader, writer = await handshaken(front_end)
            writer.write(frames)
            assert await close_frame(reader) == 1008
            writer.close()
        monkeypatch.setattr(websocket_protocol, "UPLOAD_BYTES", 1000)
        async with websocket(front_end, "/v1/sessions") as client:

            async def fragments():
                for _ in range(6):
                    await asyncio.sleep(0.1)
                    yield "x" * 2000

            await client.send(fragments())
            assert "not valid JSON" in (await message(client))["error"]["message"]
            await client.send(json.dumps({"type": "end"}))
            assert await closed(client) == 1000


# uploads


def test_totals_of_uploads():
    """The largest upload of the client with the most is ended; small ones are not counted."""
    uploads, ended = Uploads(), []

    def begin(name, address, tenant=0):
        return uploads.begin(address, lambda _: ended.append(name), tenant=tenant)

    small = [begin(f"small {number}", "10.0.0.1") for number in range(100)]
    for upload in small:
        upload.resize(16 << 10)
    assert uploads.num_bytes == 0
    first, second = begin("first", "10.0.0.1"), begin("second", "::ffff:10.0.0.1")
    first.resize(30 * MIB)
    second.resize(10 * MIB)
    second.resize(19 * MIB)
    assert ended == ["first"]
    assert uploads.num_bytes == 19 * MIB
    tenant = [begin(f"tenant {number}", f"10.0.1.{number}", tenant=7) for number in range(3)]
    for number, upload in enumerate(tenant):
        upload.resize((20 + number) * MIB)
    assert ended == ["first", "tenant 2"]
    network = [begin(f"v6 {number}", f"2001:db8::{number}") for number in range(2)]
    for number, upload in enumerate(network):
        upload.resize((26 - number) * MIB)
    assert ended == ["first", "tenant 2", "v6 0"]
    others = [begin(f"other {number}", f"10.0.2.{number}") for number in range(3)]
    for upload in others:
        upload.resize(MIB * 10)
    assert ended[3:] == ["tenant 1"]
    for upload in (*small, first, second, *tenant, *network, *others):
        upload.resize(0)
    assert (uploads.num_bytes, uploads._totals, uploads._open) == (0, {}, set())


@pytest.mark.parametrize("num_front_ends", [1, 2, 16])
def test_front_ends_share_the_totals_and_a_body_always_fits(num_front_ends):
    uploads, ended = Uploads(num_front_ends), []
    for number in range(3):
        upload = uploads.begin("10.0.0.1", ended.append)
        upload.resize(MAX_BODY_BYTES if number == 0 else 8 * MIB)
    expected = max(MAX_CLIENT_UPLOAD_BYTES // num_front_ends, MAX_BODY_BYTES + MIB)
    assert len(ended) == (expected < 48 * MIB)


async def test_too_many_bytes_of_bodies_and_messages(start, scripted, monkeypatch):
    """The largest is ended with 503 or 1013; small requests of the same client go on."""
    async with start(scripted("!")) as front_end, asyncio.timeout(60):
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        uploads._max_client_bytes = 3 * MIB
        reader, writer = await opened(front_end)
        writer.write(POST + b"Content-Length: 20000000\r\n\r\n" + b" " * (2 * MIB))
        while uploads.num_bytes < 2 * MIB:
            await asyncio.sleep(0.01)
        websocket_reader, websocket_writer = await handshaken(front_end)
        frame = b"\x81\xff" + (20 * MIB).to_bytes(8) + b"\0\0\0\0"
        websocket_writer.write(frame + b" " * (3 * MIB // 2))
        answer = await reader.readuntil(b"}}")
        assert statuses(answer) == [503]
        assert b"retry-after" in answer
        assert (await front_end.complete()).status_code == 200
        websocket_writer.write(b" " * (2 * MIB))
        assert await close_frame(websocket_reader) == 1013
        assert (await front_end.complete(user="x" * MIB)).status_code == 200
        while uploads.num_bytes:
            await asyncio.sleep(0.01)
        writer.close()
        websocket_writer.close()


async def test_a_message_after_the_close_of_the_server_is_counted(start):
    """A client that does not answer the close, but goes on sending, is disconnected."""
    async with start() as front_end, asyncio.timeout(60):
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        uploads._max_client_bytes = MIB
        reader, writer = await handshaken(front_end)
        writer.write(b"\x81\x8e\0\0\0\0" + b'{"type":"end"}')
        assert await reader.readexactly(4) == b"\x88\x02\x03\xe8"
        writer.write(b"\x81\xff" + (20 * MIB).to_bytes(8) + b"\0\0\0\0" + b" " * (2 * MIB))
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        assert not uploads.num_bytes
        writer.close()


async def test_messages_that_wait_for_a_response_are_counted(start):
    async with start(accepts=True) as front_end, asyncio.timeout(60):
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        async with websocket(front_end, "/v1/responses") as client:
            await client.send(json.dumps({"type": "response.create", "input": "hello"}))
            request = await front_end.engine.requests.get()
            await client.send(" " * MIB)
            while uploads.num_bytes != MIB:
                await asyncio.sleep(0.01)
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
            while uploads.num_bytes:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [MIB // 2, 2 * MIB])
async def test_bodies_that_wait_for_their_turn_are_counted(start, scripted, size):
    """Above a total the largest is refused at once; the others are answered in their turn."""
    go_on = threading.Event()
    config = FrontEndConfig(tenant_by="header")
    async with start(scripted("!"), config=config) as front_end, asyncio.timeout(60):
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        uploads._max_bytes = 4 * size
        await turns._body_bytes.take(turns.HELD_BYTES)
        blocked = asyncio.create_task(turns.run_in_turn(go_on.wait, 60))
        sizes = [size, size + MIB // 4, *[size - 2000] * 2]

        def ask(number):
            body = {"prompt": "hello", "user": "x" * sizes[number]}
            headers = {"x-tenant-id": f"t{number}"}
            return front_end.http.post("/v1/completions", json=body, headers=headers)

        asked = [asyncio.create_task(ask(number)) for number in range(4)]
        assert (await asked[1]).status_code == 503
        assert "retry later" in asked[1].result().json()["error"]["message"]
        assert (await front_end.complete()).status_code == 200
        while uploads.num_bytes < 3 * size - 4000:
            await asyncio.sleep(0.01)
        turns._body_bytes.give_back(turns.HELD_BYTES)
        go_on.set()
        assert await blocked
        answers = await asyncio.gather(*asked[:1], *asked[2:])
        assert [answer.status_code for answer in answers] == [200] * 3
        assert not uploads.num_bytes


@pytest.mark.parametrize("is_read", [True, False])
async def test_data_of_a_body_that_is_ended(start, monkeypatch, is_read):
    """The request is refused at once, whether or not the application reads its body by then."""
    call = middleware.FastPath.__call__

    async def call_later(*args):
        await asyncio.sleep(0.3)
        await call(*args)

    async with start(accepts=True) as front_end, asyncio.timeout(10):
        running = asyncio.create_task(front_end.complete())
        await front_end.engine.requests.get()
        if not is_read:
            monkeypatch.setattr(middleware.FastPath, "__call__", call_later)
        before = set(front_end.server.server_state.connections)
        reader, writer = await opened(front_end)
        writer.write(POST + b"Content-Length: 200000\r\n\r\n" + b" " * 100_000)
        while not (found := set(front_end.server.server_state.connections) - before):
            await asyncio.sleep(0.01)
        (protocol,) = found
        while not protocol._in_body or is_read != (protocol.cycle.body == b""):
            await asyncio.sleep(0.01)
        protocol._end_upload(OverloadedError("too many"))
        assert statuses(await reader.readuntil(b"}}")) == [503]
        writer.close()
        running.cancel()


async def test_a_message_that_waits_for_its_turn_is_counted_once(start, scripted):
    async with start(scripted("!")) as front_end, asyncio.timeout(60):
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        await turns._body_bytes.take(turns.HELD_BYTES)
        for path in ("/v1/responses", "/v1/sessions"):
            async with websocket(front_end, path) as client:
                await client.send(" " * 2 * MIB)
                while uploads.num_bytes != 2 * MIB:
                    await asyncio.sleep(0.01)
                uploads._max_client_bytes = 2 * MIB
                async with websocket(front_end, path) as other:
                    await other.send(" " * (MIB // 2))
                    assert "not valid JSON" in (await message(other))["error"]["message"]
                assert "retry later" in (await message(client))["error"]["message"]
                await client.send(" ")
                assert "not valid JSON" in (await message(client))["error"]["message"]
            uploads._max_client_bytes = 3 * MIB
            assert not uploads.num_bytes
        turns._body_bytes.give_back(turns.HELD_BYTES)


async def test_the_least_rate_of_a_body(start, scripted, monkeypatch):
    """The test moves the event loop's clock on, after each piece has arrived."""
    loop, passed = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + passed)
    body = json.dumps({"prompt": "hello", "user": "x" * (4 * UPLOAD_BYTES)}).encode()
    async with start(scripted("!")) as front_end:
        uploads = front_end.server.config.http_protocol_class.keywords["reception"].uploads
        for size, pause, status in ((UPLOAD_BYTES, 0.6, 200), (UPLOAD_BYTES // 8, 0.3, 408)):
            reader, writer = await opened(front_end)
            answer = asyncio.create_task(reader.readuntil(b"}"))
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body))
            for end in range(size, len(body) + size, size):
                writer.write(body[end - size : end])
                while uploads.num_bytes < min(end, len(body) - 1) and not answer.done():
                    await asyncio.sleep(0.001)
                passed += pause * UPLOAD_SECONDS
            assert statuses(await answer) == [status]
            writer.close()


# hosts and origins

ASKED = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Host: localhost:8000\r\n", 200),
        (b"Host: LOCALHOST.\r\n", 200),
        (b"Host: app.localhost\r\n", 200),
        (b"Host: 127.0.0.1:1\r\n", 200),
        (b"Host: 192.168.0.7\r\n", 200),
        (b"Host: 127.1\r\n", 200),
        (b"Host: [::1]:8000\r\n", 200),
        (b"Host: OWN\r\n", 200),
        (b"Host: OWN.local:80\r\n", 200),
        (b"Host: llm.example:80\r\n", 200),
        (b"Host: bound.Example\r\n", 200),
        (b"Host: a.b.tree.example\r\n", 200),
        (b"Host: tree.example\r\n", 403),
        (b"Host: evil.example\r\n", 403),
        (b"Host: evil.example:8000\r\n", 403),
        (b"Host: localhost.evil.example\r\n", 403),
        (b"Host: 127.0.0.1.evil.example\r\n", 403),
        (b"Host: evillocalhost\r\n", 403),
        (b"", 400),
        (b"Host:\r\n", 400),
        (b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"Host: localhost, evil.example\r\n", 400),
        (b"Host: localhost:x\r\n", 400),
        (b"Host: user@localhost\r\n", 400),
        (b"Host: [\r\n", 400),
        (b"Host: [::1\r\n", 400),
        (b"Host: localhost/\r\n", 400),
        (b"Host: \xe9\r\n", 400),
    ],
)
async def test_hosts(start, caplog, lines, status):
    """Also for WebSockets, for unknown paths and for methods that a path does not have."""
    config = FrontEndConfig(host="BOUND.example", allowed_hosts=("LLM.example", "*.tree.Example"))
    lines = lines.replace(b"OWN", os.uname().nodename.encode())
    async with start(config=config) as front_end:
        answer = await raw_exchange(front_end, ASKED + lines + b"\r\n")
        assert statuses(answer) == [status], answer
        if status != 200:
            json.loads(answer.partition(b"\r\n\r\n")[2])
        unknown = ASKED.replace(b"GET /v1/models", b"PUT /nothing")
        answer = await raw_exchange(front_end, unknown + lines + b"\r\n")
        assert statuses(answer) == [404 if status == 200 else status]
        reader, writer = await opened(front_end)
        writer.write(HANDSHAKE + lines + b"\r\n")
        assert statuses(await reader.readline()) == [101 if status == 200 else status]
        writer.close()
    assert not [record for record in caplog.records if record.exc_info is not None]


async def test_hosts_with_keys(start):
    """A key shows that it is no page of another site; without it only one Host counts."""
    evil = ASKED + b"Host: evil.example\r\n"
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        assert statuses(await raw_exchange(front_end, evil + b"X-Api-Key: k\r\n\r\n")) == [200]
        assert statuses(await raw_exchange(front_end, evil + b"\r\n")) == [401]
        two = ASKED + b"Host: a\r\nHost: b\r\nX-Api-Key: k\r\n\r\n"
        assert statuses(await raw_exchange(front_end, two)) == [400]
    async with start(config=FrontEndConfig(admin_api_key="k")) as front_end:
        assert statuses(await raw_exchange(front_end, evil + b"X-Api-Key: k\r\n\r\n")) == [200]
        assert statuses(await raw_exchange(front_end, evil + b"X-Api-Key: x\r\n\r\n")) == [403]
    async with start(config=FrontEndConfig(allowed_hosts=("*",))) as front_end:
        assert statuses(await raw_exchange(front_end, evil + b"\r\n")) == [200]


@pytest.mark.parametrize("origin", ["http://[", "http://]", "//[::", "x", "", "http://[::1]:99:9"])
async def test_malformed_origins(start, caplog, origin):
    async with start() as front_end:
        headers = {"Origin": origin}
        assert (await front_end.http.get("/v1/models", headers=headers)).status_code == 200
        url = front_end.url.replace("http", "ws", 1) + "/v1/responses"
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, additional_headers=headers)
        assert caught.value.response.status_code == 403
    assert not [record for record in caplog.records if record.exc_info is not None]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x" * 3000])
async def test_an_encoded_body_is_refused(start, scripted, encoding):
    async with start(scripted("!")) as front_end:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        response = await front_end.http.post("/v1/completions", content=BODY, headers=headers)
        assert response.status_code == 415
        assert "content-encoding" in response.json()["error"]["message"]
        headers["content-encoding"] = "identity"
        response = await front_end.http.post("/v1/completions", content=BODY, headers=headers)
        assert response.status_code == 200


# HTTP/1.0


@pytest.mark.parametrize("line", [b"", b"Connection: keep-alive\r\n", HOST])
async def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(start, scripted, line):
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n" + JSON_TYPE + line
    async with start(scripted("abc")) as front_end, asyncio.timeout(20):
        answer = await raw_exchange(
            front_end, head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"content-length" not in head.lower()
        assert b"connection: close" in head.lower()
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
        whole = await raw_exchange(front_end, b"GET /v1/models HTTP/1.0\r\n\r\n")
        head, _, content = whole.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(content) in head.lower()
