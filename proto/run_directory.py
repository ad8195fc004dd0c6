"""The daemon's private directory: sockets live here, nothing else knows where.

Every process of a daemon holds a shared lock on the file `lock` in it. The last
one to leave removes the directory; a directory whose lock nobody holds belongs
to a daemon that was killed, and the next start sweeps it away.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

from proto.errors import TokendError

_PREFIX = "tokend-"
_LOCK = "lock"
_RETRY_SECONDS = 0.005


class RunDirectory:
    """One process's membership in a run directory."""

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._leaving = threading.Lock()

    @classmethod
    def create(cls, parent: str) -> "RunDirectory":
        """A fresh directory of mode 0700 under `parent`, after sweeping dead ones."""
        sweep(parent)
        while True:
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            # another daemon's sweep may find it before it is locked, and remove it
            with contextlib.suppress(FileNotFoundError):
                directory = cls.join(path)
                if os.path.exists(os.path.join(path, _LOCK)):
                    return directory
                os.close(directory._lock_fd)

    @classmethod
    def join(cls, path: str) -> "RunDirectory":
        """Hold the shared lock of a directory that exists."""
        descriptor = os.open(
            os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return cls(path, descriptor)

    def leave(self, patience_seconds: float = 0.0) -> None:
        """Give the lock back; whoever leaves last removes the directory.

        Waits up to `patience_seconds` for the others to leave. That is for orphans:
        the lock of a supervisor that was killed may outlast its death pipe a little,
        and then each of the others would leave the removal to it. A second call waits
        for the first one: a process may end in two threads at once.
        """
        with self._leaving:
            if self._lock_fd >= 0:
                descriptor, self._lock_fd = self._lock_fd, -1
                self._leave(descriptor, patience_seconds)

    def _leave(self, descriptor: int, patience_seconds: float) -> None:
        deadline = time.monotonic() + patience_seconds
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            while not (alone := _lock_exclusively(descriptor)) and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
            if alone:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(descriptor)


def sweep(parent: str) -> list[str]:
    """Remove the run directories of this user under `parent` that nobody holds."""
    removed = []
    for path in Path(parent).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _lock_exclusively(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(str(path))
            finally:
                os.close(descriptor)
    return removed


def in_use(path: str) -> bool:
    """Whether a daemon lives in this run directory."""
    try:
        descriptor = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock_exclusively(descriptor)
    finally:
        os.close(descriptor)


def run_directories(parent: str) -> list[str]:
    """Those under `parent` in which daemons live."""
    return sorted(str(path) for path in Path(parent).glob(_PREFIX + "*") if in_use(str(path)))


def default_parent(environment_runtime_dir: str | None) -> str:
    """Where run directories go: XDG_RUNTIME_DIR if it can be used, or the temporary directory."""
    if environment_runtime_dir and os.access(environment_runtime_dir, os.W_OK | os.X_OK):
        return environment_runtime_dir
    temporary = tempfile.gettempdir()
    if not os.access(temporary, os.W_OK | os.X_OK):
        raise TokendError(f"no directory for sockets: {temporary} is not writable")
    return temporary


def _lock_exclusively(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
