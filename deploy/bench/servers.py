"""Servers to measure: running ones, and ones that a command starts.

NAME=http://127.0.0.1:8000                   a running server
NAME=llama-server -m x.gguf --port {port}    a command; {port} is replaced by a free port
"""

import argparse
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import httpx

from deploy.bench.client import base_url, is_up
from deploy.bench.options import add_values, positive
from proto.errors import ConfigError, TokendError

END_SECONDS: Final = 30.0


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals after the block.

    The exception of a handler could otherwise come between the start of a process and the place
    that ends it, or into the finalizer of an object, where Python prints and drops it.
    """
    pending: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received in pending:
            signal.raise_signal(received)


class OwnedProcess:
    """A process that ends with the `with` block: by SIGTERM, by SIGKILL after 30 s."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


PORT: Final = "{port}"
_KEPT_LINES: Final = 10_000
_SHOWN_LINES: Final = 20
_POLL_SECONDS: Final = 0.01
_HEALTH_SECONDS: Final = 5.0
"""Timeout of a health check; a server may accept connections before it answers them."""


@dataclass(frozen=True)
class PrintedLine:
    """A line that a server has printed. seconds: since its start."""

    seconds: float
    text: str


@dataclass(frozen=True)
class ServerSpec:
    """A server. url: of a running one, otherwise "". command: starts it, with {port} in it."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()
    ready_path: str = "/health"
    start_seconds: float = 600.0

    @classmethod
    def parse(cls, text: str, ready_path: str, start_seconds: float) -> "ServerSpec":
        """Parse NAME=URL or NAME=COMMAND; raises ConfigError."""
        name, found, rest = text.partition("=")
        if not found or not name or not rest.strip():
            raise ConfigError(f"--server {text}: NAME=URL or NAME='COMMAND ... {PORT} ...'")
        if rest.startswith(("http://", "https://")):
            return cls(name, base_url(rest), (), ready_path, start_seconds)
        try:
            command = tuple(shlex.split(rest))
        except ValueError as error:
            raise ConfigError(f"--server {name}: {error}") from None
        if not any(PORT in word for word in command):
            raise ConfigError(f"--server {name}: the command has no {PORT} in it")
        return cls(name, "", command, ready_path, start_seconds)


def add_servers(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add the flags of `given_servers`. metavar, text: help of --server."""
    parser.add_argument("--server", action="append", default=[], metavar=metavar, help=text)
    parser.add_argument(
        "--ready-path",
        default="/health",
        help="path that answers 200 when the server is ready (/health)",
    )
    add_values(parser, ("--start-seconds", positive, 600.0, "limit of a start"))


def given_servers(options: argparse.Namespace) -> list[ServerSpec]:
    """Return the servers of --server; raises ConfigError."""
    return [
        ServerSpec.parse(text, options.ready_path, options.start_seconds) for text in options.server
    ]


def tokend(name: str, flags: Sequence[str], start_seconds: float = 600.0) -> ServerSpec:
    """Return the daemon of this installation. flags: of `tokend serve`."""
    program = str(Path(sys.executable).with_name("tokend"))
    words = (program, "serve", "--port", PORT, "--disable-log-requests", *flags)
    return ServerSpec(name, command=words, start_seconds=start_seconds)


