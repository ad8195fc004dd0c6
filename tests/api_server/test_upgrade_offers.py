"""Offers of another protocol (RFC 9110, 7.8): those that are not taken change nothing."""

import asyncio
import json

import httpx
import pytest

from tests.api_server.conftest import message, websocket
from tests.api_server.test_bad_bodies import raw_exchange

BODY = json.dumps({"prompt": "the quick fox", "max_tokens": 1}).encode()
LENGTH = b"Content-Length: %d" % len(BODY)
H2C = [
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
]
WEBSOCKET = [b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"]
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
OFFERS = {
    "h2c, as Java's client": H2C,
    "two Connection headers": [b"connection: keep-alive", b"CONNECTION: upgrade", b"upgrade: H2C"],
    "websocket": WEBSOCKET,
    "websocket with a key": [*WEBSOCKET, KEY],
    "TLS": [b"Upgrade: TLS/1.0, HTTP/2.0", b"Connection: upgrade, keep-alive"],
}


def head(request: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([request, b"Host: localhost", *lines, b"", b""])


def post(*lines: bytes) -> bytes:
    json_type = b"Content-Type: application/json"
    return head(b"POST /v1/completions HTTP/1.1", json_type, *lines)


LAST = post(LENGTH, b"Connection: close") + BODY


def statuses(answers: bytes) -> list[bytes]:
    return [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("offer", OFFERS)
async def test_a_post_with_an_offer_keeps_its_body_and_connection(start, scripted, offer):
    chunks = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (5, BODY[:5], len(BODY) - 5, BODY[5:])
    large = BODY.ljust(200_000)
    lines = OFFERS[offer]
    whole = post(*lines, LENGTH) + BODY
    cases = {
        "pipelined": [whole + whole + LAST],
        "in pieces": [whole[:40], whole[40:150], whole[150:-10], whole[-10:] + LAST],
        "chunked": [post(b"Transfer-Encoding: chunked", *lines) + chunks + LAST],
        "large": [post(*lines, b"Content-Length: %d" % len(large)) + large, LAST],
        "after another": [post(LENGTH) + BODY + whole, LAST],
    }
    async with start(scripted("!")) as front_end:
        for case, pieces in cases.items():
            answers = await raw_exchange(front_end, *pieces)
            number = b"".join(pieces).count(b"POST ")
            assert statuses(answers) == [b"200"] * number, (case, answers)


async def test_a_client_that_waits_for_100_continue(start, scripted):
    async with start(scripted("!")) as front_end:
        port = httpx.URL(front_end.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(*H2C, LENGTH, b"Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY + LAST)
        assert statuses(await reader.read()) == [b"200", b"200"]
        writer.close()


@pytest.mark.parametrize(
    ("request_line", "lines", "status"),
    [
        (b"GET /health HTTP/1.1", H2C, b"200"),
        (b"GET /health HTTP/1.1", WEBSOCKET, b"200"),
        (b"GET /health HTTP/1.1", [*WEBSOCKET, KEY, b"Content-Length: 2"], b"200"),
        (b"GET /health HTTP/1.0", [*WEBSOCKET, KEY], b"200"),
        (b"GET /health HTTP/1.1", [b"Connection: close, Upgrade", b"Upgrade: h2c"], b"200"),
        (b"HEAD /health HTTP/1.1", H2C, b"200"),
        (b"PUT /health HTTP/1.1", [*WEBSOCKET, KEY], b"405"),
        (b"GET /nothing HTTP/1.1", [*WEBSOCKET, KEY], b"404"),
    ],
)
async def test_every_offer_gets_an_answer(start, request_line, lines, status):
    async with start() as front_end:
        body = b"ab" if b"Content-Length: 2" in lines else b""
        last = head(b"GET /health HTTP/1.1", b"Connection: close")
        sent = head(request_line, *lines) + body + last
        async with asyncio.timeout(10):
            answers = await raw_exchange(front_end, sent)
        assert statuses(answers)[0] == status, answers


async def test_websockets_are_still_opened(start, scripted):
    async with start(scripted("!")) as front_end, websocket(front_end, "/v1/responses") as client:
        await client.send(json.dumps({"type": "response.create", "input": "hello"}))
        assert (await message(client))["type"] == "response.created"


async def test_headers_of_an_offer_have_the_same_limits(start):
    async with start() as front_end:
        long = [b"x-%d: %b" % (number, b"y" * 1000) for number in range(70)]
        for lines in (long, [b"a: b"] * 200):
            answers = await raw_exchange(front_end, post(*H2C, *lines, LENGTH) + BODY)
            assert statuses(answers) == [b"431"]
