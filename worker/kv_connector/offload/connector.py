"""The workers' half of the offloading connector.

    step N      bind: loads L, stores S      ─▶ stores of step N-1 start, then L       [ computed ]
    step N + 1  bind                         ─▶ S starts                               [ computed ]

Stores start one step later, so that they do not delay the step that planned them. The handlers of
the medium make the copies.
"""

from collections.abc import Sequence

from proto.messages.kv_connector import (
    NO_PAYLOAD,
    FinishedJob,
    OffloadMetadata,
    OffloadReport,
    Payload,
    TransferJob,
    pack,
    unpack,
)
from proto.messages.kv_events import DEVICE_MEDIUM
from proto.runtime.sockets import EventFd
from proto.settings.kv_transfer_config import KVTransferConfig, OffloadSettings, offload_settings
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import StateCache
from worker.kv_connector.base import FinishedTransfers, WorkerConnector, WorkerContext
from worker.kv_connector.offload.base import (
    BlockRows,
    Direction,
    HandlerContext,
    OffloadingHandler,
    TransferResult,
    create_handlers,
)

_NO_METADATA = OffloadMetadata()


class OffloadingWorker(WorkerConnector):
    """WorkerConnector that starts copies, waits for them and reports them."""

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self._extra = config.kv_connector_extra_config
        self._context = context
        self._event_fd = EventFd()
        self._handlers: dict[Direction, OffloadingHandler] = {}
        self._state_handlers: dict[Direction, OffloadingHandler] = {}
        self._metadata = _NO_METADATA
        self._deferred: list[TransferJob] = []
        self._loading_seq_ids: dict[int, int] = {}
        self._loads_of_states: set[int] = set()
        self._finished: list[FinishedJob] = []
        self._invalid_blocks: list[int] = []
        self._invalid_slots: list[int] = []

    def register_kv_caches(self, cache: KVCache) -> None:
        """Create the handlers; raises ConfigError naming the wrong key of the configuration."""
        geometry = cache.geometry
        windows = [group.sliding_window for group in geometry.block_groups]
        has_states = len(windows) < len(geometry.groups)
        settings, factor = offload_settings(
            self._extra, self._context.block_size, windows, has_states=has_states
        )
        share = 1.0 - settings.state_share if has_states else 1.0
        self._handlers = self._create_handlers(settings, cache, factor, share)

    def register_states(self, states: StateCache) -> None:
        """Create the handlers of states, each of which is a block of its own on the medium."""
        settings, _ = offload_settings(self._extra, self._context.block_size, ())
        self._state_handlers = self._create_handlers(
            settings, states, 1, settings.state_share, holds_states=True
        )

    def _create_handlers(
        self,
        settings: OffloadSettings,
        cache: BlockRows,
        factor: int,
        share: float,
        *,
        holds_states: bool = False,
    ) -> dict[Direction, OffloadingHandler]:
        context = self._context
        handler_context = HandlerContext(
            cache=cache,
            factor=factor,
            device=context.device,
            rank=context.rank,
            num_ranks=context.num_ranks,
            fingerprint=context.fingerprint,
            notify=self._event_fd.notify,
            holds_states=holds_states,
            share=share,
        )
        return dict(create_handlers(settings, self._extra, handler_context))

    def fileno(self) -> int:
        return self._event_fd.descriptor

    def bind_connector_metadata(self, metadata: Payload) -> None:
        self._deferred += self._metadata.stores
        self._metadata = (
            _NO_METADATA if metadata == NO_PAYLOAD else unpack(metadata, OffloadMetadata)
        )

    def handle_preemptions(self) -> None:
        self._start_deferred()
        if self._metadata.flush:
            for handler in self._all_handlers:
                handler.wait(set(self._metadata.flush))

    def start_load_kv(self) -> None:
        self._start_deferred()
        metadata = self._metadata
        for job, seq_id in zip(metadata.loads, metadata.load_seq_ids, strict=True):
            self._loading_seq_ids[job.job_id] = seq_id
            if job.is_of_states:
                self._loads_of_states.add(job.job_id)
            self._start_copy(job)

    def get_finished(self, finished_seq_ids: Sequence[int]) -> FinishedTransfers:
        """Return finished loads; the scheduler's half keeps blocks of stores allocated itself."""
        self._event_fd.clear()
        loaded = [
            self._record_result(result)
            for handler in self._all_handlers
            for result in handler.get_finished()
        ]
        return FinishedTransfers([], [seq_id for seq_ids in loaded for seq_id in seq_ids])

    def get_block_ids_with_load_errors(self) -> list[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, []
        return invalid

    def get_state_slots_with_load_errors(self) -> list[int]:
        invalid, self._invalid_slots = self._invalid_slots, []
        return invalid

    def build_connector_worker_meta(self) -> Payload:
        if not self._finished:
            return NO_PAYLOAD
        finished, self._finished = self._finished, []
        return pack(OffloadReport(finished))

    def close(self) -> None:
        for handler in self._all_handlers:
            handler.close()
        self._event_fd.close()

    def _start_copy(self, job: TransferJob) -> None:
        direction = (DEVICE_MEDIUM, job.medium)
        handlers = self._state_handlers if job.is_of_states else self._handlers
        handlers[direction[::-1] if job.is_load else direction].transfer_async(job)

    @property
    def _all_handlers(self) -> list[OffloadingHandler]:
        return [*self._handlers.values(), *self._state_handlers.values()]

    def _start_deferred(self) -> None:
        stores, self._deferred = self._deferred, []
        for job in stores:
            self._start_copy(job)

    def _record_result(self, result: TransferResult) -> list[int]:
        """Record a finished copy; return the sequence id that waits for no other, in a list."""
        self._finished.append(
            FinishedJob(
                result.job_id, result.succeeded, result.num_bytes, result.seconds, result.cancelled
            )
        )
        is_of_states = result.job_id in self._loads_of_states
        self._loads_of_states.discard(result.job_id)
        invalid = self._invalid_slots if is_of_states else self._invalid_blocks
        invalid += result.failed_blocks
        seq_id = self._loading_seq_ids.pop(result.job_id, None)
        if seq_id is None or seq_id in self._loading_seq_ids.values():
            return []
        return [seq_id]
