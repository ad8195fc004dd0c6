"""Lock files of the cache, and the rights of its group."""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def exclusive(path: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file, so that one process at a time works on a model.

    Waits for the process that holds it; on_wait: called once before that. The holder removes the
    file at the end. A process that waited may then hold the lock of a removed file; it starts over
    with the new file of that name. The kernel frees the lock when its holder dies.
    If the group of the cache folder may write to it, it may write to all that is created meanwhile:
    the next container may run as another user of the group.
    """
    folder = os.path.dirname(path)
    mask = os.umask(0o077)
    os.umask(mask & ~0o070 if is_shared(os.path.dirname(folder)) else mask)
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = _lock_file(path, on_wait)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)
    finally:
        os.umask(mask)


def _lock_file(path: str, on_wait: Callable[[], None]) -> int:
    """Return the descriptor of the file of this name, with its lock."""
    waited = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    on_wait()
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def is_shared(folder: str) -> bool:
    """Whether the group of a folder may write to it; of the one above, if it does not exist yet.

    Not if others may do so, too, as in a temporary directory.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(folder).st_mode
            return bool(mode & stat.S_IWGRP) and not mode & stat.S_ISVTX
        if folder == (above := os.path.dirname(folder)):
            return False
        folder = above
