"""Servers to measure: those that run already, and those that a command starts.

NAME=http://127.0.0.1:8000            runs already
NAME=llama-server -m x.gguf --port {port}
                                      started; {port} is a free one of this machine
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.loadtest.openai.client import base_url
from deploy.loadtest.openai.questions import is_up
from deploy.loadtest.program import Program
from proto.errors import ConfigError, TokendError

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
