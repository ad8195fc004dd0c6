"""A process in which grammars are tried, because they may be the end of it.

    stdin    TrialSetup   GrammarSource   GrammarSource …
    stdout   "ready"      ""              "the grammar cannot be used: …"

A few words are enough to have a compiler recurse until its stack is full, or work for hours, and
no thread can be stopped from outside. Here an alarm ends the process, and nobody else with it.
Ends itself with its input. Knows nothing of requests.
"""

import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from engine_core.structured_output.base import GrammarError
from engine_core.structured_output.llguidance_backend import LLGuidanceBackend
from proto.codec import MessageDecoder
from proto.grammar import GrammarSource
from proto.process import set_title

READY: Final = b"ready"
MAX_MEMORY: Final = 2 << 30
"""Bytes of addresses, most of which are never touched."""
_LENGTH: Final = struct.Struct("<I")


class TrialSetup(msgspec.Struct, array_like=True, frozen=True):
    """What it works with. seconds: that one grammar may take."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seconds: int


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Its length, then the bytes."""
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame; raises EOFError where there is none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    frame = stream.read(length)
    if len(frame) < length:
        raise EOFError
    return frame


def main() -> None:
    """Try one grammar after the other."""
    set_title("tokend grammar trial")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = MessageDecoder[TrialSetup](TrialSetup).decode(read_frame(stdin))
    backend = LLGuidanceBackend(Path(setup.tokenizer_json), setup.vocab_size, setup.eos_token_ids)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    decoder: MessageDecoder[GrammarSource] = MessageDecoder(GrammarSource)
    write_frame(stdout, READY)
    while True:
        try:
            source = decoder.decode(read_frame(stdin))
        except EOFError:
            return
        signal.alarm(setup.seconds)
        write_frame(stdout, _tried(backend, source))
        signal.alarm(0)


def _tried(backend: LLGuidanceBackend, source: GrammarSource) -> bytes:
    """What is wrong with it, empty for nothing."""
    try:
        backend.compile(source)
    except GrammarError as error:
        return error.message.encode(errors="backslashreplace")
    except Exception as error:
        return f"the grammar cannot be used: {type(error).__name__}".encode()
    return b""


if __name__ == "__main__":
    main()
