"""The daemon's private directory for sockets.

Every process of a daemon holds a shared lock on the file `lock` in it. The last one to exit removes
the directory. A directory without a lock holder was left by a killed daemon; the next start of a
daemon removes it.
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

from proto.errors import ConfigError

_PREFIX = "tokend-"
_LOCK = "lock"
_RETRY_SECONDS = 0.005


class RunDirectory:
    """The lock of one process on a run directory."""

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._leaving = threading.Lock()

    @classmethod
    def create(cls, parent: str) -> "RunDirectory":
        """Create a directory of mode 0700 under `parent`; removes abandoned ones first."""
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
        """Take the shared lock of an existing directory."""
        descriptor = os.open(
            os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return cls(path, descriptor)

    def leave(self, wait_seconds: float = 0.0) -> None:
        """Release the lock; the last process to do so removes the directory.

        Waits up to `wait_seconds` for the other processes, for orphans: the lock of a killed
        supervisor may be released slightly after its death pipe closes, and then no process would
        be the last. A second call waits for the first one, because two threads may end a process
        at the same time.
        """
        with self._leaving:
            if self._lock_fd >= 0:
                descriptor, self._lock_fd = self._lock_fd, -1
                self._leave(descriptor, wait_seconds)

    def _leave(self, descriptor: int, wait_seconds: float) -> None:
        deadline = time.monotonic() + wait_seconds
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            while not (alone := _lock_exclusively(descriptor)) and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
            if alone:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(descriptor)


def sweep(parent: str) -> list[str]:
    """Remove this user's run directories under `parent` that no process holds."""
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
    """Whether a daemon uses this run directory."""
    try:
        descriptor = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock_exclusively(descriptor)
    finally:
        os.close(descriptor)


def run_directories(parent: str) -> list[str]:
    """Return the run directories under `parent` that daemons use."""
    return sorted(str(path) for path in Path(parent).glob(_PREFIX + "*") if in_use(str(path)))


def default_parent(environment_runtime_dir: str | None) -> str:
    """Return XDG_RUNTIME_DIR if it is writable, otherwise the temporary directory.

    A relative path counts as none, by the XDG rules. Raises ConfigError if neither is writable.
    """
    given = environment_runtime_dir
    if given and os.path.isabs(given) and os.access(given, os.W_OK | os.X_OK):
        return given
    with contextlib.suppress(FileNotFoundError):  # none of those that Python tries is writable
        temporary = tempfile.gettempdir()
        if os.access(temporary, os.W_OK | os.X_OK):
            return temporary
    raise ConfigError(
        f"no directory for sockets: user {os.getuid()} can write to no temporary directory; set "
        "XDG_RUNTIME_DIR or TMPDIR"
    )


def _lock_exclusively(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
