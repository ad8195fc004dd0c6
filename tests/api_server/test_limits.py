"""Limits on the cost of a request, and on what errors reveal."""

import asyncio
import json

import httpx
import psutil
import pytest

from api_server.errors import error_body
from api_server.http.http_protocol import MAX_HEADERS
from api_server.protocol.fields import MAX_DEPTH
from api_server.routes.common import MAX_BODY_BYTES
from proto.errors import RequestError
from tests.api_server.test_bad_bodies import raw_exchange
from tests.api_server.test_bad_requests import expect_error

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
MIB = 1 << 20


def nested(depth: int, opening: str, closing: str) -> bytes:
    """Return a body nested to this depth by one field."""
    inner = opening * (depth - 1) + "1" + closing * (depth - 1)
    return ('{"prompt": "x", "metadata": ' + inner + "}").encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
async def test_body_depth_limit(start, scripted, opening, closing):
    async with start(scripted("!")) as front_end:
        for depth in (MAX_DEPTH + 1, 1000, 60_000):
            content = nested(depth, opening, closing)
            error = await expect_error(front_end, PATH, content, 400)
            assert "nested" in error["message"]
        assert front_end.engine.requests.empty()
        headers = {"content-type": "application/json"}
        deepest = nested(MAX_DEPTH, opening, closing)
        assert (await front_end.http.post(PATH, content=deepest, headers=headers)).is_success


async def test_brackets_in_strings_and_siblings_do_not_count_as_depth(start, scripted):
    async with start(scripted("!")) as front_end:
        assert (await front_end.complete(user="[" * 1000)).status_code == 200
        assert (await front_end.complete(metadata={"a": [[]] * 1000})).status_code == 200


async def test_header_count_limit(start):
    async with start() as front_end:
        begin = b"GET /health HTTP/1.1\r\n"
        for number in (MAX_HEADERS + 1, 5000):
            answer = await raw_exchange(front_end, begin + b"a:b\r\n" * number + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 431 "), number
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert str(MAX_HEADERS) in error["message"]
        last = b"a:b\r\n" * (MAX_HEADERS - 2) + b"host: [::1]\r\nconnection: close\r\n\r\n"
        answer = await raw_exchange(front_end, begin + last, begin + last)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_endless_headers(start):
    """A client sends headers until it is disconnected."""
    async with start() as front_end:
        pieces = [b"x-%d: y\r\n" % number for number in range(100_000)]
        begin = b"GET /health HTTP/1.1\r\n"
        answer = await raw_exchange(front_end, begin, b"".join(pieces))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert (await front_end.http.get("/health")).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_of_a_gigabyte_takes_no_memory(start, announced):
    """Sent whole or in chunks; data after the answer is dropped."""
    length = b"content-length: 1073741824" if announced else b"transfer-encoding: chunked"
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%s\r\n\r\n"
    piece = b" " * MIB
    chunk = piece if announced else b"100000\r\n" + piece + b"\r\n"
    async with start() as front_end:
        before = psutil.Process().memory_info().rss
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(front_end.url).port)
        writer.write(head % (PATH.encode(), length))
        answering = asyncio.create_task(reader.readline())
        for _ in range(100):
            writer.write(chunk)
            await writer.drain()
        assert (await answering).startswith(b"HTTP/1.1 413 ")
        grown = psutil.Process().memory_info().rss - before
        assert grown < 3 * MAX_BODY_BYTES, f"{grown >> 20} MiB"
        writer.close()
        assert (await front_end.http.get("/health")).status_code == 200


@pytest.mark.parametrize("prompts", [["x"] * 10**5, [[1]] * 50_000], ids=["texts", "ids"])
async def test_too_many_prompts_are_refused_before_tokenizing(
    start, scripted, monkeypatch, prompts
):
    async with start(scripted("!")) as front_end:
        monkeypatch.setattr(type(front_end.app_state.tokenizer), "encode", None)
        content = json.dumps({"prompt": prompts}).encode()
        error = await expect_error(front_end, PATH, content, 400)
        assert error["param"] == "prompt"
        assert "1024" in error["message"]
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize("salt", ["s" * MIB, "a\x00b", "line\nbreak", "\ud800", "", 5, ["s"], {}])
async def test_invalid_cache_salts(start, scripted, salt):
    async with start(scripted("!")) as front_end:
        content = json.dumps({"prompt": "x", "cache_salt": salt}).encode()
        error = await expect_error(front_end, PATH, content, 400)
        assert error["param"] == "cache_salt"
        assert len(error["message"]) < 400
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for a in range(99999) %}{% endfor %}"},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "function", "function": {"name": "none_of_these"}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
        {"tools": "all"},
    ],
)
async def test_templates_and_tools_of_clients(start, scripted, fields):
    async with start(scripted("!")) as front_end:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        error = await expect_error(front_end, CHAT, json.dumps(body).encode(), 400)
        assert error["param"].split(".")[0].split("[")[0] in (*fields, "tool_choice", "tools")
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no file /home/ann/models/a.json", "no file /…"),
        ("ipc:///run/user/0/tokend-x/engine-1", "ipc:///…"),
        ('File "/usr/lib/python3.11/json/decoder.py", line 5', 'File "/…", line 5'),
        ("<object object at 0x7f3a5c001230>", "<object object at 0x…>"),
        ("use /v1/completions", "use /v1/completions"),
        ("the model org/name/part does not exist", "the model org/name/part does not exist"),
        ("https://example.org/a/b takes 3/4", "https://example.org/a/b takes 3/4"),
    ],
)
def test_errors_reveal_no_internals(message, shown):
    assert error_body(RequestError(message))["error"]["message"] == shown
