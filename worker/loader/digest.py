"""The SHA-256 of all weights, which names KV that outlives the process.

No other start hashes the weights. KV in host memory ends with its process, and the sample in the
manifest is enough to tell models apart there. KV on a disk, in Redis or in shared storage may meet
an edited file later, or one of another host with the same contents: so its fingerprint needs all
bytes. They are hashed once for a state of the files, by a thread beside the load, and the result is
kept in the prepared folder with the stamps of the files.

A stamp has the time of the inode's last change, which the kernel sets at every write. So the result
for other bytes is not used, even if a tensor was edited in place and size and times were restored.
Not noticed are writes beneath the file system, and those under a clock that was set back.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final

from proto.errors import ModelError
from proto.messages.prepared_model import (
    FileStamp,
    PreparedModel,
    TensorIndex,
    WeightsDigest,
    file_stamp,
)
from proto.runtime.host_resources import ALLOWED_CPUS
from worker.loader.files import TensorFiles, read_whole_index
from worker.loader.kept_file import locked, read_kept, write_kept

DIGEST_FILE: Final = "digest.msgpack"
_CLOCK_TICK: Final = 0.05
"""Seconds, more than a step of the clock of file systems. A change in the step in which a stamp was
taken could leave it as it is, so that no stamp is taken in the step of a change."""
logger = logging.getLogger("tokend.worker")


@contextmanager
def hashing(prepared: PreparedModel) -> Iterator[Future[str]]:
    """Hash the weights while the body loads them; see weights_digest.

    Raises ModelError if a file changes meanwhile, since other bytes may have been loaded then. An
    exception of the body does not wait for the hash, and neither does the end of the process.
    """
    index = read_whole_index(prepared)
    stamps = _stamps(index)
    digest: Future[str] = Future()
    thread = threading.Thread(
        target=_set_digest, args=(digest, prepared), name="digest", daemon=True
    )
    thread.start()
    yield digest
    thread.join()
    _refuse_changes(prepared, index, stamps)


def _set_digest(digest: Future[str], prepared: PreparedModel) -> None:
    try:
        os.sched_setaffinity(0, ALLOWED_CPUS)
        digest.set_result(weights_digest(prepared))
    except BaseException as error:  # raised by `digest.result()`
        digest.set_exception(error)


def weights_digest(prepared: PreparedModel) -> str:
    """Return the hex SHA-256 of name, type, shape and bytes of every tensor, ordered by name.

    Does not depend on how tensors are distributed over files. Raises ModelError if a file changes
    meanwhile. Of several processes one hashes, and the others wait for its result.
    """
    index = read_whole_index(prepared)
    path = os.path.join(prepared.folder, DIGEST_FILE)
    try:
        with locked(prepared.folder):
            known = read_kept(path, WeightsDigest)
            if known is not None and known.stamps == _stamps(index):
                return known.sha256
            time.sleep(_CLOCK_TICK)
            stamps = _stamps(index)
            digest = WeightsDigest(stamps, hash_tensors(index))
            _refuse_changes(prepared, index, stamps)
            _keep(path, digest)
    except OSError as error:
        raise ModelError(f"{error.filename or prepared.source}: {error.strerror}") from None
    return digest.sha256


def hash_tensors(index: TensorIndex) -> str:
    """Hash all bytes of all tensors."""
    files, digest = TensorFiles(index), hashlib.sha256()
    for entry in sorted(index.tensors, key=lambda tensor: tensor.name):
        digest.update(f"{entry.name}\0{entry.type}\0{entry.shape}\0".encode())
        for each in entry.byte_ranges:
            digest.update(files.bytes_at(*each).data)
    return digest.hexdigest()


def _stamps(index: TensorIndex) -> tuple[FileStamp, ...]:
    return tuple(map(file_stamp, index.files))


def _refuse_changes(
    prepared: PreparedModel, index: TensorIndex, stamps: tuple[FileStamp, ...]
) -> None:
    if _stamps(index) != stamps:
        raise ModelError(f"the weights of {prepared.source} changed while they were read")


def _keep(path: str, digest: WeightsDigest) -> None:
    """Write the result; without the right to write, the next start hashes again."""
    try:
        write_kept(path, digest)
    except OSError as error:
        logger.warning("%s: %s; the next start hashes the weights again", path, error.strerror)
