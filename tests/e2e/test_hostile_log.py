"""The reader of the daemon's log goes away, or stops to read: requests and exit status stay."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.daemon import ROLES, TOKEND, eventually

pytestmark = pytest.mark.suite("hostile")

BODY = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}
PIPE_BYTES = 1 << 16


class LoggedDaemon:
    """`tokend serve` whose output is a pipe that the test reads, closes or leaves full."""

    def __init__(self, *flags: str) -> None:
        self.log, writing_end = os.pipe()
        self._runtime = tempfile.TemporaryDirectory(prefix="tk")
        self.process = subprocess.Popen(
            [*TOKEND, "serve", "--port", "0", *flags],
            **{"stdout": writing_end, "stderr": writing_end, "stdin": subprocess.DEVNULL},
            env={**os.environ, "XDG_RUNTIME_DIR": self._runtime.name},
            start_new_session=True,
        )
        os.close(writing_end)
        self.text = ""
        self.url = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        while (found := re.search(pattern, self.text)) is None:
            piece = os.read(self.log, PIPE_BYTES).decode()
            assert piece, self.text
            self.text += piece
        return found

    def wait_ready(self) -> None:
        self.url = self.read_until(r"ready.*(https?://127\.0\.0\.1:\d+)").group(1)

    def wait_ready_without_log(self) -> None:
        """Find the port among the sockets of the process."""

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                for connection in psutil.Process(self.process.pid).net_connections("tcp"):
                    self.url = f"http://127.0.0.1:{connection.laddr.port}"
                    return httpx.get(f"{self.url}/health/ready").status_code == 200
            return False

        assert eventually(is_ready, 60.0)

    def close_log(self) -> None:
        os.close(self.log)
        self.log = -1

    def kill_worker(self) -> None:
        """The daemon has something to log: supervisor, engine and the next worker."""
        titles = {child: " ".join(child.cmdline()) for child in self._children()}
        worker = next(child for child, title in titles.items() if ROLES["worker"] in title)
        worker.kill()
        assert eventually(lambda: worker.pid not in {it.pid for it in self._children()})

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stream(self, reached: threading.Event | None = None) -> list[dict[str, Any]]:
        """Return the events of a stream; sets `reached` when it has begun."""
        events = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=BODY, timeout=60) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) > 3 and reached is not None:
                    reached.set()
        assert line == "" or line == "data: [DONE]"
        return events

    def end(self) -> None:
        if self.process.poll() is None:
            for child in [*psutil.Process(self.process.pid).children(recursive=True)]:
                child.kill()
            self.process.kill()
            self.process.wait()
        if self.log >= 0:
            self.close_log()
        self._runtime.cleanup()


@contextlib.contextmanager
def logged_daemon(*flags: str) -> Iterator[LoggedDaemon]:
    daemon = LoggedDaemon(*flags)
    try:
        yield daemon
    finally:
        daemon.end()


def check_drain(daemon: LoggedDaemon, then: Any = None) -> None:
    """A stream that begins before a drain arrives whole, and the daemon ends with status 0."""
    found: list[list[dict[str, Any]]] = []
    reached = threading.Event()
    client = threading.Thread(target=lambda: found.append(daemon.stream(reached)))
    client.start()
    assert reached.wait(30)
    if then is not None:
        then()
    daemon.process.send_signal(signal.SIGTERM)
    client.join()
    assert daemon.process.wait(15) == 0
    assert whole(found[0])


def whole(events: list[dict[str, Any]]) -> bool:
    return bool(events[-1]["choices"][0]["finish_reason"] == "length")


def test_a_reader_that_ends_in_a_stream_changes_nothing() -> None:
    with logged_daemon("--log-format", "json") as daemon:
        daemon.wait_ready()
        reached = threading.Event()
        found: list[list[dict[str, Any]]] = []
        client = threading.Thread(target=lambda: found.append(daemon.stream(reached)))
        client.start()
        assert reached.wait(30)
        daemon.close_log()
        daemon.kill_worker()
        client.join()
        assert whole(found[0])
        check_drain(daemon)


def test_a_reader_that_ends_in_a_drain_changes_nothing() -> None:
    with logged_daemon() as daemon:
        daemon.wait_ready()
        check_drain(daemon, daemon.close_log)


def test_a_reader_of_one_line() -> None:
    """As `tokend serve | head -1`."""
    with logged_daemon() as daemon:
        daemon.read_until("\n")
        daemon.close_log()
        daemon.wait_ready_without_log()
        check_drain(daemon)


def test_a_reader_that_does_not_read_costs_lines_only() -> None:
    with logged_daemon() as daemon:
        daemon.wait_ready()
        other = os.open(f"/proc/self/fd/{daemon.log}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while os.write(other, b"x"):
                pass
        os.close(other)
        daemon.kill_worker()
        assert whole(daemon.stream())
        check_drain(daemon, lambda: os.read(daemon.log, 2 * PIPE_BYTES))
        daemon.read_until(r"tokend: \d+ lines? of the log could not be written")
