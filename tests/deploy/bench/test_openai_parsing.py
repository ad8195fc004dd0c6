"""Parsing of responses and events from chunks of any size."""

import random

import pytest

from deploy.bench.stream import (
    EventSplitter,
    HttpResponseParser,
    InvalidResponseError,
    RequestResult,
    StreamedResponse,
)
from proto.errors import ProtocolError

EVENTS = [b'{"a":1}', b"[DONE]", b"two\nlines", "grün".encode(), b""]
BODY = (
    b'data: {"a":1}\n\n: a comment\n\nevent: x\nid: 3\ndata:[DONE]\r\n\r\n'
    b"data: two\ndata: lines\n\n\n" + "data: grün\r\n\r\n".encode() + b"data:\n\n"
)


def chunked(body: bytes, rng: random.Random) -> bytes:
    """Encode a body in chunks of random sizes, with an extension and a trailer."""
    found = b""
    while body:
        size = rng.randint(1, 9)
        piece, body = body[:size], body[size:]
        found += b"%x;x=y\r\n%b\r\n" % (len(piece), piece)
    return found + b"0\r\nx-trailer: 1\r\n\r\n"


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    pieces = []
    while data:
        size = rng.randint(1, 12)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("place", range(len(BODY) + 1))
def test_events_split_at_any_byte_are_parsed(place: int) -> None:
    splitter = EventSplitter()
    assert splitter.feed(BODY[:place]) + splitter.feed(BODY[place:]) == EVENTS
    assert splitter.end() == []


def test_an_unterminated_event_counts_at_the_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") + splitter.feed(b"data: 2") == []
    assert splitter.end() == [b"1\n2"]
    assert splitter.feed(b"data: 3\n\ndata: 4\n\n") == [b"3", b"4"]


@pytest.mark.parametrize("seed", range(50))
def test_responses_split_at_any_byte_are_parsed(seed: int) -> None:
    rng = random.Random(seed)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"
    encoded = [
        head + b"Transfer-Encoding: Chunked\r\n\r\n" + chunked(BODY, rng),
        head + b"content-LENGTH:  %d\r\n\r\n" % len(BODY) + BODY,
        head + b"\r\n" + BODY,
    ][seed % 3]
    reader, found = HttpResponseParser(), b""
    for piece in cut(encoded, rng):
        assert not reader.complete
        found += reader.feed(piece)
    until_closed = seed % 3 == 2
    assert (reader.complete, reader.reusable) == (not until_closed, not until_closed)
    reader.end()
    assert (found, reader.status, reader.complete) == (BODY, 200, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    ],
)
def test_invalid_responses_are_reported(data: bytes) -> None:
    with pytest.raises(InvalidResponseError):
        HttpResponseParser().feed(data)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab"])
def test_truncated_responses_are_reported(data: bytes) -> None:
    reader = HttpResponseParser()
    reader.feed(data)
    with pytest.raises(InvalidResponseError, match="closed"):
        reader.end()


def test_a_closing_connection_is_not_reused() -> None:
    reader = HttpResponseParser()
    reader.feed(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx")
    assert (reader.complete, reader.reusable) == (True, False)


def answered(*events: bytes, status: int = 200, now: float = 1.0) -> RequestResult:
    """Return the result of an answer with one event every second."""
    result = RequestResult(requested_tokens=3, keep_text=True)
    answer = StreamedResponse(result)
    answer.feed(b"HTTP/1.1 %d x\r\n\r\n" % status, now)
    for number, event in enumerate(events, 1):
        answer.feed(b"data: " + event + b"\n\n", now + number)
    answer.end(now + 100)
    return result


def test_timings_are_measured_like_vllm() -> None:
    """Chunks with a choice are tokens, whatever their text; the usage chunk is not timed."""
    result = answered(
        b'{"choices":[{"text":"","index":0}]}',
        b'{"choices":[{"text":"ab","unknown":{"x":[1]}}]}',
        b'{"choices":[{"text":"c","finish_reason":"length"}]}',
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}',
        b"[DONE]",
    )
    result.started = 0.5
    assert (result.ttft, result.e2el, list(result.gaps)) == (1.5, 3.5, [1.0, 1.0])
    assert result.tpot == (3.5 - 1.5) / 4
    assert (result.input_tokens, result.output_tokens, result.cached_tokens) == (7, 5, 2)
    assert (result.text, result.error) == ("abc", "")


def test_chunks_are_counted_without_usage() -> None:
    chat = b'{"choices":[{"delta":{"role":"assistant","content":"x"}}],"usage":null}'
    result = answered(chat, chat, b'{"choices":[{"delta":{},"finish_reason":"stop"}]}')
    assert (result.output_tokens, result.text, result.error) == (3, "xx", "")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'{"error":{"message":"no room","code":500}}', "no room"),
        (b'{"error":"no room"}', "no room"),
        (b'{"object":"error","message":"no room"}', "no room"),
        (b"[DONE]", "no token in the answer"),
        (b'{"choices":[]}', "without [DONE]"),
    ],
)
def test_errors_in_a_stream_are_recorded(event: bytes, expected: str) -> None:
    assert expected in answered(event).error


def test_an_error_response_is_shown_with_its_status() -> None:
    result = RequestResult(requested_tokens=3)
    answer = StreamedResponse(result)
    answer.feed(b"HTTP/1.1 503 x\r\ncontent-length: 4\r\n\r\nfull", 1.0)
    assert (answer.parser.complete, result.error) == (True, "status 503: full")


@pytest.mark.parametrize("event", [b"{", b'{"choices":[{"text":1}]}', b"\xff", b"[" * 5000])
def test_an_invalid_event_raises(event: bytes) -> None:
    with pytest.raises(ProtocolError):
        answered(event)