class StartedServer(OwnedProcess):
    """A server started by a command; ready when the constructor returns. Raises TokendError.

    variables: added to the environment.
    started_at: seconds of the performance counter. seconds_to_ready: from then until it answers.
    lines: the last lines that it has printed.
    """

    def __init__(
        self, spec: ServerSpec, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        port = _free_port()
        words = [word.replace(PORT, str(port)) for word in spec.command]
        self.url = f"http://127.0.0.1:{port}"
        self.lines: deque[PrintedLine] = deque(maxlen=_KEPT_LINES)
        self.started_at = time.perf_counter()
        self._reader = threading.Thread(target=self._read, daemon=True)
        with ExitStack() as stack:
            with signals_deferred():
                super().__init__(_start(spec.name, words, variables))
                self._reader.start()
                stack.push(self)
            self._wait_until_up(spec)
            stack.pop_all()  # it runs on, until the caller ends it
        self.seconds_to_ready = time.perf_counter() - self.started_at

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *how: object) -> None:
        super().__exit__(*how)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its children
        self._reader.join()

    def _wait_until_up(self, spec: ServerSpec) -> None:
        while True:
            with signals_deferred():
                if is_up(self.url + spec.ready_path, _HEALTH_SECONDS):
                    return
            seconds = time.perf_counter() - self.started_at
            if self._process.poll() is not None:
                self._reader.join()
                raise self._failure(f"{spec.name} did not start")
            if seconds > spec.start_seconds:
                raise self._failure(f"{spec.name} is not ready after {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _failure(self, what: str) -> TokendError:
        last = [line.text for line in list(self.lines)[-_SHOWN_LINES:]]
        return TokendError(f"{what}:\n" + "\n".join(last))

    def _read(self) -> None:
        """Read the output all the time: a full pipe would block the server."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            seconds = time.perf_counter() - self.started_at
            self.lines.append(PrintedLine(seconds, line.decode(errors="replace").rstrip()))
            self._note_line(self.lines[-1].text)

    def _note_line(self, text: str) -> None:
        """Note a line that the server has just printed."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answers. pid: 0 if it ran before. seconds_to_ready: then NaN."""

    url: str
    pid: int = 0
    seconds_to_ready: float = math.nan


@contextmanager
def running(spec: ServerSpec) -> Iterator[RunningServer]:
    """Yield a server, which is started and stopped if it does not run already."""
    if spec.url:
        yield RunningServer(spec.url)
        return
    with StartedServer(spec) as server:
        yield RunningServer(server.url, server.pid, server.seconds_to_ready)


def _start(
    name: str, words: Sequence[str], variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            process_group=0,
        )
    except OSError as error:
        raise ConfigError(f"--server {name}: {words[0]}: {error.strerror}") from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


_READY: Final = re.compile(r"ready.* (https?://\S+)")
_ANSWER_SECONDS: Final = 30.0


class MeasuredDaemon(StartedServer):
    """A daemon of this installation on a free port; ready when the constructor returns.

    flags: of `tokend serve`. command: replaces `tokend serve`.
    url: that of its ready line. pid: of its supervisor.
    """

    def __init__(
        self,
        flags: Sequence[str],
        command: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._ready_or_ended = threading.Event()
        serve = (str(Path(sys.executable).with_name("tokend")), "serve")
        words = (*(command or serve), "--port", "0", *flags, "--disable-log-requests")
        super().__init__(ServerSpec("the daemon", command=words), variables)

    def metric(self, name: str) -> float:
        """Return the sum over the samples of a metric; 0 if there are none."""
        return metrics_of(self.url, name)[0]

    def num_steps(self) -> float:
        return self.metric("vllm:iteration_tokens_total_count")

    def _wait_until_up(self, spec: ServerSpec) -> None:
        self._ready_or_ended.wait()
        ready = next(filter(None, (_READY.search(line.text) for line in list(self.lines))), None)
        if ready is None:
            raise self._failure(f"{spec.name} did not start")
        self.url = ready[1]

    def _note_line(self, text: str) -> None:
        if _READY.search(text):
            self._ready_or_ended.set()

    def _read(self) -> None:
        super()._read()
        self._ready_or_ended.set()


def metrics_of(url: str, *names: str) -> list[float]:
    """Return the sum over the samples of each metric of a server; 0 if there are none."""
    text = httpx.get(f"{url}/metrics", timeout=_ANSWER_SECONDS).text
    found = (
        re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names
    )
    return [sum(map(float, samples)) for samples in found]
