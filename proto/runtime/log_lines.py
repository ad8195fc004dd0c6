"""Log lines: text, or one JSON object per line; and the streams that they are written to.

A record with the attribute `fields` (a dict of strings and numbers) adds these to its JSON object,
for example the figures of a request.

A process of the daemon writes to its standard output and error through `LogStream`: a reader of
the log that has gone, or that does not read, costs lines of the log and nothing else.
"""

import contextlib
import io
import logging
import math
import os
import select
import stat
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Final

from proto.codec import to_compact_json
from proto.settings.config import LogFormat

_TIME: Final = "%H:%M:%S"
FIELDS: Final = "fields"
"""Key of `extra` for the fields of a record."""


class JsonLines(logging.Formatter):
    """time (UTC), level, process, logger, message; then the fields, and a traceback, if any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_compact_json(line).decode()


def notice_line(message: str, process: str, level: str = "INFO", **fields: str | float) -> str:
    """Return a JSON line for a message of a process that uses no logger."""
    content = {"name": "tokend", "levelname": level, "msg": message, FIELDS: fields}
    return JsonLines(process).format(logging.makeLogRecord(content))


def text_line(text: str, level: str) -> str:
    """Return a line of text with time and level, for a message of a process without a logger."""
    record = logging.makeLogRecord({"levelname": level, "msg": text})
    return logging.Formatter("%(asctime)s %(levelname)s %(message)s", _TIME).format(record)


def formatter(form: LogFormat, process: str) -> logging.Formatter:
    """Return the formatter for the log lines of a process."""
    if form == "json":
        return JsonLines(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", _TIME)


_STALL_SECONDS: Final = 0.1
"""Longest wait of writes for a reader that reads slowly or not at all."""
_STALL_SHARE: Final = 0.1
"""Share of the time since the last wait that may be waited again. Lines after a dropped one do not
wait at all."""
_ATOMIC_BYTES: Final = 4096
"""PIPE_BUF of Linux: a pipe that can be written to takes as much at once."""
_MAX_PENDING: Final = 1 << 16
"""Characters without the end of a line that are kept."""


class LogStream(io.TextIOBase):
    """Text output to a descriptor that never raises and never waits long.

    Lines that cannot be written are dropped and counted, and a later line is preceded by one that
    says how many. process, log_format: of that line.
    """

    def __init__(
        self,
        descriptor: int,
        process: str,
        log_format: LogFormat = "text",
        encoding: str = "utf-8",
    ) -> None:
        self.process = process
        self.log_format = log_format
        self._descriptor = descriptor
        self._encoding = encoding
        self._lock = threading.RLock()  # a signal handler may write while its thread writes
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLOUT)
        self._patience = _STALL_SECONDS
        self._stalled_at = -math.inf  # monotonic seconds
        self._pending = ""
        self._dropped = 0
        self._inside_line = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write the lines that end in `text`; what follows waits for its end, or for `flush`."""
        with self._lock:
            self._pending += text
            if len(self._pending) > _MAX_PENDING:
                self.flush()
            elif "\n" in text:
                lines, end, self._pending = self._pending.rpartition("\n")
                self._emit(lines + end)
        return len(text)

    def flush(self) -> None:
        """Write what waits for the end of its line, and how many lines were dropped."""
        with self._lock:
            text, self._pending = self._pending, ""
            if text or self._dropped:
                self._emit(text)

    def _emit(self, text: str) -> None:
        """Write a text, after the number of lines that were dropped before it."""
        may_wait = not self._dropped
        if self._dropped:
            line = ("\n" if self._inside_line else "") + self._dropped_line()
            if not self._send(line, may_wait):
                self._dropped += text.count("\n")
                return
            self._dropped = 0
        if not self._send(text, may_wait):
            self._dropped += max(1, text.count("\n"))

    def _send(self, text: str, may_wait: bool) -> bool:
        """Return whether the whole text could be written."""
        data = text.encode(self._encoding, "backslashreplace")
        sent = 0
        with contextlib.suppress(OSError):  # the reader has gone, or the disk is full
            while sent < len(data):
                if not (self._poller.poll(0) or (may_wait and self._wait_for_reader())):
                    break
                with contextlib.suppress(BlockingIOError):  # another process was faster
                    sent += os.write(self._descriptor, data[sent : sent + _ATOMIC_BYTES])
        if sent:
            self._inside_line = not data[:sent].endswith(b"\n")
        return sent == len(data)

    def _wait_for_reader(self) -> bool:
        """Wait as long as writes may; return whether the reader has read."""
        began = time.monotonic()
        earned = _STALL_SHARE * (began - self._stalled_at)
        patience = min(_STALL_SECONDS, self._patience + earned)
        has_read = bool(self._poller.poll(patience * 1000))
        self._stalled_at = time.monotonic()
        self._patience = max(0.0, patience - (self._stalled_at - began))
        return has_read

    def _dropped_line(self) -> str:
        lines = "1 line" if self._dropped == 1 else f"{self._dropped} lines"
        message = f"{lines} of the log could not be written: the reader did not read"
        if self.log_format == "json":
            fields = {"dropped_lines": self._dropped}
            return notice_line(message, self.process, level="WARNING", **fields) + "\n"
        return f"{self.process}: {message}\n"


def guard_output(process: str, log_format: LogFormat = "text") -> None:
    """Make standard output and error of this process a `LogStream` each.

    A pipe or terminal is reopened, because O_NONBLOCK belongs to the open file description, which
    other programs may share. Output that bypasses Python, such as stacks after a crash, then does
    not block either. A closed stream is replaced by /dev/null.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if isinstance(stream, LogStream):
            stream.process, stream.log_format = process, log_format
        elif stream is None:
            descriptor = os.open(os.devnull, os.O_WRONLY)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, LogStream(descriptor, process, log_format))
        elif stream is getattr(sys, f"__{name}__"):  # else a test has replaced it
            _reopen(descriptor)
            setattr(sys, name, LogStream(descriptor, process, log_format, stream.encoding))


def _reopen(descriptor: int) -> None:
    """Give a pipe or terminal a file description of this process that does not block."""
    if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
        return  # a file would lose its position, a socket cannot be opened
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):  # it belongs to another user, or has no reader now
        opened = os.open(f"/proc/self/fd/{descriptor}", flags)
        os.dup2(opened, descriptor)
        os.close(opened)
