"""The engine's side of `trial_process`: asks whether a grammar is harmless.

Owns the process, which begins with the first grammar and again after each that was its end.
"""

import subprocess
import sys
from typing import Final, Protocol

from engine_core.structured_output.base import GrammarError
from engine_core.structured_output.trial_process import (
    READY,
    TrialSetup,
    read_frame,
    write_frame,
)
from proto.codec import encode
from proto.errors import ModelError
from proto.grammar import GrammarSource

MODULE: Final = "engine_core.structured_output.trial_process"
TRIAL_SECONDS: Final = 2
"""What passes takes about as long again in the engine."""


class Trial(Protocol):
    """Whether a grammar can be compiled where its end would be everybody's."""

    def check(self, source: GrammarSource) -> None:
        """Takes a few seconds at most. Raises GrammarError, or ModelError without any trial."""
        ...

    def close(self) -> None:
        """No more of it."""
        ...


class ProcessTrial:
    """Tries grammars in a process of its own; one thread's."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        self._process: list[subprocess.Popen[bytes]] = []  # one, or none

    def check(self, source: GrammarSource) -> None:
        process = self._process[0] if self._process else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, encode(source))
            error = read_frame(process.stdout)
        except (EOFError, OSError):
            self.close()
            raise GrammarError(
                "the grammar cannot be used: it takes too much time or memory to compile"
            ) from None
        if error:
            raise GrammarError(error.decode())

    def close(self) -> None:
        for process in self._process:
            process.kill()
            process.communicate()
        self._process.clear()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, encode(self._setup))
            ready = read_frame(process.stdout) == READY
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise ModelError("the process that tries grammars does not start")
        return process
