"""The copying half of the offloading connector, in each worker.

    step N      bind: loads L, stores S      ─▶ stores put off in N-1 begin, then L    [ computed ]
    step N + 1  bind                         ─▶ S begin                                [ computed ]

Stores wait for the step that follows, so that they come after what this step's tokens need.
Owns which copies were put off, and for whom loads are; the copies are the handlers'.
"""

from collections.abc import Sequence
from typing import ClassVar

from proto.event_fd import EventFd
from proto.kv_connector import (
    NO_PAYLOAD,
    FinishedJob,
    OffloadMetadata,
    OffloadReport,
    Payload,
    TransferJob,
    pack,
    unpack,
)
from proto.kv_transfer_config import KVTransferConfig, offload_settings
from worker.kv_cache import KVCache
from worker.kv_connector.base import Finished, WorkerContext
from worker.kv_connector.offload.base import HandlerContext, TransferResult
from worker.kv_connector.offload.specs import create_handlers
from worker.kv_connector.offload.transfers import NO_TRANSFERS, Transfers

_NOTHING = OffloadMetadata()


class OffloadingWorker:
    """WorkerConnector of one epoch."""

    per_layer: ClassVar[bool] = False

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self._extra = config.kv_connector_extra_config
        self._context = context
        self._event_fd = EventFd()
        self._transfers = NO_TRANSFERS
        self._metadata = _NOTHING
        self._put_off: list[TransferJob] = []
        self._waiting: dict[int, int] = {}
        self._finished: list[FinishedJob] = []
        self._invalid_blocks: list[int] = []

    def register_kv_caches(self, cache: KVCache) -> None:
        """Raises ConfigError naming the key of kv_connector_extra_config that is wrong."""
        context = self._context
        windows = [group.sliding_window for group in cache.geometry.groups]
        settings, factor = offload_settings(self._extra, context.block_size, windows)
        handler_context = HandlerContext(
            cache=cache,
            factor=factor,
            rank=context.rank,
            num_ranks=context.num_ranks,
            fingerprint=context.fingerprint,
            notify=self._event_fd.notify,
        )
        self._transfers = Transfers(create_handlers(settings, self._extra, handler_context))

    def fileno(self) -> int:
        return self._event_fd.descriptor

    def bind_connector_metadata(self, metadata: Payload) -> None:
        self._metadata = _NOTHING if metadata == NO_PAYLOAD else unpack(metadata, OffloadMetadata)

    def handle_preemptions(self) -> None:
        self._begin_put_off()
        if self._metadata.flush:
            self._transfers.wait(self._metadata.flush)

    def start_load_kv(self) -> None:
        self._begin_put_off()
        metadata = self._metadata
        for job, seq_id in zip(metadata.loads, metadata.load_seq_ids, strict=True):
            self._waiting[job.job_id] = seq_id
            self._transfers.transfer_async(job)

    def wait_for_layer_load(self, layer: int) -> None:
        """Whole blocks are loaded, for requests that wait for all of them."""

    def save_kv_layer(self, layer: int) -> None:
        """Blocks are stored once all layers are in them."""

    def wait_for_save(self) -> None:
        """Put this step's stores off; nothing that is being copied is overwritten."""
        self._put_off += self._metadata.stores
        self._metadata = _NOTHING

    def get_finished(self, finished_seq_ids: Sequence[int]) -> Finished:
        """Requests that are over keep no blocks waiting: the deciding half holds those."""
        self._event_fd.clear()
        loaded = [self._take_in(result) for result in self._transfers.get_finished()]
        return Finished([], [seq_id for seq_ids in loaded for seq_id in seq_ids])

    def take_invalid_blocks(self) -> list[int]:
        taken, self._invalid_blocks = self._invalid_blocks, []
        return taken

    def build_connector_worker_meta(self) -> Payload:
        if not self._finished:
            return NO_PAYLOAD
        finished, self._finished = self._finished, []
        return pack(OffloadReport(finished))

    def close(self) -> None:
        self._transfers.close()
        self._event_fd.close()

    def _begin_put_off(self) -> None:
        stores, self._put_off = self._put_off, []
        for job in stores:
            self._transfers.transfer_async(job)

    def _take_in(self, result: TransferResult) -> list[int]:
        """A copy is over; the request that waited for it, if one did."""
        self._finished.append(
            FinishedJob(
                result.job_id, result.succeeded, result.num_bytes, result.seconds, result.cancelled
            )
        )
        self._invalid_blocks += result.failed_blocks
        seq_id = self._waiting.pop(result.job_id, None)
        return [] if seq_id is None else [seq_id]
