"""KV in a folder that several daemons may share: one file for each block, read within a step.

The simplest connector, for trying out a shared folder and as an example. It lists the folder once
at the start and then knows only the files that this engine adds. The folder's size is not limited.
"""

import os
from collections.abc import Iterable
from typing import Any

from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_connector.base import NO_MATCH, Match, SchedulerConnector, SchedulerContext
from engine_core.request import Request
from proto.errors import ConfigError
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    Payload,
    SharedStorageReport,
    SharedStorageStep,
    pack,
    unpack,
)
from proto.messages.scheduler_output import BlockIds, SchedulerOutput
from proto.settings.kv_media import shared_storage_file, shared_storage_folder, shared_storage_hash
from proto.settings.kv_transfer_config import FIELD, KVTransferConfig


class SharedStorageScheduler(SchedulerConnector):
    """SchedulerConnector that loads and stores whole blocks as files, synchronously."""

    supports_groups = False

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError without a usable folder, and for models with sliding windows.

        A hit needs all blocks before it, of which a sliding window keeps only the last ones.
        """
        if any(group.sliding_window is not None for group in context.geometry.groups):
            raise ConfigError(
                f"{FIELD}: SharedStorageConnector does not support models with sliding windows",
                FIELD,
            )
        self._config = config
        self._context = context
        self._num_ranks = context.num_ranks
        self._present = self._list_blocks(shared_storage_folder(config, context.fingerprint))
        self._num_ranks_stored: dict[bytes, int] = {}
        self._num_void_reports: dict[bytes, int] = {}  # still to come, of invalidated stores
        self._requests: dict[int, Request] = {}
        self._num_blocks_stored: dict[int, int] = {}
        self._loads: list[tuple[bytes, int]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        if not self._config.loads:
            return NO_MATCH
        block_size, hashes = self._context.block_size, request.block_hashes
        first, end = num_computed_tokens // block_size, (request.num_tokens - 1) // block_size
        index = first
        while index < end and hashes[index] in self._present:
            index += 1
        return Match((index - first) * block_size, is_async=False)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._requests[request.seq_id] = request
        end = request.num_computed_tokens // self._context.block_size
        for index in range(end - num_external_tokens // self._context.block_size, end):
            self._loads.append((request.block_hashes[index], block_ids[0][index]))

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        loads, self._loads = self._loads, []
        stores = list(self._blocks_to_store(output)) if self._config.stores else []
        if not (loads or stores):
            return NO_PAYLOAD
        return pack(
            SharedStorageStep(
                [block_hash for block_hash, _ in loads],
                [block for _, block in loads],
                [block_hash for block_hash, _ in stores],
                [block for _, block in stores],
            )
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if not output.worker_metadata:
            return
        report = unpack(output.worker_metadata, SharedStorageReport)
        for block_hash in report.lost:
            self._present.discard(block_hash)
            if not self._is_void(block_hash):
                self._num_ranks_stored.pop(block_hash, None)
        for block_hash in report.stored:
            if self._is_void(block_hash):
                continue
            self._num_ranks_stored[block_hash] = self._num_ranks_stored.get(block_hash, 0) + 1
            if self._num_ranks_stored[block_hash] == self._num_ranks:
                del self._num_ranks_stored[block_hash]
                self._present.add(block_hash)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.seq_id, None)
        self._num_blocks_stored.pop(request.seq_id, None)
        return False, None

    def invalidate_request(self, request: Request) -> None:
        """Stop reading the request's files; they are written again when blocks are recomputed."""
        self._present.difference_update(request.block_hashes)
        self._void_stores(request.block_hashes)

    def on_worker_restart(self) -> None:
        self._num_ranks_stored.clear()
        self._num_void_reports.clear()
        self._loads.clear()
        self._num_blocks_stored.clear()

    def reset_cache(self) -> bool:
        """Stop reading all existing files; they stay for other daemons."""
        self._present.clear()
        self._void_stores(list(self._num_ranks_stored))
        return True

    def _void_stores(self, block_hashes: Iterable[bytes]) -> None:
        """Ignore what ranks will report of stores that are under way: their KV is not wanted."""
        for block_hash in block_hashes:
            num_stored = self._num_ranks_stored.pop(block_hash, None)
            if num_stored is not None:
                num_void = self._num_void_reports.get(block_hash, 0)
                self._num_void_reports[block_hash] = num_void + self._num_ranks - num_stored

    def _is_void(self, block_hash: bytes) -> bool:
        """Return whether a rank's report belongs to an invalidated store, and count it."""
        num_void = self._num_void_reports.get(block_hash, 0)
        if num_void > 1:
            self._num_void_reports[block_hash] = num_void - 1
        elif num_void:
            del self._num_void_reports[block_hash]
        return num_void > 0

    def _blocks_to_store(self, output: SchedulerOutput) -> Iterable[tuple[bytes, int]]:
        """Yield (hash, device block) of storable blocks without a file that this step fills."""
        cached = output.cached_requests
        ends = [
            (new.seq_id, new.num_computed_tokens + new.num_scheduled_tokens)
            for new in output.new_requests
        ] + [
            (seq_id, computed + scheduled)
            for seq_id, computed, scheduled in zip(
                cached.seq_ids, cached.num_computed_tokens, cached.num_scheduled_tokens, strict=True
            )
        ]
        for seq_id, num_computed in ends:
            request = self._requests.get(seq_id)
            if request is None or not self._context.is_storable(seq_id):
                continue
            first = self._num_blocks_stored.get(seq_id, 0)
            end = min(num_computed, request.num_tokens) // self._context.block_size
            if end <= first:
                continue
            self._num_blocks_stored[seq_id] = end
            hashes, (table, *_) = request.block_hashes, self._context.block_ids(seq_id)
            for index in range(first, end):
                if table[index] == NULL_BLOCK:
                    continue
                if (
                    hashes[index] not in self._present
                    and hashes[index] not in self._num_ranks_stored
                ):
                    self._num_ranks_stored[hashes[index]] = 0
                    yield hashes[index], table[index]

    def _list_blocks(self, folder: str) -> set[bytes]:
        """Return the hashes of blocks for which every rank has a file."""
        names = set(os.listdir(folder))
        hashes = {block_hash for block_hash in map(shared_storage_hash, names) if block_hash}
        ranks = range(self._num_ranks)
        return {
            block_hash
            for block_hash in hashes
            if all(
                shared_storage_file(block_hash, rank, self._num_ranks) in names for rank in ranks
            )
        }
