"""A process of a front end for work that clients or models choose: `TaskProcess`.

    front end   ── task ──▶   python -m MODULE FILE …   (one task after the other,
                ◀─ answer ──                             until its standard input ends)
         └──── large texts ────┘
          a file in memory of both

`text/template_process.py` and `media/media_process.py` say what is limited in their processes; the
front end limits the time of a task.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO, Final

_ENVIRONMENT: Final = {
    *("HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
}
"""Variables that the process gets, beside those of Python; keys of the daemon are in others."""
EXIT_SECONDS: Final = 0.1
"""Time for a process to end by itself, if its exit status says what has ended it."""


class TaskProcess:
    """The front end's side of a process that does one task at a time.

    module: of the process. arguments: after the number of its file. max_frame: most bytes of a
    message from it. file: descriptor of the file, while the process is started.
    """

    def __init__(self, module: str, max_frame: int, arguments: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-P", "-m", module]
        self._arguments = arguments
        self._max_frame = max_frame
        self._process: subprocess.Popen[bytes] | None = None
        self._opened = contextlib.ExitStack()

    @property
    def has_ended(self) -> bool:
        """Whether no process runs."""
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        """Start the process; `end` comes before a second start. Raises OSError."""
        assert self._process is None, "the process before has not been waited for"
        with contextlib.ExitStack() as opened:
            self.file = os.memfd_create("tokend-task")
            opened.callback(os.close, self.file)
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel = opened.enter_context(pair[0])
            self._channel.setblocking(False)
            with pair[1] as theirs:
                self._process = subprocess.Popen(
                    [*self._command, str(self.file), *self._arguments],
                    stdin=theirs.fileno(),
                    pass_fds=[self.file],
                    env=_environment(),
                )
            self._opened = opened.pop_all()

    async def write_file(self, content: bytes) -> None:
        """Write the content of the file, on a thread; raises OSError if there is no memory."""
        file = os.fdopen(os.dup(self.file), "wb")
        await asyncio.to_thread(_write, file, content)

    async def do_task(self, task: bytes) -> bytes:
        """Send a task and return the answer; raises EOFError if the process has ended."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, task)
        except OSError:
            raise EOFError from None
        return await self.receive()

    async def receive(self) -> bytes:
        """Return the next message; raises EOFError if the process has ended."""
        try:
            frame = await asyncio.get_running_loop().sock_recv(self._channel, self._max_frame)
        except OSError:
            raise EOFError from None
        if not frame:
            raise EOFError
        return frame

    def kill(self) -> None:
        """End the process without waiting: who waits for its answer gets EOFError."""
        if self._process is not None:
            self._process.kill()

    async def end(self, seconds: float = 0.0) -> int | None:
        """End the process and return its exit status; None if it had to be killed.

        seconds: for it to end by itself. No process is left if the caller is cancelled.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        if not seconds:
            process.kill()
        self._opened.close()  # it ends when it has read all
        return await asyncio.shield(asyncio.create_task(_reap(process, seconds)))


def _write(file: BinaryIO, content: bytes) -> None:
    """Write into a file and close it; raises OSError if there is no memory.

    A thread may go on to write after a timeout, so it needs a descriptor of its own: a number that
    is closed meanwhile may be that of another file.
    """
    with file:
        file.seek(0)
        file.write(content)


async def _reap(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    if seconds:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, seconds)
    status = process.poll()
    process.kill()
    await asyncio.to_thread(process.wait)
    return status


def _environment() -> dict[str, str]:
    """Return the environment of the process, without threads of numpy's libraries."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith("PYTHON")
    }
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
