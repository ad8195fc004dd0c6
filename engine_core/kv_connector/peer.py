"""Prefill and decode in two daemons: the scheduler's half of the PeerConnector.

    producer    prompt, one token ─▶ request_finished: blocks are kept, the answer has their names
    workers     a lease: 30 s, longer with heartbeats; ends with the consumer's Release
    consumer    on_new_request: heartbeats ─▶ match ─▶ blocks ─▶ the load ─▶ admitted ─▶ its tokens

The consumer loads the full blocks of the prompt, computes the rest and samples all tokens itself.
So choices, grammars, log-probabilities, usage and drafts are as in one daemon, and nothing is lost
if the load fails. Blocks are asked for by the hashes that the consumer has computed from its own
request, with salt, adapter and images in them; ids from a client only say how many there are.
"""

import logging
import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_connector.base import (
    NO_MATCH,
    NOT_KNOWN_YET,
    Match,
    SchedulerConnector,
    SchedulerContext,
)
from engine_core.kv_connector.offload.planners import Extent, first_needed, longest_hit
from engine_core.kv_connector.offload.tracking import BlockLayout
from engine_core.request import Request, RequestStatus
from proto.errors import InvalidRequestError, ProtocolError
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    DeviceBlocks,
    KVConnectorOutput,
    Payload,
    TransferJob,
    pack,
    unpack,
)
from proto.messages.kv_peer import (
    PeerHold,
    PeerLoad,
    PeerReport,
    PeerSource,
    PeerStep,
    PeerWorkerAddress,
)
from proto.messages.scheduler_output import BlockIds, SchedulerOutput
from proto.messages.stats import KVCopy, KVMediumStats
from proto.settings.kv_peer import TransferParams, peer_settings, transfer_params
from proto.settings.kv_transfer_config import KVTransferConfig

logger = logging.getLogger("tokend.kv_peer")

