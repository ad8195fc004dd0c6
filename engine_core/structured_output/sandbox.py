"""Compiles each grammar in a separate process first, because compiling may crash or hang.

    engine    SandboxSetup   GrammarSource   GrammarSource …
    sandbox   "ready"        ""              "the grammar cannot be used: …"

A short grammar can make the compiler recurse until the stack is full, or work for hours, and a
thread cannot be stopped from outside. A timer of the processor time it uses ends the sandbox
process, so a grammar that is refused on a busy host is refused on an idle one too; a process that
makes no progress at all is killed by the engine. `GrammarSandbox` is the engine's side; `main` runs
in the process, which ends when its standard input is closed.
"""

import contextlib
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import GrammarError, UndecidedGrammarError
from proto.codec import MessageDecoder, encode
from proto.errors import ModelError
from proto.grammar import GrammarSource
from proto.process import set_title

MODULE: Final = "engine_core.structured_output.sandbox"
COMPILE_SECONDS: Final = 2
"""Processor time of one grammar in the sandbox; the engine then needs about the same time."""
HANG_SECONDS: Final = 10
"""Time after which a sandbox process that has not answered is killed."""
START_SECONDS: Final = 60
"""Time after which a sandbox process that has not started is killed."""
MAX_MEMORY: Final = 2 << 30
"""Bytes of address space of the sandbox, most of which it never touches."""
_READY: Final = b"ready"
_LENGTH: Final = struct.Struct("<I")


class SandboxSetup(msgspec.Struct, array_like=True, frozen=True):
    """What a sandbox process needs to start.

    tokenizer_json: path. seconds: processor time of one grammar. hang_seconds: time without an
    answer after which the process is killed.
    """

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seconds: int
    hang_seconds: float = HANG_SECONDS


class GrammarSandbox:
    """Compiles grammars in a process, which starts with the first one and after each death.

    Not thread-safe.
    """

    def __init__(self, setup: SandboxSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a grammar can be compiled without starting a process first."""
        return self._process is not None and self._process.poll() is None

    def check(self, source: GrammarSource) -> None:
        """Compile a grammar within a few seconds.

        Raises GrammarError if that fails or takes too much time or memory, UndecidedGrammarError if
        the process was killed, ModelError if it does not start.
        """
        if not self.is_running:
            self.close()  # it died while it was idle: no grammar's fault
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with _killed_after(process, self._setup.hang_seconds):
                _write_frame(process.stdin, encode(source))
                error = _read_frame(process.stdout)
        except (EOFError, OSError):
            self.close()
            raise self._death_error(process.returncode) from None
        if error:
            raise GrammarError(error.decode())

    def _death_error(self, returncode: int) -> GrammarError:
        """Return what the client is told about a process that died with its grammar."""
        if returncode == -signal.SIGPROF:
            limit = f"{self._setup.seconds} second{'s' if self._setup.seconds > 1 else ''}"
            return GrammarError(
                f"the grammar cannot be used: compiling it takes more than the limit of {limit}"
            )
        if returncode == -signal.SIGKILL:
            return UndecidedGrammarError(
                "the grammar was not compiled: the process that compiled it hung or was killed"
            )
        return GrammarError("the grammar cannot be used: compiling it takes too much memory")

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()  # does nothing to one that is dead
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with _killed_after(process, START_SECONDS):
                _write_frame(process.stdin, encode(self._setup))
                ready = _read_frame(process.stdout) == _READY
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise ModelError("the sandbox for grammars does not start")
        return process


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill a process if the body takes longer, which ends what the body reads and writes."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write the length of a frame, then the frame."""
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def _read_frame(stream: IO[bytes]) -> bytes:
    """Read the next frame; raises EOFError if the stream ends before its end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    frame = stream.read(length)
    if len(frame) < length:
        raise EOFError
    return frame


def main() -> None:
    """Compile grammars from standard input, one after the other."""
    set_title("tokend grammar sandbox")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = MessageDecoder[SandboxSetup](SandboxSetup).decode(_read_frame(stdin))
    backend = LLGuidanceBackend(Path(setup.tokenizer_json), setup.vocab_size, setup.eos_token_ids)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    decoder: MessageDecoder[GrammarSource] = MessageDecoder(GrammarSource)
    _write_frame(stdout, _READY)
    while True:
        try:
            source = decoder.decode(_read_frame(stdin))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, setup.seconds)
        _write_frame(stdout, _compile_error(backend, source))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compile_error(backend: LLGuidanceBackend, source: GrammarSource) -> bytes:
    """Return why a grammar cannot be compiled; empty if it can."""
    try:
        found = backend.explore(backend.compile(source))
    except GrammarError as error:
        found = error.message
    except Exception as error:
        found = f"the grammar cannot be used: {type(error).__name__}"
    return found.encode(errors="backslashreplace")


if __name__ == "__main__":
    main()
