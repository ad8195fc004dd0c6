"""The daemon's private directory: its sockets, and its state for commands such as `tokend ps`.

Every process of a daemon holds a shared lock on the file `lock` in it. The last one to exit removes
the directory. A directory without a lock holder was left by a killed daemon; the next start of a
daemon removes it. The folder for pixels of images (`pixels_folder`) is removed with it.
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
from typing import Final

from proto.codec import from_json, to_json
from proto.errors import ConfigError
from proto.messages.lifecycle import DaemonState

TORCH_FOLDER_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Names a folder that torch makes, elsewhere in TMPDIR, when its profiler or transformers is
imported; nothing of tokend compiles into it, so it is one that ends with the process."""

_SHARED_MEMORY: Final = "/dev/shm"
_PREFIX = "tokend-"
_LOCK = "lock"
_STATE = "state"
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
                _remove(self.path)
        finally:
            os.close(descriptor)


def pixels_folder(run_dir: str) -> str:
    """Return the folder for the pixels of images of this daemon, in shared memory if there is some.

    Its names are those of `SharedPixels`: all front ends write to it and the workers read, so a
    name begins with the front end's index and a dot. The first writer creates the folder, of mode
    0700; it is removed together with the run directory.
    """
    name = os.path.basename(os.path.normpath(run_dir))
    if name.startswith(_PREFIX) and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return os.path.join(_SHARED_MEMORY, name)
    return os.path.join(run_dir, "pixels")


def read_state(run_dir: str) -> DaemonState:
    """Return the state of a daemon; raises OSError or ProtocolError."""
    return from_json(Path(run_dir, _STATE).read_bytes(), DaemonState)


def write_state(run_dir: str, state: DaemonState) -> None:
    """Replace the state; raises OSError."""
    replace_file(run_dir, _STATE, to_json(state))


def replace_file(run_dir: str, name: str, content: bytes) -> None:
    """Replace a file as a whole, because another process may read it at this moment."""
    path = os.path.join(run_dir, name)
    Path(path + ".new").write_bytes(content)
    os.replace(path + ".new", path)


def sweep(parent: str) -> list[str]:
    """Remove this user's run directories under `parent` that no process holds."""
    removed = []
    for path in Path(parent).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if not _is_own(path):
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _lock_exclusively(descriptor):
                    _remove(str(path))
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
    """Return the run directories under `parent` that daemons of this user use.

    Others could name any process in theirs.
    """
    found = []
    for path in Path(parent).glob(_PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError):
            if _is_own(path) and in_use(str(path)):
                found.append(str(path))
    return sorted(found)


def _remove(run_dir: str) -> None:
    pixels = pixels_folder(run_dir)
    with contextlib.suppress(OSError):
        if _is_own(Path(pixels)):
            shutil.rmtree(pixels, ignore_errors=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def _is_own(path: Path) -> bool:
    """Whether a path is a directory of this user; raises FileNotFoundError."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def remove_pixels(run_dir: str, index: int) -> None:
    """Remove the pixels of images of a front end that has ended, as far as possible.

    A folder of another user, or a link in its place, stays as it is.
    """
    folder = Path(pixels_folder(run_dir))
    with contextlib.suppress(OSError):
        for name in os.listdir(folder) if _is_own(folder) else ():
            if name.startswith(f"{index}."):
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)


def parents(environment_runtime_dir: str | None) -> list[str]:
    """Return the folders in which daemons of this user may have their run directories.

    One that was started by another session, by cron or as a service may have no XDG_RUNTIME_DIR or
    another one. environment_runtime_dir: XDG_RUNTIME_DIR of this process.
    """
    own = f"/run/user/{os.getuid()}"
    candidates = [environment_runtime_dir, tempfile.gettempdir(), own]
    found = {os.path.realpath(each): each for each in candidates if each and os.path.isabs(each)}
    return [path for path in found if os.access(path, os.R_OK | os.X_OK)]


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
