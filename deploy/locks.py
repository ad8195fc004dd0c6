"""A lock between daemons that set the same thing up at the same time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it now.

    The file stays behind: removing it would let two processes hold two locks of
    one name. The kernel frees the lock when its holder dies.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
