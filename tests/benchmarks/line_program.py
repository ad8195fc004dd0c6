"""A program that reads workloads and prints their timings, one JSON line each.

It runs for the whole benchmark, so that imports and models are loaded once, and idles while other
programs measure.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from deploy.bench.servers import OwnedProcess
from deploy.environment import HostEnvironment
from deploy.supervisor.processes import child_environment
from proto.codec import Message, from_json, to_json_line
from proto.errors import TokendError
from proto.settings.config import DeviceConfig

ROOT = Path(__file__).resolve().parents[2]
Answer = TypeVar("Answer", bound=Message)


class LineProgram(OwnedProcess):
    """The process of such a program.

    environment: all of its variables; None inherits ours. Raises TokendError if the program does
    not exist.
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
        """Measure one workload; raise TokendError, naming `what`, if the program fails."""
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
    """Start a module with the environment and threads of a worker."""
    environment = child_environment(around.variables, "worker", device)
    return LineProgram((sys.executable, "-m", module), environment)
