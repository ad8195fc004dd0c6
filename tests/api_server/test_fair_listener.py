"""Connections to a shared socket are distributed evenly over front ends."""

import asyncio
import errno
import socket
from collections.abc import Callable

import pytest
import uvicorn

from api_server.http import http_server
from api_server.http.http_server import FairListener, HttpServer
from api_server.metrics.metric_sheet import Gauge, MetricSheet
from proto.messages.stats import metric_bytes


class CountedConnections(asyncio.Protocol):
    """A protocol that counts connections."""

    def __init__(self, connections: Gauge) -> None:
        self.connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connections.__enter__()
        transport.write(b"x")  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.__exit__(None, None, None)


class CountingServer(HttpServer):
    """The part of a front end's server that the listener uses."""

    def __init__(self, connections: Gauge) -> None:
        super().__init__(uvicorn.Config("", log_config=None), connections, shares_sockets=True)
        self.config.ssl = None

    def create_protocol(self, listener: object) -> asyncio.Protocol:
        return CountedConnections(self._connections)


class FrontEnds:
    """Listeners with a copy of the socket each, like separate processes."""

    def __init__(self, number: int) -> None:
        memory = bytearray(number * metric_bytes(1))
        self.gauges = [Gauge(MetricSheet(memory, row)) for row in range(number)]
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]
        self.copies = [self.socket.dup() for _ in range(number)]
        self.listeners = [self.listen(row) for row in range(number)]

    def listen(self, row: int) -> FairListener:
        return FairListener(self.copies[row], CountingServer(self.gauges[row]), self.gauges[row])

    async def connect(self, number: int) -> list[asyncio.StreamWriter]:
        """Open connections concurrently; return when all are accepted."""
        opened = [asyncio.open_connection("127.0.0.1", self.port) for _ in range(number)]
        pairs = await asyncio.gather(*opened)
        await asyncio.gather(*(reader.readexactly(1) for reader, _ in pairs))
        return [writer for _, writer in pairs]

    async def close(self) -> None:
        for each in self.listeners:
            each.close()
            await each.wait_closed()
        for copy in (*self.copies, self.socket):
            copy.close()


def run(number: int, body: Callable[[FrontEnds], object]) -> None:
    async def main() -> None:
        front_ends = FrontEnds(number)
        try:
            await asyncio.wait_for(body(front_ends), 30)  # type: ignore[arg-type]
        finally:
            await front_ends.close()

    asyncio.run(main())


def test_a_burst_is_distributed_evenly() -> None:
    async def body(front_ends: FrontEnds) -> None:
        writers = await front_ends.connect(40)
        counts = front_ends.gauges[0].values
        assert sum(counts) == 40
        assert max(counts) - min(counts) <= 4
        for each in writers:
            each.close()

    run(4, body)


def test_a_front_end_with_more_connections_accepts_fewer_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_START_SECONDS", 20.0)

    async def body(front_ends: FrontEnds) -> None:
        crowded, empty = front_ends.gauges
        for _ in range(10):
            crowded.__enter__()
        await front_ends.connect(8)
        assert (crowded.own_value, empty.own_value) == (10, 8)

    run(2, body)


def test_a_front_end_that_does_not_accept_delays_no_connection() -> None:
    """It is dead or hangs, so its count stays low; the others accept its share."""

    async def body(front_ends: FrontEnds) -> None:
        front_ends.listeners[1].close()
        await front_ends.connect(20)
        assert front_ends.gauges[0].values == [20, 0]

    run(2, body)


def test_closed_connections_are_not_counted() -> None:
    async def body(front_ends: FrontEnds) -> None:
        for each in await front_ends.connect(6):
            each.close()
        while sum(front_ends.gauges[0].values):
            await asyncio.sleep(0.001)

    run(2, body)


def test_accepting_resumes_after_running_out_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "_EXHAUSTED_SECONDS", 0.01)

    class Exhausted(socket.socket):
        num_left = 3

        def accept(self) -> tuple[socket.socket, object]:
            if Exhausted.num_left:
                Exhausted.num_left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def body(front_ends: FrontEnds) -> None:
        front_ends.listeners[0].close()
        front_ends.copies[0] = Exhausted(fileno=front_ends.copies[0].detach())
        front_ends.listeners[0] = front_ends.listen(0)
        await front_ends.connect(2)
        assert front_ends.gauges[0].own_value == 2

    run(1, body)
    assert "Too many open files" in caplog.text
    assert not Exhausted.num_left
