"""A real daemon for the end-to-end tests: real processes, sockets and model."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import httpx
import psutil

_INSTALLED = Path(sys.executable).parent / "tokend"
TOKEND = (str(_INSTALLED),) if _INSTALLED.exists() else (sys.executable, "-P", "-m", "deploy.cli")
"""The command; where the package is not installed, its modules are on PYTHONPATH."""
SETTLE_SECONDS = 5.0
"""How long requests and copies of a test may take to end before its daemon is reset."""
READY_LIMIT_SECONDS = 240.0
"""Generous: the first start of a fresh machine fetches and prepares the model."""
REQUEST_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
ROLES = {"api_server": "api", "engine_core": "engine", "worker": "worker"}


def _flags_for_all() -> list[str]:
    return os.environ.get("TOKEND_TEST_FLAGS", "").split()


class Daemon:
    """`tokend serve` with a run directory of its own, on a free port.

    Flags of the variable TOKEND_TEST_FLAGS come first, to run the same tests with other settings.
    environment: variables in addition to those of the tests.
    """

    def __init__(self, *flags: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._runtime = tempfile.TemporaryDirectory(prefix="tk")
        self.runtime_dir = Path(self._runtime.name)
        self.output: list[str] = []
        self._port = 0
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [*TOKEND, "serve", "--port", "0", *_flags_for_all(), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": str(self.runtime_dir),
                "COLUMNS": "200",
                **environment,
            },
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Daemon":
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    def wait_ready(self) -> None:
        """Wait for the ready line; a failure shows all output of the daemon."""
        deadline = time.monotonic() + READY_LIMIT_SECONDS
        with self._changed:
            while not self._port:
                assert self.process.poll() is None, f"daemon ended:\n{self.text}"
                assert time.monotonic() < deadline, f"not ready in time:\n{self.text}"
                self._changed.wait(0.2)

    def processes(self) -> dict[str, psutil.Process]:
        """Children of the supervisor by role; an engine's grammar compilers are not among them."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have just ended
                title = " ".join(child.cmdline())
                for role, word in ROLES.items():
                    if f"tokend: {word} " in title or f"-m {role}" in title:
                        found[role] = child
        return found

    def process_ids(self) -> set[int]:
        """Process ids of front ends, engines and workers."""
        return {child.pid for child in psutil.Process(self.pid).children()}

    def stop(self) -> None:
        """End the daemon gracefully and wait for it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.wait_exit()
        self._runtime.cleanup()

    def wait_exit(self, timeout: float = 15.0) -> int:
        """Wait for the exit status; all output is in `text` afterwards."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(self.process.pid).children(recursive=True)]:
                process.kill()
            self.process.kill()
            raise AssertionError(f"daemon did not end in {timeout} s:\n{self.text}") from None
        self._reader.join(5.0)
        return status

    def metric(self, name: str) -> float:
        """Sum of the samples of a metric."""
        return metric_value(httpx.get(f"{self.url}/metrics").text, name)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line.rstrip("\n"))
                ready = re.search(r"ready.*https?://127\.0\.0\.1:(\d+)", line, re.IGNORECASE)
                if ready:
                    self._port = int(ready.group(1))
                self._changed.notify_all()


class DaemonPool:
    """Running daemons that tests share by their flags.

    A daemon is reset after every use. A test that leaves a request, a pause, a referenced block or
    a restarted process fails, and the next test starts a new daemon. At most `max_idle` daemons
    stay up unused; the least recently used one is ended.
    """

    def __init__(self, max_idle: int = 2) -> None:
        self._max_idle = max_idle
        self._idle: dict[tuple[str, ...], Daemon] = {}

    @contextlib.contextmanager
    def borrow(self, *flags: str) -> Iterator[Daemon]:
        """Lend a daemon with these flags and an empty prefix cache to the block."""
        daemon = self._idle.pop(flags, None)
        if daemon is None:
            self._stop_down_to(self._max_idle - 1)
            daemon = Daemon(*flags)
            daemon.wait_ready()
        before = daemon.process_ids()
        try:
            yield daemon
            reset(daemon)
            assert daemon.process_ids() == before, f"a process was restarted:\n{daemon.text}"
        except BaseException:
            daemon.stop()
            raise
        self._idle[flags] = daemon

    def stop_all(self) -> None:
        self._stop_down_to(0)

    def _stop_down_to(self, number: int) -> None:
        while len(self._idle) > number:
            self._idle.pop(next(iter(self._idle))).stop()


def reset(daemon: Daemon) -> None:
    """Empty the prefix cache of an idle daemon; fails if a test left requests, pauses or blocks."""
    assert eventually(lambda: not any(map(daemon.metric, REQUEST_GAUGES)), SETTLE_SECONDS), (
        f"requests are left: {[(name, daemon.metric(name)) for name in REQUEST_GAUGES]}"
    )
    with httpx.Client(base_url=daemon.url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/is_paused").json() == {"is_paused": False}, "a pause is left"
        # 409 while a KV connector still copies
        cleared = {"reset_external": "true"}
        assert eventually(
            lambda: client.post("/reset_prefix_cache", params=cleared).status_code == 200,
            SETTLE_SECONDS,
        ), "the prefix cache cannot be emptied: blocks are still referenced"
    assert daemon.metric("vllm:kv_cache_usage_perc") == 0, "blocks are left"


def metric_value(exposition: str, name: str) -> float:
    """Sum of the samples of one metric in a Prometheus text exposition."""
    samples = list(_samples(exposition, name))
    assert samples, f"no metric {name}"
    return sum(samples)


def _samples(exposition: str, name: str) -> Iterator[float]:
    for line in exposition.splitlines():
        if line.startswith((name + "{", name + " ")):
            yield float(line.rsplit(" ", 1)[1])


def eventually(condition: object, seconds: float = 10.0) -> bool:
    """Poll a callable until it returns true; return False if it does not within `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
