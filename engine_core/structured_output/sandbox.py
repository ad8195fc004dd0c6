"""Compiles each grammar in a separate process first, because compiling may crash or hang.

    engine    SandboxSetup   GrammarSource   GrammarSource …
    sandbox   "ready"        ""              "the grammar cannot be used: …"

A short grammar can make the compiler recurse until the stack is full, or work for hours, and a
thread cannot be stopped from outside. Here an alarm ends the sandbox process, and the engine goes
on. `GrammarSandbox` is the engine's side; `main` runs in the process, which ends when its standard
input is closed.
"""

import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import GrammarError
from proto.codec import MessageDecoder, encode
from proto.errors import ModelError
from proto.grammar import GrammarSource
from proto.process import set_title

MODULE: Final = "engine_core.structured_output.sandbox"
COMPILE_SECONDS: Final = 2
"""Time limit of one grammar in the sandbox; the engine then needs about the same time."""
MAX_MEMORY: Final = 2 << 30
"""Bytes of address space of the sandbox, most of which it never touches."""
_READY: Final = b"ready"
_LENGTH: Final = struct.Struct("<I")


class SandboxSetup(msgspec.Struct, array_like=True, frozen=True):
    """What a sandbox process needs to start. seconds: time limit of one grammar.

    tokenizer_json: path.
    """

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seconds: int


class GrammarSandbox:
    """Compiles grammars in a process, which starts with the first one and after each crash.

    Not thread-safe.
    """

    def __init__(self, setup: SandboxSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: GrammarSource) -> None:
        """Compile a grammar within a few seconds.

        Raises GrammarError if that fails or takes too much time or memory, ModelError if the
        process does not start.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write_frame(process.stdin, encode(source))
            error = _read_frame(process.stdout)
        except (EOFError, OSError):
            self.close()
            raise GrammarError(
                "the grammar cannot be used: it takes too much time or memory to compile"
            ) from None
        if error:
            raise GrammarError(error.decode())

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
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
            _write_frame(process.stdin, encode(self._setup))
            ready = _read_frame(process.stdout) == _READY
        except (EOFError, OSError):
            ready = False
        if not ready:
            self.close()
            raise ModelError("the sandbox for grammars does not start")
        return process


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
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
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
        signal.alarm(setup.seconds)
        _write_frame(stdout, _compile_error(backend, source))
        signal.alarm(0)


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
