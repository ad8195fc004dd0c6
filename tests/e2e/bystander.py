"""Another client of a daemon under attack: its longest waits, and the memory of the daemon.

    with Bystander(daemon) as bystander:
        …                    # the attack
        bystander.rest()     # what it set in motion may go on for a moment
    bystander.check()

The client is a process of its own, so that the load of the test's process does not delay it:

    python -m tests.e2e.bystander 8000 4711        port, process id of the supervisor

It asks for /health/live every 20 ms on one connection, and reads one streamed answer after another
on a second one, until its standard input ends. Then it prints the figures as JSON.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.e2e.daemon import Daemon

MAX_WAIT_SECONDS = 0.5
MAX_GROWTH_MIB = 200.0
"""Of all processes of the daemon together."""
HEALTH_SECONDS = 0.02
MEMORY_SECONDS = 0.1
STREAM_TOKENS = 400


@dataclass
class Figures:
    """health, gap: longest wait in seconds for /health/live, and for a part of a stream.

    growth: MiB of memory above that at the start. health_checks, stream_parts: how many there were.
    errors: requests that failed.
    """

    health: float = 0.0
    gap: float = 0.0
    growth: float = 0.0
    health_checks: int = 0
    stream_parts: int = 0
    errors: int = 0
    last_error: str = ""


class Bystander:
    """The client of a daemon, from the start of a block to its end.

    gaps: whether streams are checked, too; an attack that may rightly take the engine's time, such
    as long prompts, leaves them out.
    """

    def __init__(self, daemon: Daemon, *, gaps: bool = True) -> None:
        self._daemon = daemon
        self._gaps = gaps
        self.figures = Figures()

    def __enter__(self) -> "Bystander":
        port = self._daemon.url.rpartition(":")[2]
        self._processes = self._daemon.process_ids()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.bystander", port, str(self._daemon.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "started\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        output, _ = self._process.communicate(timeout=60)
        self.figures = Figures(**json.loads(output))

    def rest(self, seconds: float = 1.0) -> None:
        time.sleep(seconds)

    def check(self) -> None:
        """Fail if the client waited too long, memory grew too much or a process has ended."""
        found = self.figures
        assert self._daemon.process_ids() == self._processes, self._daemon.text
        assert not found.errors, found
        assert found.health_checks > 10, found
        assert found.stream_parts > 10 or not self._gaps, found
        assert found.health < MAX_WAIT_SECONDS, found
        assert found.gap < MAX_WAIT_SECONDS or not self._gaps, found
        assert found.growth < MAX_GROWTH_MIB, found


class Client:
    """The threads of the client's process."""

    def __init__(self, port: int, supervisor: int) -> None:
        self._port = port
        self._supervisor = psutil.Process(supervisor)
        self._ended = threading.Event()
        self.figures = Figures()

    def run(self) -> Figures:
        """Measure until standard input ends."""
        self._stream_once(8)  # warm: what a first request loads counts for the client
        started = self.memory()
        self._check_health(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60))
        self.figures = Figures()
        jobs = (self._check_healths, self._read_streams, lambda: self._watch_memory(started))
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        print("started", flush=True)
        sys.stdin.read()
        self._ended.set()
        for thread in threads:
            thread.join()
        return self.figures

    def memory(self) -> float:
        """MiB that the daemon's processes hold; pages that they share after a fork count once.

        Mapped files, such as weights, do not count: they can be dropped.
        """
        total = 0
        for process in [self._supervisor, *self._supervisor.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        total += int(line.split()[1])
        assert total, "the memory of the daemon cannot be read"
        return total / 1024

    def _watch_memory(self, started: float) -> None:
        while not self._ended.wait(MEMORY_SECONDS):
            self.figures.growth = max(self.figures.growth, self.memory() - started)

    def _check_healths(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._ended.wait(HEALTH_SECONDS):
            self._check_health(connection)
        connection.close()

    def _check_health(self, connection: http.client.HTTPConnection) -> None:
        asked = time.monotonic()
        try:
            connection.request("GET", "/health/live")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise http.client.HTTPException(f"health: {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            self._add_error(error)
            connection.close()
        self.figures.health = max(self.figures.health, time.monotonic() - asked)
        self.figures.health_checks += 1

    def _read_streams(self) -> None:
        while not self._ended.is_set():
            try:
                self._stream_once(STREAM_TOKENS)
            except (OSError, http.client.HTTPException) as error:
                self._add_error(error)
                time.sleep(0.1)

    def _stream_once(self, tokens: int) -> None:
        """Read a stream; its first part is waited for like any other."""
        body = {
            **{"prompt": "Once upon a time", "max_tokens": tokens, "stream": True},
            **{"temperature": 0, "ignore_eos": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        last = time.monotonic()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"stream: {answer.status} {answer.read(500)!r}")
        while not self._ended.is_set() and answer.readline():
            now = time.monotonic()
            self.figures.gap = max(self.figures.gap, now - last)
            self.figures.stream_parts += 1
            last = now
        connection.close()

    def _add_error(self, error: Exception) -> None:
        self.figures.errors += 1
        self.figures.last_error = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps(vars(Client(int(sys.argv[1]), int(sys.argv[2])).run())))
