"""Clients that send or read too slowly do not block others or fill memory."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from api_server import turns
from api_server.generation import request_stream as unsent
from api_server.generation.request_stream import SendBuffer
from api_server.http import connection, http_protocol
from proto.messages.engine_io import FinishReason
from tests.api_server.conftest import samples


def post(body: dict, *headers: bytes, path: bytes = b"/v1/completions", size: int = 0) -> bytes:
    """Return a request as bytes, by default of a completion. size: of the body, by white space."""
    if path == b"/v1/completions":
        body = {"prompt": "hello", "max_tokens": 100_000, **body}
    content = json.dumps(body).encode().ljust(size)
    lines = [
        b"POST %s HTTP/1.1" % path,
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % len(content),
        *headers,
    ]
    return b"\r\n".join([*lines, b"", content])


async def deaf_client(front_end, request: bytes) -> socket.socket:
    """A client that sends a request and never reads, with a tiny receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", httpx.URL(front_end.url).port))
    await loop.sock_sendall(client, request)
    return client


async def talk(front_end, request, token_ids: list[int], until: asyncio.Task) -> None:
    """Return a script of endless output in small steps."""
    while not until.done():
        front_end.engine.emit(request, token_ids)
        await asyncio.sleep(0)


def small_send_buffers(monkeypatch) -> None:
    """Shrink the kernel's send buffers, which hold megabytes on loopback connections."""
    made = http_protocol.LimitedHttpProtocol.connection_made

    def connection_made(self, transport):
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(http_protocol.LimitedHttpProtocol, "connection_made", connection_made)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 5}])
async def test_an_unread_stream_is_ended_at_its_limit(start, tokenizer, monkeypatch, fields):
    small_send_buffers(monkeypatch)
    monkeypatch.setattr("api_server.generation.request_builder.MAX_UNSENT_BYTES", 20_000)
    piece = tokenizer.encode(" number" * 50).ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        client = await deaf_client(front_end, post({"stream": True, **fields}))
        request = await front_end.engine.requests.get()
        aborted = asyncio.create_task(front_end.engine.aborts.get())
        talking = asyncio.create_task(talk(front_end, request, piece, aborted))
        abort = await asyncio.wait_for(aborted, 20)
        await talking
        assert (abort.request_id, abort.choice) == (request.request_id, None)
        assert front_end.app_state.client.num_open == 0
        # Other requests are served meanwhile and afterwards.
        other = asyncio.create_task(front_end.complete())
        front_end.engine.emit(
            await front_end.engine.requests.get(), [40], finish=FinishReason.LENGTH
        )
        assert (await other).status_code == 200
        client.close()
        while not (await samples(front_end))["tokend:requests_cut_short_total,slow_reader"]:
            pass


async def test_a_burst_of_output_does_not_end_the_stream(start, tokenizer, monkeypatch):
    monkeypatch.setattr("api_server.generation.request_builder.MAX_UNSENT_BYTES", 100)
    ids = tokenizer.encode(" number" * 100).ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        answer = asyncio.create_task(front_end.complete(stream=True, max_tokens=100_000))
        request = await front_end.engine.requests.get()
        front_end.engine.send_outputs(*(front_end.engine.output(request, ids) for _ in range(9)))
        front_end.engine.emit(request, ids, finish=FinishReason.LENGTH)
        text = (await answer).text
        assert text.count(" number") == 1000
        assert "error" not in text


async def test_a_client_that_resumes_reading_gets_the_error(start, tokenizer, monkeypatch):
    small_send_buffers(monkeypatch)
    monkeypatch.setattr("api_server.generation.request_builder.MAX_UNSENT_BYTES", 20_000)
    piece = tokenizer.encode(" number" * 50).ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        body = post({"stream": True}, b"connection: close")
        client = await deaf_client(front_end, body)
        request = await front_end.engine.requests.get()
        aborted = asyncio.create_task(front_end.engine.aborts.get())
        await talk(front_end, request, piece, aborted)
        loop, text = asyncio.get_running_loop(), b""
        while more := await loop.sock_recv(client, 1 << 16):
            text += more
        client.close()
        assert b'"code": 408' in text
        assert text.rstrip(b"\r\n0").endswith(b"data: [DONE]")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_without_progress_is_closed(start, tokenizer, monkeypatch, stream):
    """Even if the answer is complete and only its transmission is not."""
    small_send_buffers(monkeypatch)
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    piece = tokenizer.encode(" number" * 100).ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        client = await deaf_client(front_end, post({"stream": stream}))
        request = await front_end.engine.requests.get()
        connections = front_end.server.server_state.connections
        assert len(connections) == 1
        for _ in range(999):
            front_end.engine.emit(request, piece)
            await asyncio.sleep(0)
        if not stream:
            front_end.engine.emit(request, piece, finish=FinishReason.LENGTH)
        while connections:
            await asyncio.sleep(0.01)
        client.close()
        if stream:
            assert (await front_end.engine.aborts.get()).request_id == request.request_id
            found = await samples(front_end)
            assert found["tokend:requests_cut_short_total,slow_reader"] == 1
            assert found["tokend:requests_cut_short_total,disconnect"] == 0
        assert front_end.app_state.client.num_open == 0


