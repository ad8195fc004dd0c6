"""Servers to measure: those that run already, and those that a command starts.

NAME=http://127.0.0.1:8000            runs already
NAME=llama-server -m x.gguf --port {port}
                                      started; {port} is a free one of this machine
"""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import httpx

from deploy.bench.client import base_url, is_up
from proto.errors import ConfigError, TokendError

# A program that runs for as long as a measurement needs it.


END_SECONDS: Final = 30.0


class Program:
    """Ends with the `with` block: asked first, killed when that takes too long."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its own processes end with it
            self._process.wait()


PORT: Final = "{port}"
_KEPT_LINES: Final = 1_000
_SHOWN_LINES: Final = 20
_POLL_SECONDS: Final = 0.01
_ASKED_SECONDS: Final = 5.0
"""A server that takes connections before it can answer them is asked again after this time."""


@dataclass(frozen=True)
class Line:
    """What a server printed. seconds: since the command."""

    seconds: float
    text: str


@dataclass(frozen=True)
class ServerSpec:
    """url: of one that runs already, else empty. command: that starts it, with {port} in it."""

    name: str
    url: str = ""
    command: tuple[str, ...] = ()
    ready_path: str = "/health"
    start_seconds: float = 600.0

    @classmethod
    def parse(cls, text: str, ready_path: str, start_seconds: float) -> "ServerSpec":
        """NAME=URL or NAME=COMMAND; raises ConfigError."""
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


def tokend(name: str, flags: Sequence[str], start_seconds: float = 600.0) -> ServerSpec:
    """The daemon of this installation with these flags of `tokend serve`."""
    program = str(Path(sys.executable).with_name("tokend"))
    words = (program, "serve", "--port", PORT, "--disable-log-requests", *flags)
    return ServerSpec(name, command=words, start_seconds=start_seconds)


class StartedServer(Program):
    """Ready when the constructor returns; raises TokendError when it does not get so far.

    url: where it answers. begun: when the command was given, on the clock of the exchanges.
    seconds_to_ready: from then until it is up. lines: what it printed, the last of it.
    """

    def __init__(self, spec: ServerSpec) -> None:
        port = _free_port()
        words = [word.replace(PORT, str(port)) for word in spec.command]
        self.url = f"http://127.0.0.1:{port}"
        self.lines: deque[Line] = deque(maxlen=_KEPT_LINES)
        self.begun = time.perf_counter()
        super().__init__(_start(spec.name, words))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_until_up(spec)
        except BaseException:
            self.__exit__()
            raise
        self.seconds_to_ready = time.perf_counter() - self.begun

    @property
    def pid(self) -> int:
        """Of the command's process."""
        return self._process.pid

    def __exit__(self, *how: object) -> None:
        super().__exit__(*how)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever it has left behind
        self._reader.join()

    def _wait_until_up(self, spec: ServerSpec) -> None:
        while not is_up(self.url + spec.ready_path, _ASKED_SECONDS):
            seconds = time.perf_counter() - self.begun
            if self._process.poll() is not None:
                self._reader.join()
                raise TokendError(f"{spec.name} did not start:\n{self._last_lines()}")
            if seconds > spec.start_seconds:
                text = self._last_lines()
                raise TokendError(f"{spec.name} is not up after {seconds:.0f} s:\n{text}")
            time.sleep(_POLL_SECONDS)

    def _last_lines(self) -> str:
        return "\n".join(line.text for line in list(self.lines)[-_SHOWN_LINES:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            seconds = time.perf_counter() - self.begun
            self.lines.append(Line(seconds, line.decode(errors="replace").rstrip()))


@contextmanager
def running(spec: ServerSpec) -> Iterator[str]:
    """The URL of a server, which is started and ended if it does not run already."""
    if spec.url:
        yield spec.url
        return
    with StartedServer(spec) as server:
        yield server.url


def _start(name: str, words: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except OSError as error:
        raise ConfigError(f"--server {name}: {words[0]}: {error.strerror}") from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# A daemon of this machine's tokend, started for a measurement and ended after it.


_KEPT_LOG_LINES: Final = 10_000
_READY: Final = re.compile(r"ready.* (https?://\S+)")
_ANSWER_SECONDS: Final = 30.0


class MeasuredDaemon(Program):
    """A daemon on a free port; ready when the constructor returns.

    command: starts it, before its flags; `tokend serve` by default. variables: added to the
    environment.
    seconds_to_ready: from the command to the ready line. lines: the last that it printed.
    """

    def __init__(
        self,
        flags: Sequence[str],
        command: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        started = time.monotonic()
        serve = (str(Path(sys.executable).with_name("tokend")), "serve")
        words = [*(command or serve), "--port", "0", *flags]
        super().__init__(
            subprocess.Popen(
                [*words, "--disable-log-requests"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
            )
        )
        self.lines: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self.url = ""
        self._known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self._known.wait()
        if not self.url:
            raise TokendError("the daemon did not start:\n" + "\n".join(self.lines))
        self.seconds_to_ready = time.monotonic() - started

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    @property
    def text(self) -> str:
        """What it printed."""
        return "\n".join(self.lines)

    def metric(self, name: str) -> float:
        """Sum over the samples of a metric; 0 where there is none."""
        return metrics_of(self.url, name)[0]

    def num_steps(self) -> float:
        """Steps since the start."""
        return self.metric("vllm:iteration_tokens_total_count")

    def _read(self) -> None:
        """Whoever does not read what the daemon prints stops it, sooner or later."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            ready = None if self.url else _READY.search(self.lines[-1])
            if ready:
                self.url = ready.group(1)
                self._known.set()
        self._known.set()


def metrics_of(url: str, *names: str) -> list[float]:
    """Of any server, at one moment: sums over the samples of metrics; 0 where there is none."""
    text = httpx.get(f"{url}/metrics", timeout=_ANSWER_SECONDS).text
    found = (
        re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names
    )
    return [sum(map(float, each)) for each in found]
