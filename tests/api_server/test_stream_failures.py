"""A stream that fails after its first chunk: an error event, [DONE], the end of the connection."""

import asyncio
import json

from api_server.generation.encoders.completions import CompletionEncoder
from api_server.http.http_protocol import ChunkWriter
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from tests.api_server.conftest import samples

LIMIT_SECONDS = 20
BODY = json.dumps({"prompt": "hello", "stream": True}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
)


class Connection:
    """A keep-alive connection. events: those of the last stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.events: list[str] = []

    async def read_head(self) -> None:
        """Return the status; later failures occur in the stream."""
        async with asyncio.timeout(LIMIT_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")

    async def read_stream(self) -> None:
        """Read until the last chunk of a chunked body."""
        async with asyncio.timeout(LIMIT_SECONDS):
            answer = (await self.reader.readuntil(b"\r\n0\r\n\r\n")).decode()
        self.events = [each for each in answer.splitlines() if each.startswith("data: ")]

    async def is_closed(self) -> bool:
        """Return whether the server closed the connection."""
        try:
            async with asyncio.timeout(0.2):
                return await self.reader.read() == b""
        except TimeoutError:
            return False


async def ask(front_end):
    reader, writer = await asyncio.open_connection("127.0.0.1", front_end.http.base_url.port)
    writer.write(HEAD + BODY)
    connection = Connection(reader, writer)
    await connection.read_head()
    return connection, await front_end.engine.requests.get()


async def test_a_failure_of_the_engine(start):
    async with start(accepts=True) as front_end:
        connection, request = await ask(front_end)
        front_end.engine.emit(request, [40])
        front_end.engine.refuse(request, ErrorInfo("internal", "broken"))
        await connection.read_stream()
        assert '"message": "broken"' in connection.events[-2]
        assert connection.events[-1] == "data: [DONE]"
        assert await connection.is_closed()
        connection.writer.close()


async def test_shutdown_during_a_stream(start):
    """The unfinished choice has no finish reason."""
    async with start(accepts=True) as front_end:
        connection, request = await ask(front_end)
        front_end.engine.emit(request, [40])
        counters = front_end.app_state.metrics.engines[0]._counters
        while not counters["vllm:generation_tokens"].value:
            await asyncio.sleep(0)
        front_end.app_state.client.close()
        await connection.read_stream()
        assert '"code": 503' in connection.events[-2]
        assert not any('"finish_reason": "' in each for each in connection.events)
        assert await connection.is_closed()
        connection.writer.close()


async def test_an_internal_error(start, monkeypatch):
    async with start(accepts=True) as front_end:
        connection, request = await ask(front_end)
        monkeypatch.setattr(CompletionEncoder, "encode_delta", lambda self, delta: 1 // 0)
        front_end.engine.emit(request, [40])
        await connection.read_stream()
        error = json.loads(connection.events[-2].removeprefix("data: "))["error"]
        assert (error["message"], error["code"]) == ("internal error", 500)
        assert connection.events[-1] == "data: [DONE]"
        assert await connection.is_closed()
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        found = await samples(front_end)
        assert found["vllm:request_success_total,error"] == 1
        assert found["vllm:request_success_total,abort"] == 0
        connection.writer.close()


async def test_the_connection_is_kept_after_a_successful_stream(start):
    async with start(accepts=True) as front_end:
        connection, request = await ask(front_end)
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        await connection.read_stream()
        assert connection.events[-1] == "data: [DONE]"
        assert not await connection.is_closed()
        connection.writer.close()


async def test_an_encoding_error_in_the_direct_write_ends_only_its_stream(start, monkeypatch):
    """Ordinary chunks are written directly when a token arrives; an error there ends only this
    stream."""
    written, chunk = [], CompletionEncoder.encode_delta

    def write(self, body):
        written.append(body)
        real_write(self, body)

    def fail_at_the_fourth(self, delta):
        if delta.num_tokens == 4:
            raise ValueError("no words")
        return chunk(self, delta)

    real_write = ChunkWriter.write
    monkeypatch.setattr(ChunkWriter, "write", write)
    monkeypatch.setattr(CompletionEncoder, "encode_delta", fail_at_the_fourth)
    async with start(accepts=True) as front_end:
        connection, request = await ask(front_end)
        for number in range(1, 4):
            front_end.engine.emit(request, [40])
            async with asyncio.timeout(LIMIT_SECONDS):
                await connection.reader.readuntil(b"data: {")
                await connection.reader.readuntil(b"}\n\n\r\n")
            assert len(written) == number
        front_end.engine.emit(request, [40])
        await connection.read_stream()
        assert len(written) == 3
        assert '"message": "internal error"' in connection.events[0]
        assert connection.events[1:] == ["data: [DONE]"]
        assert await connection.is_closed()
        assert front_end.app_state.client.num_open == 0
        connection.writer.close()
