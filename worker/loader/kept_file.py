"""Results that are kept in the folder of a prepared model, so that later starts have them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from proto.codec import Message, MessageDecoder, encode
from proto.errors import ProtocolError

KeptT = TypeVar("KeptT")


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the lock of the folder among processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_kept(path: str, kind: type[KeptT]) -> KeptT | None:
    """Return the result that a file has; None if there is none, or of another version."""
    decoder: MessageDecoder[KeptT] = MessageDecoder(kind)
    try:
        with open(path, "rb") as file:
            return decoder.decode(file.read())
    except (FileNotFoundError, ProtocolError):
        return None


def write_kept(path: str, result: Message) -> None:
    """Write the whole file or nothing; raises OSError. The caller holds the folder's lock."""
    workspace = f"{path}.{os.getpid()}"
    try:
        with open(workspace, "wb") as file:
            file.write(encode(result))
        os.replace(workspace, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(workspace)
        raise
