"""Weights in a layout of the kernels that lie in memory once, for all workers that have the same.

    first worker     lays them out in a file     [ weights ............. | index ]  and seals it
    other workers    wait for the seal, and map the file
    later workers    map the file: those that replace dead ones

The file is a memfd, which the supervisor makes and workers inherit
(deploy/supervisor/processes.py:WeightFiles). It has no name and no limit but the machine's memory
or that of the container, and the kernel frees it with the last process of the daemon.

The worker that holds the lock of the file writes. The kernel releases the lock of a worker that
dies, and the next one discards what that left. A sealed file is whole: its writer seals it at the
end, and then the kernel refuses every change. All workers map it privately. So a write to a weight
makes a copy of the page for this worker alone.

Start at shared_weights.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError
from proto.messages.prepared_model import PackedWeights
from worker.host.large_pages import WeightArena, large_pages
from worker.host.memory_nodes import LARGE_PAGE, MemoryPlacement

logger = logging.getLogger("tokend.worker")

_POLL_SECONDS: Final = 0.05
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_FOOTER: Final = struct.Struct("<8sQ")
"""The end of the file: _MAGIC and the bytes of the index before it."""
_MAGIC: Final = b"tokendW1"
_BLOCK_BYTES: Final = 512
"""Unit of st_blocks; see stat(2)."""
_MAP_FIXED: Final = 0x10
_HUGEPAGE: Final = 14
_POPULATE_READ: Final = 22
_COLLAPSE: Final = 25
"""Advice of madvise(2), the last two since Linux 5.14 and 6.1."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextmanager
def shared_weights(
    descriptor: int,
    fingerprint: bytes,
    placement: MemoryPlacement | None,
    *,
    must_share: bool,
    on_growth: Callable[[int], None],
) -> Iterator[WeightArena]:
    """Yield the memory for the weights of a worker, which the body lays out as far as needed.

    Waits while another worker writes the file. Yields private memory if the file has weights of
    another fingerprint.

    descriptor: of the file. must_share: share the weights also if that leaves them in small pages,
        which make products slower; without it they are private then.
    on_growth: called while this worker waits, with the bytes in memory, each time that they are
        more.
    """
    _wait_for_seal_or_lock(descriptor, on_growth)
    written = None
    if _is_sealed(descriptor):
        arena = _open_sealed(descriptor, fingerprint, placement)
    elif _empty_for_large_pages(descriptor) or must_share:
        arena = written = _WrittenArena(descriptor, placement)
    else:
        arena = WeightArena(placement)
    if written is None:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
    yield arena
    # If the body fails, the lock is kept: maps of this process would end with the file.
    if written is not None:
        written.seal(fingerprint)
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def bytes_in_memory(descriptor: int) -> int:
    """Return the bytes of memory that a file of weights takes so far."""
    return os.fstat(descriptor).st_blocks * _BLOCK_BYTES


