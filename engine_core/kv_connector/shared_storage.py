"""KV in a folder that several daemons may share: one file for each block, read within a step.

The plainest connector there can be, for trying out a shared folder and as an example of the
contract. What is in the folder is known from the start and from what this engine stores: nothing
is looked up while a step is decided. Nobody limits what the folder takes.
"""

import os
from collections.abc import Iterable
from typing import Any, ClassVar

from engine_core.kv_cache.block import NULL_BLOCK, BlockIds
from engine_core.kv_connector.base import NO_MATCH, Match, SchedulerContext
from engine_core.kv_connector.nothing import NoConnector
from engine_core.request import Request
from proto.errors import ConfigError
from proto.kv_connector import (
    NO_PAYLOAD,
    KVConnectorOutput,
    Payload,
    SharedStorageReport,
    SharedStorageStep,
    pack,
    unpack,
)
from proto.kv_media import shared_storage_file, shared_storage_folder, shared_storage_hash
from proto.kv_transfer_config import FIELD, KVTransferConfig
from proto.scheduler_output import SchedulerOutput


class SharedStorageScheduler(NoConnector):
    """SchedulerConnector over files."""

    supports_groups: ClassVar[bool] = False

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError where no folder is named, it cannot be made, or a layer has a window.

        Blocks are found by the whole run before them, of which a window keeps only the end.
        """
        if any(group.sliding_window is not None for group in context.geometry.groups):
            raise ConfigError(
                f"{FIELD}: SharedStorageConnector does not support models with sliding windows",
                FIELD,
            )
        self._config = config
        self._context = context
        self._num_ranks = context.num_ranks
        self._present = self._found_in(shared_storage_folder(config, context.fingerprint))
        self._stored_by: dict[bytes, int] = {}
        self._requests: dict[int, Request] = {}
        self._num_offered: dict[int, int] = {}
        self._loads: list[tuple[bytes, int]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        if not self._config.loads:
            return NO_MATCH
        block_size, hashes = self._context.block_size, request.block_hashes
        first, end = num_computed_tokens // block_size, (request.num_tokens - 1) // block_size
        at = first
        while at < end and hashes[at] in self._present:
            at += 1
        return Match((at - first) * block_size, is_async=False)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self._requests[request.seq_id] = request
        end = request.num_computed_tokens // self._context.block_size
        for index in range(end - num_external_tokens // self._context.block_size, end):
            self._loads.append((request.block_hashes[index], block_ids[0][index]))

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        loads, self._loads = self._loads, []
        stores = list(self._new_blocks(output)) if self._config.stores else []
        if not (loads or stores):
            return NO_PAYLOAD
        return pack(
            SharedStorageStep(
                [each for each, _ in loads],
                [block for _, block in loads],
                [each for each, _ in stores],
                [block for _, block in stores],
            )
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if not output.worker_metadata:
            return
        report = unpack(output.worker_metadata, SharedStorageReport)
        for each in report.lost:
            self._present.discard(each)
            self._stored_by.pop(each, None)
        for each in report.stored:
            self._stored_by[each] = self._stored_by.get(each, 0) + 1
            if self._stored_by[each] == self._num_ranks:
                del self._stored_by[each]
                self._present.add(each)

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.seq_id, None)
        self._num_offered.pop(request.seq_id, None)
        return False, None

    def withdraw(self, request: Request) -> None:
        """Files stay; this engine reads none of them, and writes those anew that it fills."""
        self._present.difference_update(request.block_hashes)
        for each in request.block_hashes:
            self._stored_by.pop(each, None)

    def start_over(self) -> None:
        self._stored_by.clear()
        self._loads.clear()
        self._num_offered.clear()

    def reset_cache(self) -> bool:
        """Files stay, for others; this engine does not read those that were there before."""
        self._present.clear()
        return True

    def _new_blocks(self, output: SchedulerOutput) -> Iterable[tuple[bytes, int]]:
        """(hash, block) of what this step fills and no file has, but for what may be unsound."""
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
            first = self._num_offered.get(seq_id, 0)
            end = min(num_computed, request.num_tokens) // self._context.block_size
            if end <= first:
                continue
            self._num_offered[seq_id] = end
            hashes, (table, *_) = request.block_hashes, self._context.block_ids(seq_id)
            for index in range(first, end):
                if table[index] == NULL_BLOCK:
                    continue
                if hashes[index] not in self._present and hashes[index] not in self._stored_by:
                    self._stored_by[hashes[index]] = 0
                    yield hashes[index], table[index]

    def _found_in(self, folder: str) -> set[bytes]:
        """Blocks of which there is a file of every rank."""
        names = set(os.listdir(folder))
        hashes = {each for each in map(shared_storage_hash, names) if each}
        ranks = range(self._num_ranks)
        return {
            each
            for each in hashes
            if all(shared_storage_file(each, rank, self._num_ranks) in names for rank in ranks)
        }
