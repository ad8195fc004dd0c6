"""A program that is given workloads and answers each with its timings: JSON, a line each.

It lives for the whole benchmark, so that what it imports and loads is paid for once, and sleeps
while others measure. Owns the process and the lines; what is measured is in the messages.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from deploy.bench.servers import BenchProcess
from deploy.environment import HostEnvironment
from deploy.supervisor.processes import child_environment
from proto.codec import Message, from_json, to_json_line
from proto.config import DeviceConfig
from proto.errors import TokendError

ROOT = Path(__file__).resolve().parents[2]
Answer = TypeVar("Answer", bound=Message)


class LineProgram(BenchProcess):
    """command: its words. environment: all of its variables; None for ours.

    Raises TokendError when there is no such program.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        pipe = subprocess.PIPE
        try:
            super().__init__(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=ROOT)
            )
        except OSError as error:
            raise TokendError(f"{command[0]}: {error.strerror}") from None

    def play(self, workload: Message, answer: type[Answer], what: str) -> Answer:
        """Measure one workload; raises TokendError, naming `what`, when the program fails."""
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
            raise TokendError(f"{' '.join(self._command)} ended while it measured {what}")
        return from_json(line, answer)


def worker_program(module: str, device: DeviceConfig, around: HostEnvironment) -> LineProgram:
    """A module of the worker by itself, with the threads that the daemon would give it."""
    environment = child_environment(around.variables, "worker", device)
    return LineProgram((sys.executable, "-m", module), environment)