async def test_a_slow_reader_with_progress_is_not_disconnected(start, tokenizer, monkeypatch):
    """Every check finds progress since the last one."""
    small_send_buffers(monkeypatch)
    piece = tokenizer.encode(" number" * 100).ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        client = await deaf_client(front_end, post({}, b"connection: close"))
        request = await front_end.engine.requests.get()
        for _ in range(299):
            front_end.engine.emit(request, piece)
        front_end.engine.emit(request, piece, finish=FinishReason.LENGTH)
        (connection,) = front_end.server.server_state.connections
        text, looks = b"", 0
        while more := await asyncio.get_running_loop().sock_recv(client, 1 << 14):
            text += more
            if connection.transport.get_write_buffer_size() < connection._num_unread_bytes:
                connection._check_stall()
                looks += 1
        client.close()
        assert looks > 3
        assert text.endswith(b"}\r\n0\r\n\r\n")


@contextlib.asynccontextmanager
async def unfinished(front_end, sent: bytes):
    """Send bytes and wait; yield the connection and its reader."""
    known = set(front_end.server.server_state.connections)
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)
    while not (new := front_end.server.server_state.connections - known):
        await asyncio.sleep(0)
    writer.write(sent)
    yield new.pop(), reader
    writer.close()


BEGIN = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


async def test_missing_headers_time_out(start):
    async with start() as front_end, unfinished(front_end, BEGIN) as (connection, reader):
        while not connection._in_headers:
            await asyncio.sleep(0)
        assert connection._receive_timeout.is_scheduled
        connection._on_headers_late()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"connection: close" in answer
        content = answer.partition(b"\r\n\r\n")[2]
        assert json.loads(content)["error"]["type"] == "RequestTimeoutError"


async def test_an_unused_connection_is_closed_without_an_answer(start):
    async with start() as front_end, unfinished(front_end, b"") as (connection, reader):
        assert connection._receive_timeout.is_scheduled
        connection._on_headers_late()
        assert await reader.read() == b""


@pytest.mark.parametrize("more", [BEGIN, b"\r\n"])
async def test_an_incomplete_second_request_times_out(start, more):
    async with (
        start() as front_end,
        unfinished(front_end, BEGIN + b"\r\n") as (connection, reader),
    ):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        assert not connection._receive_timeout.is_scheduled, "uvicorn closes idle connections"
        connection.data_received(more)
        assert connection._receive_timeout.is_scheduled
        connection._on_headers_late()
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ") == (more is BEGIN)


async def test_the_header_timeout_does_not_limit_the_answer(start):
    async with (
        start(accepts=True) as front_end,
        unfinished(front_end, post({"max_tokens": 4})) as (connection, reader),
    ):
        request = await front_end.engine.requests.get()
        assert not connection._receive_timeout.is_scheduled
        connection.data_received(BEGIN)
        connection._on_headers_late()
        assert connection._receive_timeout.is_scheduled, "checked again after the response"
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_the_rest_of_a_body_after_the_answer_times_out(start, monkeypatch):
    monkeypatch.setattr(http_protocol, "LEFTOVER_SECONDS", 0.1)
    async with start() as front_end:
        upload = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)
        writer.write(upload)
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        while not reader.at_eof() and reader.exception() is None:
            writer.write(b"x")
            await asyncio.sleep(0.01)
            await asyncio.wait([asyncio.ensure_future(reader.read(4096))], timeout=0.01)
        writer.close()


def test_send_buffer_counts_unsent_bytes():
    waiting = SendBuffer(1000)
    waiting.is_blocked = True
    waiting.add_text("é" * 400)
    waiting.check()
    waiting.add_logprobs([1, 2, 3, 4])
    with pytest.raises(unsent.SlowReaderError, match="1056 bytes"):
        waiting.check()
    waiting.is_blocked = False
    waiting.check()
    waiting.is_blocked = True
    waiting.clear()
    waiting.check()


def test_non_streaming_answers_have_no_send_limit():
    waiting = SendBuffer()
    waiting.is_blocked = True
    waiting.add_text("x" * 10_000_000)
    waiting.check()


async def test_a_slow_reader_holds_up_no_large_bodies(start, monkeypatch):
    """A body counts until its answer is made, not until the answer has been read."""
    small_send_buffers(monkeypatch)
    size = turns.UNHELD_BYTES + 1
    monkeypatch.setattr(turns, "_body_bytes", turns.Turns(size))
    async with start(max_model_len=200_000) as front_end:
        tokens = [20] * 200_000
        client = await deaf_client(
            front_end, post({"tokens": tokens}, path=b"/detokenize", size=size)
        )
        for _ in range(2):
            other = await front_end.http.post(
                "/detokenize",
                content=json.dumps({"tokens": [20]}).encode().ljust(size),
                headers={"content-type": "application/json"},
                timeout=20,
            )
            assert other.status_code == 200
        client.close()


async def test_an_answer_is_not_made_for_a_client_that_has_left(start, monkeypatch):
    small_send_buffers(monkeypatch)
    num_parts = 0

    def parts(body: object) -> Iterator[str]:
        nonlocal num_parts
        while num_parts < 500:
            num_parts += 1
            yield " " * 100_000

    monkeypatch.setattr("api_server.routes.tokenizer.json_parts", parts)
    async with start() as front_end:
        client = await deaf_client(front_end, post({"tokens": [20]}, path=b"/detokenize"))
        async with asyncio.timeout(20):
            while num_parts < 2:
                await asyncio.sleep(0.001)
            client.close()
            while front_end.server.server_state.tasks:
                await asyncio.sleep(0.001)
        assert num_parts < 100
