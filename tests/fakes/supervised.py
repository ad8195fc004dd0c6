"""Start the daemon of `fake_daemon.py`; wait for its output, its processes and its end."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

FAKE_DAEMON = Path(__file__).with_name("fake_daemon.py")
ROLES = ("worker", "engine_core", "api_server")
TITLES = {"worker": "worker 0", "engine_core": "engine 0", "api_server": "api 0"}
LIMIT_SECONDS = 30.0
ECHO_SECONDS = 0.1
"""Signals closer together than this may count as one."""


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class FakeDaemon:
    """A supervisor process. run_parent: parent folder of its run directory.

    It adopts orphans, as process 1 of a container does.
    """

    def __init__(self, run_parent: Path, *choices: str, **variables: str) -> None:
        self.run_parent = run_parent
        self._lines: list[str] = []
        self._printed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_DAEMON), str(run_parent), *choices],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_adopt_orphans,
            env=os.environ | variables,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self._lines.append(line)
                self._printed.notify_all()

    def wait_for(self, *texts: str) -> None:
        """Wait until all of these texts were printed."""
        with self._printed:
            done = self._printed.wait_for(
                lambda: all(each in self.text for each in texts), LIMIT_SECONDS
            )
        assert done, f"not printed: {texts}\n{self.text}"

    def wait_for_any(self, *texts: str) -> None:
        """Wait until one of these texts was printed."""
        with self._printed:
            done = self._printed.wait_for(
                lambda: any(each in self.text for each in texts), LIMIT_SECONDS
            )
        assert done, f"none was printed: {texts}\n{self.text}"

    def wait_ready(self) -> str:
        """Wait for the ready line; return its URL."""
        self.wait_for("is ready: ")
        found = re.search(r"is ready: .* (http://\S+)", self.text)
        assert found is not None
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """Return the first process of each role, as `titled` does."""
        found = self.titled(*TITLES.values())
        return {role: found[title] for role, title in TITLES.items()}

    def titled(self, *titles: str) -> dict[str, psutil.Process]:
        """Return processes by title; wait until all have set it and their signal handlers."""

        def named() -> dict[str, psutil.Process]:
            found = {}
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended
                    title = " ".join(child.cmdline()).strip().removeprefix("tokend: ")
                    if title in titles and _catches(child.pid, signal.SIGUSR2):
                        found[title] = child
            return found

        assert eventually(lambda: len(named()) == len(titles))
        return named()

    def wait_exit(self) -> int:
        status = self.process.wait(LIMIT_SECONDS)
        self._reader.join(LIMIT_SECONDS)
        return status

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Start = Callable[..., FakeDaemon]

_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36


def _adopt_orphans() -> None:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def assert_nothing_left(daemon: FakeDaemon, children: dict[str, psutil.Process]) -> None:
    for role, child in children.items():
        assert eventually(lambda c=child: not c.is_running()), f"{role} still runs"
    assert eventually(lambda: list(daemon.run_parent.iterdir()) == [])


def pids_except(role: str, children: dict[str, psutil.Process]) -> dict[str, int]:
    return {each: child.pid for each, child in children.items() if each != role}
