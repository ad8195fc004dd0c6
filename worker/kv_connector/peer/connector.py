"""The workers' half of the PeerConnector: leases of KV in this worker, loads from other daemons.

step      holds, drops ─▶ Leases ◀─ PeerServer ◀═══ sockets ═══ PeerFetcher ◀─ watches, loads
report    finished_sending ◀──┘                                      └─▶ finished_recving
"""

import secrets
from collections.abc import Sequence
from typing import Final

from proto.messages.kv_connector import NO_PAYLOAD, Payload, pack, unpack
from proto.messages.kv_peer import PeerLayout, PeerReport, PeerStep, PeerWorkerAddress
from proto.messages.stats import KVCopy
from proto.runtime.sockets import EventFd
from proto.settings.kv_peer import peer_settings, read_key
from proto.settings.kv_transfer_config import KVTransferConfig
from worker.attention.kv_cache import KVCache
from worker.kv_connector.base import FinishedTransfers, WorkerConnector, WorkerContext
from worker.kv_connector.peer.consumer import PeerFetcher
from worker.kv_connector.peer.producer import Leases, PeerServer

_ID_BYTES: Final = 16


class PeerWorker(WorkerConnector):
    """WorkerConnector that lets other daemons fetch blocks, and fetches theirs."""

    def __init__(self, config: KVTransferConfig, context: WorkerContext) -> None:
        self._config = config
        self._context = context
        self._settings = peer_settings(config.kv_connector_extra_config)
        self._event_fd = EventFd()
        self._address = PeerWorkerAddress(secrets.token_hex(_ID_BYTES), 0)
        self._leases: Leases | None = None
        self._server: PeerServer | None = None
        self._fetcher: PeerFetcher | None = None
        self._step = PeerStep()
        self._has_news = False
        self._invalid: list[int] = []
        self._copies: list[KVCopy] = []
        self._num_failed = 0

    def register_kv_caches(self, cache: KVCache) -> None:
        """Listen as a producer; raises ConfigError if that is not possible."""
        context, settings = self._context, self._settings
        secret, notify = read_key(settings), self._event_fd.notify
        rows = cache.block_rows()
        layout = PeerLayout(
            context.num_ranks,
            context.rank,
            context.block_size,
            cache.geometry.dtype,
            [group.sliding_window or 0 for group in cache.geometry.block_groups],
            rows.shape[1],
            context.fingerprint,
        )
        if self._config.stores:
            leases = Leases(context.device.block_bytes(rows), settings.lease_seconds, notify)
            worker_id = self._address.worker_id
            self._leases = leases
            self._server = PeerServer(settings, secret, worker_id, layout, leases, self._send_news)
            self._address = self._server.address
        if self._config.loads:
            copier = context.device.block_bytes(rows)
            self._fetcher = PeerFetcher(settings, secret, layout, copier, notify)
        self._send_news()

    def _send_news(self) -> None:
        """Have a report sent, even one without ended transfers. May be called from any thread."""
        self._has_news = True
        self._event_fd.notify()

    def fileno(self) -> int:
        return self._event_fd.descriptor

    def bind_connector_metadata(self, metadata: Payload) -> None:
        self._step = unpack(metadata, PeerStep) if metadata else PeerStep()

    def start_load_kv(self) -> None:
        step = self._step
        if self._server is not None and self._leases is not None:
            for hold in step.holds:
                self._server.begin_lease(hold)
            if step.drops:
                self._leases.drop(step.drops)
        if self._fetcher is not None:
            self._fetcher.watch(step.watches)
            for source, reason in step.releases:
                self._fetcher.release(source, reason)
            for load in step.loads:
                self._fetcher.start(load)

    def get_finished(self, finished_seq_ids: Sequence[int]) -> FinishedTransfers:
        self._event_fd.clear()
        sending = [] if self._leases is None else self._leases.pop_ended()
        recving = []
        for result in [] if self._fetcher is None else self._fetcher.pop_finished():
            recving.append(result.job_id)
            self._invalid += result.failed_blocks
            if result.succeeded:
                self._copies.append(KVCopy(result.num_bytes, result.seconds))
            else:
                self._num_failed += 1
        self._has_news |= bool(recving)
        return FinishedTransfers(sending, recving)

    def get_block_ids_with_load_errors(self) -> list[int]:
        invalid, self._invalid = self._invalid, []
        return invalid

    def build_connector_worker_meta(self) -> Payload:
        if not self._has_news:
            return NO_PAYLOAD
        self._has_news = False
        report = PeerReport(self._context.rank, self._address, self._copies, self._num_failed)
        self._copies, self._num_failed = [], 0
        return pack(report)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fetcher is not None:
            self._fetcher.close()
        self._event_fd.close()
