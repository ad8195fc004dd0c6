"""Compiles each grammar in another process first, because compiling may crash or hang.

    engine       ── CompileTask, a socket ──▶  fork server  ── the same ──▶  child: compile
       ▲                                            │ if the child died         │
       └─────────────── CompileResult ◀─────────────┴───────────────────────────┘

A short grammar can make the compiler recurse until the stack is full, or work for hours, and a
thread cannot be stopped from outside. The fork server has loaded the vocabulary, so another child
costs a few milliseconds: several grammars compile at a time, and one that ends its child leaves
the others alone. A timer of processor time ends a child, so a grammar that is refused on a busy
host is refused on an idle one too. `GrammarSandbox` is the engine's side; `main` runs in the fork
server, which ends with the engine.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import (
    CompilerFailedError,
    GrammarError,
    GrammarTimeoutError,
)
from proto.codec import MessageDecoder, encode
from proto.messages.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from proto.runtime.host_resources import process_limits
from proto.runtime.process import set_title

MODULE: Final = "engine_core.structured_output.sandbox"
HANG_SECONDS: Final = 30.0
"""Time without a result after which the fork server and its children are killed; long enough for
the processor time of a grammar on an overloaded host."""
START_SECONDS: Final = 60.0
"""Time after which a fork server that has not started is killed."""
START_ATTEMPTS: Final = 2
MAX_MEMORY: Final = 128 << 20
"""Bytes of address space that a child may take for a grammar."""
_MAX_KEPT: Final = 8 << 20
"""Bytes that a child may keep for its next grammar; with more it ends."""
_MAX_FRAME: Final = MAX_GRAMMAR_BYTES + (64 << 10)
_READY: Final = b"ready"


class SandboxSetup(msgspec.Struct, array_like=True, frozen=True):
    """What a fork server needs to start. tokenizer_json: path. max_memory: see MAX_MEMORY."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_memory: int = MAX_MEMORY


class CompileTask(msgspec.Struct, array_like=True, frozen=True):
    """A grammar to compile. seconds: processor time."""

    source: GrammarSource
    seconds: float


class CompileResult(msgspec.Struct, array_like=True, frozen=True):
    """What became of a grammar.

    error: why the grammar cannot be used; empty if it can. signal: that killed the child.
    num_bytes: memory of the compiled grammar.
    """

    error: str = ""
    signal: int = 0
    num_bytes: int = 0


