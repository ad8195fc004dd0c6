"""A daemon to be measured: started here, found in /proc."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from proto.errors import ProcessDiedError

_READY: Final = re.compile(r"is ready: .* at (http://\S+)")
_TITLE: Final = re.compile(r"tokend: (\w+ \d+)")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STOP_SECONDS: Final = 10.0


class MeasuredDaemon:
    """`tokend serve` on a free port. `seconds_to_ready` is wall time from its start."""

    def __init__(self, flags: Sequence[str]) -> None:
        started = time.monotonic()
        command = [sys.executable, "-P", "-m", "deploy.cli", "serve", "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--disable-log-requests", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self._wait_ready()
        self.seconds_to_ready = time.monotonic() - started

    def stop(self) -> None:
        """End it as Ctrl-C would, by force if it does not listen."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def processes(self) -> dict[str, int]:
        """Process id by name: "worker 0", "engine 0", "api 0", and "supervisor"."""
        found = {"supervisor": self._process.pid}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in children.read_text().split():
            title = _TITLE.match(Path(f"/proc/{pid}/cmdline").read_text())
            if title is not None:
                found[title[1]] = int(pid)
        return found

    def _wait_ready(self) -> str:
        assert self._process.stdout is not None, "the pipe was asked for"
        for line in self._process.stdout:
            found = _READY.search(line)
            if found:
                return found[1]
        raise ProcessDiedError(f"the daemon ended with status {self._process.wait()}")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    # the name, in parentheses, may hold spaces; user and system time are fields 14 and 15
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
