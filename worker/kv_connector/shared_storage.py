"""The workers' half of KV in a shared folder: reads files before a step, writes them after it.

Layer by layer, while other layers are computed. A file has a block as it is in the cache, then a
CRC-32 of each layer's part:

    | slot 0 | slot 1 | … | crc 0 | crc 1 | … |          a layer's part is its slot

It gets its name when it is complete, and only its owner can read it. A short, altered or missing
file makes the load of its block fail.
"""

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from proto.messages.kv_connector import (
    NO_PAYLOAD,
    Payload,
    SharedStorageReport,
    SharedStorageStep,
    pack,
    unpack,
)
from proto.settings.kv_media import shared_storage_file, shared_storage_folder
from proto.settings.kv_transfer_config import KVTransferConfig
from worker.attention.kv_cache import KVCache
from worker.kv_connector.base import WorkerConnector, WorkerContext

_CHECKSUM_BYTES: Final = 4
_MAX_OPEN: Final = 128
"""Files of a step that are open at a time for loads, and for stores; others for each access."""


class SharedStorageWorker(WorkerConnector):
    """WorkerConnector that reads and writes files, within the step."""

    per_layer = True

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self._context = context
        self._folder = shared_storage_folder(config, context.fingerprint)
        self._step = SharedStorageStep()
        self._stored_files: dict[bytes, _StoredFile] = {}  # that this step loads
        self._unfinished: dict[bytes, _UnfinishedFile] = {}  # that it stores
        self._invalid: list[int] = []
        self._stored: list[bytes] = []
        self._lost: list[bytes] = []

    def register_kv_caches(self, cache: KVCache) -> None:
        rows = cache.block_rows().view(cache.num_blocks, cache.layout.num_slots, -1)
        # By layer, for the thread that loads and for the one that saves.
        self._loads, self._saves = (
            [
                self._context.device.block_bytes(rows[:, slot])
                for _, slot in cache.layout.layer_slots
            ]
            for _ in range(2)
        )
        self._slots = [slot for _, slot in cache.layout.layer_slots]
        self._part_bytes = self._loads[0].block_bytes
        self._num_slots = cache.layout.num_slots

    def bind_connector_metadata(self, metadata: Payload) -> None:
        self._step = unpack(metadata, SharedStorageStep) if metadata else SharedStorageStep()

    def has_layer_copies(self) -> bool:
        return bool(self._step.load_hashes or self._step.store_hashes)

    def start_load_kv(self) -> None:
        if not self._step.load_hashes:
            return
        self._loads[0].record_steps()()  # a step in a device's queue may still read the blocks
        for block_hash, block in zip(self._step.load_hashes, self._step.load_blocks, strict=True):
            keeps_open = len(self._stored_files) < _MAX_OPEN
            file = _StoredFile(
                self._path(block_hash), self._num_slots, self._part_bytes, keeps_open
            )
            if file.is_whole:
                self._stored_files[block_hash] = file
            else:
                self._fail(block_hash, block)

    def wait_for_layer_load(self, layer: int) -> None:
        for block_hash, block in zip(self._step.load_hashes, self._step.load_blocks, strict=True):
            file = self._stored_files.get(block_hash)
            if file is None:
                continue
            part = file.read_part(self._slots[layer])
            if part is None:
                self._stored_files.pop(block_hash).close()
                self._fail(block_hash, block)
            else:
                self._loads[layer].copy_in(memoryview(part), block)

    def save_kv_layer(self, layer: int) -> None:
        for block_hash, block in zip(self._step.store_hashes, self._step.store_blocks, strict=True):
            if block_hash not in self._unfinished:
                keeps_open = len(self._unfinished) < _MAX_OPEN
                self._unfinished[block_hash] = _UnfinishedFile(
                    self._folder, self._num_slots, keeps_open
                )
            part = bytearray(self._part_bytes)
            self._saves[layer].copy_out(block, memoryview(part))
            self._unfinished[block_hash].write_part(self._slots[layer], part)

    def wait_for_save(self) -> None:
        self._close_stored_files()
        unfinished, self._unfinished = self._unfinished, {}
        for block_hash, file in unfinished.items():
            is_stored = file.finish(self._path(block_hash))
            (self._stored if is_stored else self._lost).append(block_hash)

    def get_block_ids_with_load_errors(self) -> list[int]:
        invalid, self._invalid = self._invalid, []
        return invalid

    def build_connector_worker_meta(self) -> Payload:
        if not (self._stored or self._lost):
            return NO_PAYLOAD
        report = SharedStorageReport(self._stored, self._lost)
        self._stored, self._lost = [], []
        return pack(report)

    def close(self) -> None:
        self._close_stored_files()
        for file in self._unfinished.values():
            file.remove()

    def _close_stored_files(self) -> None:
        for file in self._stored_files.values():
            file.close()
        self._stored_files.clear()

    def _fail(self, block_hash: bytes, block: int) -> None:
        self._invalid.append(block)
        self._lost.append(block_hash)

    def _path(self, block_hash: bytes) -> str:
        context = self._context
        return os.path.join(
            self._folder, shared_storage_file(block_hash, context.rank, context.num_ranks)
        )


