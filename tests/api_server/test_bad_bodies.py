"""Invalid, oversized and slow bodies and headers: errors in OpenAI's shape."""

import asyncio
import json

import httpx
import pytest

from api_server.routes import common, completions
from tests.api_server.test_bad_requests import JSON, PATH, expect_error

UPLOAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 100\r\n\r\n{"
)
"""The beginning of an upload."""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"prompt": "x"',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
    ],
    ids=lambda content: repr(content[:12]),
)
async def test_bad_bodies(start, scripted, content):
    async with start(scripted("!")) as front_end:
        await expect_error(front_end, PATH, content, 400)
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": "x", "max_tokens": 1, "max_tokens": 1}', "max_tokens"),
        (b'{"prompt": "x", "logit_bias": {"5": 1, "6": 1, "5": 2}}', "5"),
        (b'{"prompt": "x", "\\u0061": 1, "a": 2}', "a"),
        (b'{"prompt": "x", "' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 1}', "k…"),
    ],
    ids=["at the top", "within", "in another spelling", "of any length"],
)
async def test_a_duplicate_key_is_refused(start, scripted, content, param):
    """tokend would use the last value, but a proxy that inspects the body perhaps the first."""
    async with start(scripted("!")) as front_end:
        error = await expect_error(front_end, PATH, content, 400)
        assert error["param"].endswith(param)
        assert "more than once" in error["message"]
        assert len(error["message"]) < 400
        assert front_end.engine.requests.empty()


async def test_content_types(start, scripted):
    async with start(scripted("!")) as front_end:
        content = b'{"prompt": "x"}'
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await front_end.http.post(
                PATH, content=content, headers={"content-type": content_type}
            )
            assert response.status_code == 415
            assert response.json()["error"]["type"] == "UnsupportedMediaTypeError"
        response = await front_end.http.post(
            PATH, content=content, headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert response.status_code == 200


async def test_large_bodies(start, scripted):
    async with start(scripted("!")) as front_end:
        response = await front_end.http.post(PATH, content=b" " * ((32 << 20) + 1), headers=JSON)
        assert response.status_code == 413

        async def endless():
            for _ in range(40):
                yield b" " * (1 << 20)

        response = await front_end.http.post(PATH, content=endless(), headers=JSON)
        assert response.status_code == 413
        assert (await front_end.complete()).status_code == 200


async def test_a_slow_upload(start, scripted, monkeypatch):
    monkeypatch.setattr(common, "UPLOAD_SECONDS", 0.05)
    async with start(scripted("!")) as front_end:
        answer = await raw_exchange(front_end, UPLOAD)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head
        assert json.loads(content)["error"]["type"] == "RequestTimeoutError"


async def raw_exchange(front_end, *pieces: bytes) -> bytes:
    """Send bytes; return the response until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


async def test_large_headers(start, scripted):
    async with start(scripted("!")) as front_end:
        fine = await front_end.http.get("/health", headers={"x-long": "y" * 60_000})
        assert fine.status_code == 200
        begin = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
        lines = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(70))
        endless = [b"y" * 50_000] * 3
        for pieces in (
            [begin + lines + b"\r\n"],
            [begin, b"x-long: ", *endless],
            [b"GET /", *endless],
        ):
            answer = await raw_exchange(front_end, *pieces)
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
        assert (await front_end.complete()).status_code == 200


async def test_a_disconnect_during_an_upload_is_not_an_error(start, scripted, caplog, monkeypatch):
    async with start(scripted("!")) as front_end:
        reading, left = asyncio.Event(), asyncio.Event()
        read = completions.read_request

        async def watched(*args):
            reading.set()
            try:
                return await read(*args)
            finally:
                left.set()

        monkeypatch.setattr(completions, "read_request", watched)
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)
        writer.write(UPLOAD)
        await writer.drain()
        await reading.wait()
        writer.close()
        await left.wait()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