class _WrittenArena(WeightArena):
    """Memory of a file that this worker writes and then seals. Other arguments as in WeightArena.

    descriptor: of the empty file, whose lock this process holds.
    """

    is_shared = True

    def __init__(self, descriptor: int, placement: MemoryPlacement | None) -> None:
        super().__init__(placement)
        self._descriptor = descriptor
        self._maps: list[tuple[torch.Tensor, int]] = []  # and the offset of each in the file
        self._places: dict[str, tuple[int, int]] = {}

    def place(self, key: str, num_bytes: int) -> tuple[torch.Tensor, bool]:
        part = self.allocate(num_bytes)
        _enlarge_pages(part)
        if key:
            self._places.setdefault(key, (self._offset_of(part), num_bytes))
        return part, False

    def seal(self, fingerprint: bytes) -> None:
        """Finish the file, and map it privately in place of the shared maps. Raises OSError."""
        end = os.fstat(self._descriptor).st_size
        index = encode(PackedWeights(fingerprint, end, self._places))
        rest = memoryview(index + _FOOTER.pack(_MAGIC, len(index)))
        while rest:
            written = os.pwrite(self._descriptor, rest, end)
            rest, end = rest[written:], end + written
        # The kernel seals no file that a process could still write to.
        for memory, offset in self._maps:
            _map_file(self._descriptor, offset, memory, mmap.MAP_PRIVATE)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        for memory, offset in self._maps:
            _populate(memory, offset, self._places)

    def _new_map(self, num_bytes: int) -> torch.Tensor:
        offset = os.fstat(self._descriptor).st_size
        memory = large_pages(-(-num_bytes // LARGE_PAGE) * LARGE_PAGE)
        os.ftruncate(self._descriptor, offset + memory.nbytes)
        _map_file(self._descriptor, offset, memory, mmap.MAP_SHARED)
        self._maps.append((memory, offset))
        return memory

    def _offset_of(self, part: torch.Tensor) -> int:
        """Return where a part begins in the file."""
        for memory, offset in reversed(self._maps):
            distance = part.data_ptr() - memory.data_ptr()
            if 0 <= distance < memory.nbytes:
                return offset + distance
        raise AssertionError("a part of no map")


class _SealedArena(WeightArena):
    """The weights of a sealed file, mapped privately; those that it lacks get memory of their own.

    Raises OSError if the file cannot be mapped.
    """

    is_shared = True

    def __init__(
        self, descriptor: int, index: PackedWeights, placement: MemoryPlacement | None
    ) -> None:
        super().__init__(placement)
        self._places = index.places
        self._memory = large_pages(index.num_bytes)
        if index.num_bytes:
            _map_file(descriptor, 0, self._memory, mmap.MAP_PRIVATE)
            _populate(self._memory, 0, index.places)

    def place(self, key: str, num_bytes: int) -> tuple[torch.Tensor, bool]:
        offset, known_bytes = self._places.get(key, (0, -1))
        if known_bytes != num_bytes:
            return super().place(key, num_bytes)
        return self._memory[offset : offset + num_bytes], True


def _open_sealed(
    descriptor: int, fingerprint: bytes, placement: MemoryPlacement | None
) -> WeightArena:
    """Return the weights of a sealed file; private memory, and a warning, if they are others."""
    index = _read_index(descriptor)
    if index is None or index.fingerprint != fingerprint:
        logger.warning(
            "the weights in memory are not those of the model's files now: this worker has its own"
        )
        return WeightArena(placement)
    logger.info("weights: another worker has laid them out")
    return _SealedArena(descriptor, index, placement)


def _read_index(descriptor: int) -> PackedWeights | None:
    """Return the index of a sealed file; None if it has none, or one that does not fit the file."""
    decoder: MessageDecoder[PackedWeights] = MessageDecoder(PackedWeights)
    footer_at = os.fstat(descriptor).st_size - _FOOTER.size
    if footer_at < 0:
        return None
    magic, index_bytes = _FOOTER.unpack(os.pread(descriptor, _FOOTER.size, footer_at))
    if magic != _MAGIC or index_bytes > footer_at:
        return None
    try:
        index = decoder.decode(os.pread(descriptor, index_bytes, footer_at - index_bytes))
    except ProtocolError:
        return None
    fits = index.num_bytes == footer_at - index_bytes and all(
        0 <= offset <= offset + size <= index.num_bytes for offset, size in index.places.values()
    )
    return index if fits else None


def _wait_for_seal_or_lock(descriptor: int, on_growth: Callable[[int], None]) -> None:
    """Wait until the file is sealed, or this process has its lock."""
    most = 0
    while not _is_sealed(descriptor):
        try:
            # Of the process, not of the descriptor, which all workers have inherited
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        else:
            return
        if (now := bytes_in_memory(descriptor)) > most:
            most = now
            on_growth(now)
        time.sleep(_POLL_SECONDS)


def _is_sealed(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


# ---- Maps and pages ----


def _map_file(descriptor: int, offset: int, memory: torch.Tensor, sharing: int) -> None:
    """Map bytes of a file in place of this memory, which begins a page. Raises OSError.

    memory: uint8 [n] of large_pages, the last page is mapped to its end. Its map is unmapped with
    it. sharing: MAP_SHARED or MAP_PRIVATE.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, sharing | _MAP_FIXED
    address = memory.data_ptr()
    found = _LIBC.mmap(address, memory.nbytes, protection, flags, descriptor, offset)
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, f"weights cannot be mapped: {os.strerror(number)}")
    _LIBC.madvise(address, memory.nbytes, _HUGEPAGE)


def _empty_for_large_pages(descriptor: int) -> bool:
    """Empty the file, and return whether its memory can be in large pages; logs if it cannot."""
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, LARGE_PAGE)
    memory = large_pages(LARGE_PAGE)
    _map_file(descriptor, 0, memory, mmap.MAP_SHARED)
    can_be_large = _enlarge_pages(memory)
    del memory
    os.ftruncate(descriptor, 0)
    if not can_be_large:
        logger.info(
            "memory for weights that workers share is in small pages, which makes products slower: "
            "large ones need Linux 6.1 with transparent huge pages"
        )
    return can_be_large


def _enlarge_pages(part: torch.Tensor) -> bool:
    """Make the large pages that begin in this new memory; return whether the system has done so.

    Without it a memfd has small pages, unless the system's shmem_enabled says otherwise. A large
    page gets the memory node of a small one, which is read here, after it was placed. That is
    another one in each large page, since pages on all nodes in turn are counted by small pages.
    """
    pages = range(
        -(-part.data_ptr() // LARGE_PAGE), -(-(part.data_ptr() + part.nbytes) // LARGE_PAGE)
    )
    for page in pages:
        small_page = page % (LARGE_PAGE // mmap.PAGESIZE)
        ctypes.string_at(page * LARGE_PAGE + small_page * mmap.PAGESIZE, 1)
    first, num_bytes = pages.start * LARGE_PAGE, len(pages) * LARGE_PAGE
    return not pages or not _LIBC.madvise(first, num_bytes, _COLLAPSE)


def _populate(memory: torch.Tensor, first: int, places: dict[str, tuple[int, int]]) -> None:
    """Map the pages of weights now, where the system can, and not in the first steps.

    memory: a map of the file, which begins at the offset `first`.
    """
    for offset, num_bytes in places.values():
        if first <= offset < first + memory.nbytes:
            begin = (offset - first) // mmap.PAGESIZE * mmap.PAGESIZE
            end = offset - first + num_bytes
            _LIBC.madvise(memory.data_ptr() + begin, end - begin, _POPULATE_READ)
