"""The workers' half of KV in a shared folder: reads files before a step, writes them after it.

A file contains a block as in the cache and its CRC-32. It gets its name when it is complete, and
only its owner can read it. A short, altered or missing file makes the load of its block fail.
"""

import os
import tempfile
import zlib
from contextlib import suppress

import numpy as np
import torch

from proto.kv_connector import (
    NO_PAYLOAD,
    Payload,
    SharedStorageReport,
    SharedStorageStep,
    pack,
    unpack,
)
from proto.kv_media import shared_storage_file, shared_storage_folder
from proto.kv_transfer_config import KVTransferConfig
from worker.kv_cache import KVCache
from worker.kv_connector.base import WorkerConnector, WorkerContext

_CHECKSUM_BYTES = 4


class SharedStorageWorker(WorkerConnector):
    """WorkerConnector that reads and writes files, synchronously within the step."""

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self._context = context
        self._folder = shared_storage_folder(config, context.fingerprint)
        self._step = SharedStorageStep()
        self._invalid: list[int] = []
        self._stored: list[bytes] = []
        self._lost: list[bytes] = []

    def register_kv_caches(self, cache: KVCache) -> None:
        self._buffer = cache.buffer

    def bind_connector_metadata(self, metadata: Payload) -> None:
        self._step = unpack(metadata, SharedStorageStep) if metadata else SharedStorageStep()

    def start_load_kv(self) -> None:
        for block_hash, block in zip(self._step.load_hashes, self._step.load_blocks, strict=True):
            if not self._load(block_hash, block):
                self._invalid.append(block)
                self._lost.append(block_hash)

    def wait_for_save(self) -> None:
        for block_hash, block in zip(self._step.store_hashes, self._step.store_blocks, strict=True):
            try:
                self._store(block_hash, block)
            except OSError:  # for example a full disk
                self._lost.append(block_hash)
            else:
                self._stored.append(block_hash)

    def get_block_ids_with_load_errors(self) -> list[int]:
        invalid, self._invalid = self._invalid, []
        return invalid

    def build_connector_worker_meta(self) -> Payload:
        if not (self._stored or self._lost):
            return NO_PAYLOAD
        report = SharedStorageReport(self._stored, self._lost)
        self._stored, self._lost = [], []
        return pack(report)

    def _block_bytes(self, block: int) -> torch.Tensor:
        """View a device block as uint8 [block_bytes]."""
        return self._buffer[block].reshape(-1).view(torch.uint8)

    def _path(self, block_hash: bytes) -> str:
        context = self._context
        return os.path.join(
            self._folder, shared_storage_file(block_hash, context.rank, context.num_ranks)
        )

    def _load(self, block_hash: bytes, block: int) -> bool:
        memory = self._block_bytes(block)
        try:
            with open(self._path(block_hash), "rb") as file:
                content = file.read(memory.numel() + _CHECKSUM_BYTES + 1)
        except OSError:
            return False
        body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if len(body) != memory.numel() or zlib.crc32(body) != int.from_bytes(checksum, "little"):
            return False
        memory.copy_(torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8)))
        return True

    def _store(self, block_hash: bytes, block: int) -> None:
        path = self._path(block_hash)
        body = self._block_bytes(block).cpu().numpy().tobytes()
        descriptor, unfinished = tempfile.mkstemp(".tmp", ".", self._folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little"))
            os.replace(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
