"""Programs that play the workloads of a scheduler: ours, and a peer's beside it.

A program lives for the whole benchmark, so that what it imports is paid for once,
and sleeps while the other one measures.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.loadtest.program import Program
from proto.benchmark import SchedulerTimings, SchedulerWorkload
from proto.codec import from_json, to_json_line
from proto.errors import TokendError

PEER_PROGRAM = Path(__file__).parent / "peers" / "vllm_scheduler.py"


def our_command() -> list[str]:
    """The scheduler that the daemon wires."""
    return [sys.executable, "-P", "-m", "engine_core.bench"]


def peer_command(python: str) -> list[str]:
    """vLLM's own scheduler, in the environment of this interpreter."""
    return [python, str(PEER_PROGRAM)]


class Player(Program):
    """A program that answers a workload with its timings, a line each."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises TokendError when there is no such program."""
        self._command = command
        try:
            pipe = subprocess.PIPE
            super().__init__(subprocess.Popen(command, stdin=pipe, stdout=pipe))
        except OSError as error:
            raise TokendError(f"{command[0]}: {error.strerror}") from None

    def play(self, workload: SchedulerWorkload) -> SchedulerTimings:
        """Measure one workload; raises TokendError when the program fails."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(to_json_line(workload))
            stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = stdout.readline()
        if not line:
            raise TokendError(f"{' '.join(self._command)} ended while it measured {workload.name}")
        return from_json(line, SchedulerTimings)