_ID_BYTES: Final = 16
_MEDIUM: Final = "peer"
_HANDED_OVER: Final = (RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class _Remote:
    """KV that another daemon has of a waiting request. hit: tokens up to the end of the match."""

    request: Request
    params: TransferParams
    source: PeerSource
    hit: int = 0


class PeerScheduler(SchedulerConnector):
    """SchedulerConnector that keeps KV for another daemon, and loads KV from one."""

    def __init__(self, config: KVTransferConfig, context: SchedulerContext) -> None:
        """Raises ConfigError naming the wrong key of kv_connector_extra_config."""
        self._settings = peer_settings(config.kv_connector_extra_config)
        self._config = config
        self._context = context
        windows = [group.sliding_window for group in context.geometry.block_groups]
        self._layout = BlockLayout(context.block_size, 1, windows, context.num_ranks)
        self._engine_id = secrets.token_hex(_ID_BYTES)
        self._addresses: dict[int, PeerWorkerAddress] = {}  # by rank
        self._to_hand_over: set[int] = set()  # seq_ids
        self._held: dict[int, PeerHold] = {}  # by seq_id, until the workers have ended their leases
        self._remote: dict[int, _Remote] = {}  # by seq_id, until it is admitted or loads
        self._loading: dict[int, str] = {}  # remote request id by seq_id
        self._waiting: dict[int, Request] = {}  # for the load of another choice
        self._step = PeerStep([], [], [], [], [])
        self._copies: list[KVCopy] = []
        self._num_failed = 0

    # The consumer

    def on_new_request(self, request: Request) -> None:
        """Note what a request asks for; from now on the producer gets heartbeats for its KV."""
        if not request.kv_transfer_request:
            return
        try:
            params = transfer_params(msgspec.json.decode(request.kv_transfer_request))
        except (InvalidRequestError, ProtocolError, msgspec.DecodeError) as error:
            logger.warning("request %s: %s", request.label, error)
            return
        if params.do_remote_decode and self._config.stores and request.choice == 0:
            self._to_hand_over.add(request.seq_id)
        elif params.do_remote_prefill and self._config.loads and any(params.remote_block_ids or ()):
            source = params.source
            if not self._is_wanted(source.request_id):
                self._step.watches.append(source)
            self._remote[request.seq_id] = _Remote(request, params, source)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        remote = self._remote.get(request.seq_id)
        if remote is None:
            return NO_MATCH
        if remote.source.request_id in self._loading.values():
            self._waiting[request.seq_id] = request
            return NOT_KNOWN_YET
        size = self._layout.block_size
        limit = (request.num_tokens - 1) // size * size
        extent = Extent(num_computed_tokens, limit, size)
        ids = remote.params.remote_block_ids or []
        if extent.computed >= limit or len(ids) != len(self._layout.windows):
            return NO_MATCH
        end = min(len(request.block_hashes), limit // size)
        groups = [
            (window, [block != NULL_BLOCK for block in blocks[extent.first : end]])
            for window, blocks in zip(self._layout.windows, ids, strict=True)
        ]
        remote.hit = longest_hit(extent, groups)
        return Match(max(0, remote.hit - num_computed_tokens), is_async=True)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        remote = self._remote.pop(request.seq_id, None)
        if remote is None:
            return
        if not num_external_tokens:
            self._leave(remote, "the consumer has the KV, or computes it")
            return
        layout = self._layout
        end = min(remote.hit, request.num_computed_tokens)
        device, keys = [], []
        for group, (window, table) in enumerate(zip(layout.windows, block_ids, strict=False)):
            first = first_needed(window, end - num_external_tokens, end) // layout.block_size
            last = end // layout.block_size
            assert NULL_BLOCK not in table[first:last], f"{request!r} lacks blocks to load into"
            device.append(DeviceBlocks(group, table[first:last]))
            keys.append(layout.keys(request.block_hashes, group, first, last))
        job = TransferJob(request.seq_id, _MEDIUM, True, device, [], keys)
        self._step.loads.append(PeerLoad(remote.source, request.tenant, job))
        self._loading[request.seq_id] = remote.source.request_id

    def _leave(self, remote: _Remote, reason: str) -> None:
        """Let the producer free the KV of a request, unless another choice may load it."""
        if not self._is_wanted(remote.source.request_id):
            self._step.releases.append((remote.source, reason))

    def _is_wanted(self, request_id: str) -> bool:
        """Return whether a choice loads the KV of the producer's request, or may load it."""
        return request_id in self._loading.values() or any(
            remote.source.request_id == request_id for remote in self._remote.values()
        )

    def _end_load(self, seq_id: int) -> None:
        """Process the end of a load: the workers have released the producer's KV by now."""
        request_id = self._loading.pop(seq_id, None)
        if request_id is None:
            return
        for choice in [
            each.request.seq_id
            for each in self._remote.values()
            if each.source.request_id == request_id
        ]:
            del self._remote[choice]
        self._unblock_all()

    def _unblock_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._context.unblock(request)

    # The producer

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the full blocks of a request that another daemon goes on with.

        A prompt without a full block, and one whose workers have not said where they listen, are
        answered without blocks: the consumer computes them.
        """
        seq_id = request.seq_id
        self._waiting.pop(seq_id, None)
        remote = self._remote.pop(seq_id, None)
        if remote is not None:
            self._leave(remote, "the request has ended")
        if seq_id not in self._to_hand_over:
            return False, None
        self._to_hand_over.discard(seq_id)
        if request.status not in _HANDED_OVER or not self._context.is_storable(seq_id):
            return False, None
        layout, hashes = self._layout, request.block_hashes
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        end = min(num_tokens // layout.block_size, len(hashes))
        if len(self._addresses) < self._context.num_ranks:
            end = 0
        tables = [table[:end] for table in block_ids[: len(layout.windows)]]
        held = {
            key: block
            for group, table in enumerate(tables)
            for key, block in zip(layout.keys(hashes, group, 0, end), table, strict=True)
            if block != NULL_BLOCK
        }
        request_id = secrets.token_hex(_ID_BYTES)
        if held:
            hold = PeerHold(seq_id, request_id, request.tenant, list(held), list(held.values()))
            self._held[seq_id] = hold
            self._step.holds.append(hold)
        return bool(held), self._answer(request_id, tables, has_blocks=bool(held))

    def _answer(
        self, request_id: str, tables: list[list[int]], *, has_blocks: bool
    ) -> dict[str, Any]:
        """Return the parameters with which a router sends the request to the consumer."""
        workers = [self._addresses[rank] for rank in sorted(self._addresses)]
        return {
            "do_remote_prefill": has_blocks,
            "do_remote_decode": False,
            "remote_block_ids": tables,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self._settings.host,
            "remote_port": workers[0].port if workers else 0,
            "tp_size": self._context.num_ranks,
            "remote_workers": [{"id": each.worker_id, "port": each.port} for each in workers],
        }

    # Steps and reports

    def needs_step(self) -> bool:
        return any(getattr(self._step, name) for name in PeerStep.__struct_fields__)

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        if not self.needs_step():
            return NO_PAYLOAD
        step, self._step = self._step, PeerStep([], [], [], [], [])
        return pack(step)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.worker_metadata:
            report = unpack(output.worker_metadata, PeerReport)
            self._addresses[report.rank] = report.address
            self._copies += report.loads
            self._num_failed += report.num_failed
        for seq_id in output.finished_recving:
            self._end_load(seq_id)
        for seq_id in output.finished_sending:
            self._held.pop(seq_id, None)

    def drain_stats(self) -> list[KVMediumStats]:
        copies, self._copies = self._copies, []
        num_failed, self._num_failed = self._num_failed, 0
        return [KVMediumStats(_MEDIUM, loads=copies, num_failed=num_failed)]

    def invalidate_request(self, request: Request) -> None:
        """End the leases of blocks with the content of a request, whose KV may be corrupt."""
        wrong = set(self._layout.all_keys(request.block_hashes, len(request.block_hashes)))
        self._step.drops.extend(
            seq_id for seq_id, hold in self._held.items() if not wrong.isdisjoint(hold.keys)
        )

    def reset_cache(self) -> bool:
        """End all leases; their blocks are free when the workers have reported that."""
        self._step.drops.extend(self._held)
        return True

    def on_worker_restart(self) -> None:
        """Forget leases and loads; new workers send the heartbeats of requests that still wait."""
        self._addresses.clear()
        self._held.clear()
        self._loading.clear()
        sources = {each.source.request_id: each.source for each in self._remote.values()}
        self._step = PeerStep([], [], list(sources.values()), [], [])
        self._unblock_all()
