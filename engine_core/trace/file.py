"""The file of a trace, written by a thread so that a slow disk never holds a step up.

    step ── put ──▶ buffer, at most MAX_UNWRITTEN bytes ── thread, 4 times a second ──▶ file

Owns the file and the thread. Encoding is done by the caller: microseconds, while a thread that
encoded would keep the interpreter's lock from the step for as long as it liked.
"""

import errno
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Final

import msgspec

from proto.errors import ConfigError
from proto.sched_trace import Dropped, TraceEnd

logger = logging.getLogger("tokend.trace")

MAX_UNWRITTEN: Final = 16 << 20
"""Bytes; lines that come while so many wait are dropped and counted."""
_PAUSE_SECONDS: Final = 0.25
_PRIVATE: Final = 0o600


def path_of_epoch(path: str, epoch: int) -> str:
    """The engine that the daemon starts with has the file's name, those after it their own."""
    if epoch == 1:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}.{epoch}{name.suffix}"))


def _open(path: str) -> int:
    """An empty private file. What is no file, a device or a pipe, is left as it is."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, _PRIVATE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        os.fchmod(descriptor, _PRIVATE)
        os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class TraceFile:
    """Lines for one file. An old file of that name is overwritten; only its owner may read it.

    max_bytes: after that many the trace is over. Raises ConfigError where there can be no file.
    """

    def __init__(self, path: str, max_bytes: int, max_unwritten: int = MAX_UNWRITTEN) -> None:
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(f"--sched-trace {path}: {error.strerror}", "sched_trace") from None
        self._path = path
        self._bytes_left = max_bytes
        self._max_unwritten = max_unwritten
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def put(self, line: msgspec.Struct) -> None:
        """A line, unless the trace is over or the disk too far behind; never waits for it."""
        with self._lock:
            if self.is_over:
                return
            if self._num_dropped:
                self._note_dropped()
            self._append(line)

    def close(self) -> None:
        """Write what there is, and the last line."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with self._lock:
            if not self.is_over:
                if self._num_dropped:
                    self._append(Dropped(num_lines=self._num_dropped), forced=True)
                self._append(TraceEnd(reason="shutdown"), forced=True)
        self._write()
        os.close(self._descriptor)

    def _note_dropped(self) -> None:
        """The number of missing lines, as soon as there is room for it."""
        number, self._num_dropped = self._num_dropped, 0
        if not self._append(Dropped(num_lines=number)):
            self._num_dropped += number - 1

    def _append(self, line: msgspec.Struct, forced: bool = False) -> bool:
        buffer = self._buffer
        start = len(buffer)
        if start > self._max_unwritten and not forced:
            self._num_dropped += 1
            return False
        self._encoder.encode_into(line, buffer, -1)
        buffer += b"\n"
        size = len(buffer) - start
        if size > self._bytes_left and not self.is_over:
            del buffer[start:]
            self._end("--sched-trace-max-bytes is reached", b'{"kind":"end","reason":"limit"}\n')
            return False
        self._bytes_left -= size
        return True

    def _end(self, why: str, last_line: bytes = b"") -> None:
        self.is_over = True
        self._buffer += last_line
        logger.warning("the trace %s ends: %s", self._path, why)

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock:
            buffer, self._buffer = self._buffer, bytearray()
        view = memoryview(buffer)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            with self._lock:
                if not self.is_over:
                    self._end(str(error))
                self._buffer.clear()
