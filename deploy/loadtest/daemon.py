"""A daemon of this machine's tokend, started for a measurement and ended after it."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from proto.errors import TokendError


class MeasuredDaemon:
    """`tokend serve` on a free port; ready when the constructor returns.

    seconds_to_ready: from the command to the ready line.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        started = time.monotonic()
        command = [str(Path(sys.executable).with_name("tokend")), "serve", "--port", "0", *flags]
        command.append("--disable-log-requests")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid
        self.url = self._wait_ready()
        self.seconds_to_ready = time.monotonic() - started

    def __enter__(self) -> "MeasuredDaemon":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)

    def num_steps(self) -> float:
        """Steps since the start."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(r"^vllm:iteration_tokens_total_count\S* (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def _wait_ready(self) -> str:
        assert self._process.stdout is not None
        printed = []
        for line in self._process.stdout:
            printed.append(line.decode(errors="replace"))
            ready = re.search(r"ready.* (http://\S+)", printed[-1])
            if ready:
                return ready.group(1)
        raise TokendError("the daemon did not start:\n" + "".join(printed))