class GrammarSandbox:
    """Compiles grammars in children of a fork server, which starts with the first grammar.

    Thread-safe. hang_seconds: time without a result after which the fork server is killed.
    """

    def __init__(self, setup: SandboxSetup, hang_seconds: float = HANG_SECONDS) -> None:
        self._setup = setup
        self._hang_seconds = hang_seconds
        self._decoder: MessageDecoder[CompileResult] = MessageDecoder(CompileResult)
        self._lock = threading.Lock()  # guards the three below
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def check(self, source: GrammarSource, seconds: float) -> int:
        """Compile a grammar within this processor time; return the memory it takes in bytes.

        Raises GrammarTimeoutError if it takes longer, GrammarError if it fails or takes too much
        memory, CompilerFailedError if there is no result or no process starts.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._send_task(CompileTask(source, seconds), theirs)
            ours.settimeout(self._hang_seconds)
            frame = _receive(ours)
        if not frame:
            self._kill_server(process)
        result = self._decoder.decode(frame) if frame else CompileResult(signal=signal.SIGKILL)
        if result.signal == signal.SIGPROF:
            raise GrammarTimeoutError(
                f"the grammar cannot be used: compiling it takes more than {seconds:g} seconds"
            )
        if result.signal == signal.SIGKILL:  # by us, or by a host that is short of memory
            raise CompilerFailedError("the grammar was not compiled: a process hung or was killed")
        if result.signal:
            raise GrammarError("the grammar cannot be used: compiling it takes too much memory")
        if result.error:
            raise GrammarError(result.error)
        return result.num_bytes

    def close(self) -> None:
        """Kill the processes; threads in `check` get an error."""
        with self._lock:
            self._is_closed = True
            self._end_server()

    def _send_task(self, task: CompileTask, client: socket.socket) -> subprocess.Popen[bytes]:
        """Send a task to the fork server, which is returned; start one if there is none."""
        with self._lock:
            if self._is_closed:
                raise CompilerFailedError("the grammar was not compiled: the engine ends")
            process, control = self._process, self._control
            if process is None or control is None or process.poll() is not None:
                process, control = self._start_server()
            with contextlib.suppress(OSError):  # it died just now: `client` gets no result
                socket.send_fds(control, [encode(task)], [client.fileno()])
            return process

    def _start_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a fork server; a second one if the first dies at once, as on a host without memory.

        Raises CompilerFailedError if none gets ready.
        """
        for _ in range(START_ATTEMPTS):
            self._end_server()
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # its children are killed with it
                    env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # which `_allocated` measures
                )
            self._control = control
            control.settimeout(START_SECONDS)
            with contextlib.suppress(OSError):  # it has died already
                control.send(encode(self._setup))
            if _receive(control) == _READY:
                return self._process, control
        self._end_server()
        raise CompilerFailedError("the grammar was not compiled: its process does not start")

    def _kill_server(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a fork server that hangs, unless another thread has done so."""
        with self._lock:
            if self._process is process:
                self._end_server()

    def _end_server(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None


@dataclass(slots=True)
class ForkedChild:
    """A process that compiles one grammar after the other.

    channel: takes tasks there, and a byte back after each. client: of the task that it works on.
    """

    pid: int
    channel: socket.socket
    client: socket.socket | None = None


class ForkServer:
    """Gives tasks to idle children, forks more if there is none, and reports those that died.

    control: the engine's socket, by which tasks arrive, each with a socket for its result.
    max_memory: see MAX_MEMORY.
    """

    def __init__(self, control: socket.socket, backend: LLGuidanceBackend, max_memory: int) -> None:
        self._control = control
        self._backend = backend
        self._max_memory = max_memory
        self._decoder: MessageDecoder[CompileTask] = MessageDecoder(CompileTask)
        self._children: dict[int, ForkedChild] = {}  # by the descriptor of their channel
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def run(self) -> None:
        """Serve until the engine closes its socket."""
        while True:
            ready = {descriptor for descriptor, _ in self._poller.poll()}
            for descriptor in ready & self._children.keys():
                self._end_task(self._children[descriptor])
            if self._control.fileno() in ready:
                frame, descriptors, _, _ = socket.recv_fds(self._control, _MAX_FRAME, 1)
                if not frame:
                    return
                self._begin_task(frame, socket.socket(fileno=descriptors[0]))

    def _begin_task(self, frame: bytes, client: socket.socket) -> None:
        idle = [child for child in self._children.values() if child.client is None]
        child = idle[0] if idle else self._fork_child()
        child.client = client
        with contextlib.suppress(OSError):  # it died just now, and is reaped next
            socket.send_fds(child.channel, [frame], [client.fileno()])

    def _end_task(self, child: ForkedChild) -> None:
        """Note that a child is idle, or reap it."""
        client, child.client = child.client, None
        killed_by = 0
        if not _receive(child.channel):
            self._poller.unregister(child.channel)
            del self._children[child.channel.fileno()]
            child.channel.close()
            _, status = os.waitpid(child.pid, 0)
            killed_by = os.WTERMSIG(status) or signal.SIGKILL  # an error of our own
        if client is not None:
            with client, contextlib.suppress(OSError):  # the engine waits no more
                if killed_by:
                    client.send(encode(CompileResult(signal=killed_by)))

    def _fork_child(self) -> ForkedChild:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                # A channel ends with the server only if no child has a copy.
                for one in (self._control, ours, *(it.channel for it in self._children.values())):
                    one.close()
                self._run_child(theirs)
            finally:
                os._exit(1)
        theirs.close()
        child = self._children[ours.fileno()] = ForkedChild(pid, ours)
        self._poller.register(ours, select.POLLIN)
        return child

    def _run_child(self, channel: socket.socket) -> None:
        """Compile grammars until the server ends, or one has left much memory behind."""
        kept = _data_bytes() + _MAX_KEPT
        while _data_bytes() < kept:
            frame, descriptors, _, _ = socket.recv_fds(channel, _MAX_FRAME, 1)
            if not frame:
                return
            task = self._decoder.decode(frame)
            with socket.socket(fileno=descriptors[0]) as client:
                with process_limits(task.seconds, self._max_memory):
                    result = self._compile(task.source)
                with contextlib.suppress(OSError):  # the engine waits no more
                    client.send(encode(result))
            if _data_bytes() < kept:
                channel.send(b"\0")

    def _compile(self, source: GrammarSource) -> CompileResult:
        num_bytes, before = 0, _allocated()
        try:
            compiled = self._backend.compile(source)
            error = self._backend.explore(compiled)
            num_bytes = max(0, _allocated() - before)
        except GrammarError as refused:
            error = refused.message
        except Exception as failed:
            error = f"the grammar cannot be used: {type(failed).__name__}"
        error = error.encode(errors="backslashreplace").decode()
        return CompileResult(error, num_bytes=num_bytes)


def _receive(channel: socket.socket) -> bytes:
    """Receive a message; empty if the peer has died or the time of the socket is up."""
    try:
        return channel.recv(_MAX_FRAME)
    except OSError:
        return b""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten numbers, of which mapped bytes and those in use count."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def _allocated() -> int:
    """Return the bytes that this process has allocated from glibc; 0 with another C library."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _MallocInfo
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7])


def _data_bytes() -> int:
    """Return the bytes of this process's own data."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def main() -> None:
    """Run the fork server; its standard input is the engine's socket."""
    set_title("tokend grammar sandbox")
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    setup = MessageDecoder[SandboxSetup](SandboxSetup).decode(control.recv(_MAX_FRAME))
    backend = LLGuidanceBackend(Path(setup.tokenizer_json), setup.vocab_size, setup.eos_token_ids)
    control.send(_READY)
    ForkServer(control, backend, setup.max_memory).run()
    os.killpg(0, signal.SIGKILL)  # the children too


if __name__ == "__main__":
    main()
