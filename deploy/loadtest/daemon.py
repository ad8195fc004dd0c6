"""A daemon of this machine's tokend, started for a measurement and ended after it."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx

from deploy.loadtest.program import Program
from proto.errors import TokendError

_KEPT_LINES: Final = 10_000
_READY: Final = re.compile(r"ready.* (https?://\S+)")
_ANSWER_SECONDS: Final = 30.0


class MeasuredDaemon(Program):
    """A daemon on a free port; ready when the constructor returns.

    command: the words of `tokend` that start it. variables: environment beside ours.
    seconds_to_ready: from the command to the ready line. lines: the last that it printed.
    """

    def __init__(
        self,
        flags: Sequence[str],
        command: Sequence[str] = ("serve",),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        started = time.monotonic()
        words = [str(Path(sys.executable).with_name("tokend")), *command, "--port", "0", *flags]
        super().__init__(
            subprocess.Popen(
                [*words, "--disable-log-requests"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
            )
        )
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
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