class _BlockFile:
    """A file that is read or written in parts. keeps_open: whether it is open in between."""

    def __init__(self, path: str, flags: int, keeps_open: bool) -> None:
        self._path = path
        self._flags = flags | os.O_CLOEXEC
        self._descriptor = os.open(path, self._flags) if keeps_open else -1

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for one access, if it is not open."""
        if self._descriptor >= 0:
            yield self._descriptor
            return
        descriptor = os.open(self._path, self._flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _StoredFile:
    """A file to load. is_whole: whether it exists and has the right length."""

    def __init__(self, path: str, num_slots: int, part_bytes: int, keeps_open: bool) -> None:
        self._part_bytes = part_bytes
        self._file: _BlockFile | None = None
        end, num_checksum_bytes = num_slots * part_bytes, num_slots * _CHECKSUM_BYTES
        self.is_whole = False
        with suppress(OSError):
            self._file = _BlockFile(path, os.O_RDONLY, keeps_open)
            with self._file.opened() as descriptor:
                self._checksums = os.pread(descriptor, num_checksum_bytes + 1, end)
            self.is_whole = len(self._checksums) == num_checksum_bytes
        if not self.is_whole:
            self.close()

    def read_part(self, slot: int) -> bytes | None:
        """Return a layer's part; None if it is not as it was written."""
        assert self._file is not None
        at, size = slot * _CHECKSUM_BYTES, self._part_bytes
        try:
            with self._file.opened() as descriptor:
                part = os.pread(descriptor, size, slot * size)
        except OSError:
            return None
        checksum = int.from_bytes(self._checksums[at : at + _CHECKSUM_BYTES], "little")
        return part if len(part) == size and zlib.crc32(part) == checksum else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _UnfinishedFile:
    """A file without its name yet. Errors of the disk are kept until `finish`."""

    def __init__(self, folder: str, num_slots: int, keeps_open: bool) -> None:
        self._checksums = bytearray(num_slots * _CHECKSUM_BYTES)
        self._path = ""
        self._file: _BlockFile | None = None
        self._end = 0
        with suppress(OSError):
            descriptor, self._path = tempfile.mkstemp(".tmp", ".", folder)
            os.close(descriptor)
            self._file = _BlockFile(self._path, os.O_WRONLY, keeps_open)

    def write_part(self, slot: int, part: bytearray) -> None:
        at = slot * _CHECKSUM_BYTES
        checksum = zlib.crc32(part).to_bytes(_CHECKSUM_BYTES, "little")
        self._checksums[at : at + _CHECKSUM_BYTES] = checksum
        self._end = len(part) * len(self._checksums) // _CHECKSUM_BYTES
        self._write(part, slot * len(part))

    def finish(self, path: str) -> bool:
        """Give the file its name; return False, without a file, if anything has failed."""
        self._write(self._checksums, self._end)
        if self._file is not None:
            self._file.close()
            with suppress(OSError):
                os.replace(self._path, path)
                return True
        self.remove()
        return False

    def remove(self) -> None:
        self._fail()
        with suppress(OSError):
            os.unlink(self._path)

    def _fail(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, content: bytearray, at: int) -> None:
        if self._file is None:
            return
        try:
            with self._file.opened() as descriptor:
                written = os.pwrite(descriptor, content, at)
        except OSError:  # for example a full disk
            written = 0
        if written != len(content):
            self._fail()
