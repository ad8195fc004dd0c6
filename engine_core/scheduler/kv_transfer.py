"""KV transfers: loads through a KV connector, and requests that wait for them.

A waiting request is first looked up in the prefix cache. The connector may have KV of the tokens
after that: the workers load it before the request's first step computes, or a copy takes a while,
and then the request is given blocks and parked:

    queue ─▶ lookup ─┬▶ nothing found ─▶ admitted
                     ├▶ not known yet: parked until the connector unblocks it ─▶ queue
                     ├▶ loaded within the first step ─▶ admitted ─▶ confirmed by the result
                     └▶ blocks, WAITING_FOR_REMOTE_KVS ─▶ reported ─▶ queue ─▶ admitted

    tokens      |-- in the cache --|--- external ---|-- to be computed --|
    findable    |<---------------->|  external ones when the load is confirmed

Loaded KV is not findable before that. If a load fails, the request computes the tokens or ends, by
policy. Blocks stay out of the free queue while a worker may write or read them, also after the
request has ended. How KV is copied is the connector's business; nothing here waits for it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import NO_CONNECTOR, DevicePrefix, Match, SchedulerConnector
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import (
    Candidate,
    SchedulerFeature,
    SchedulerObserver,
    Unblock,
)
from engine_core.scheduler.preemption import SwapRule, WaitingBlockHolders
from engine_core.scheduler.request_lifecycle import RequestLifecycle
from engine_core.scheduler.step_plan import StepPlan
from proto.codec import changed, to_compact_json
from proto.messages.kv_connector import KVConnectorOutput, LoadFailurePolicy
from proto.messages.kv_events import KVEvent
from proto.messages.scheduler_output import BlockIds, SchedulerOutput


@dataclass(frozen=True, slots=True)
class _UnconfirmedLoad:
    """A load within a step whose result has not arrived. blocks: of the request at that step."""

    request: Request
    step: int
    blocks: frozenset[int]


class UnconfirmedLoads:
    """Requests whose KV is loaded within their first step, until the result of that step.

        admitted ─▶ in the step's message ─▶ its result arrives ─▶ confirmed: findable
                                  └─▶ a load has failed ─▶ forgotten here, and rewound

    Keeps the blocks that a request had at that step: a request that is preempted before the result
    has no blocks any more, and may have lost KV nevertheless.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._beginning: list[Request] = []
        self._unconfirmed: dict[int, _UnconfirmedLoad] = {}

    def add_admitted(self, request: Request) -> None:
        self._beginning.append(request)

    def set_step(self, step: int) -> None:
        """Note the number of the step that loads for the requests added last."""
        for request in self._beginning:
            tables = self._kv_cache.block_ids(request.seq_id)
            blocks = frozenset(chain.from_iterable(tables))
            self._unconfirmed[request.seq_id] = _UnconfirmedLoad(request, step, blocks)
        self._beginning.clear()

    def confirm_loads(self, step: int) -> None:
        """Make the KV findable that a step has loaded, after its result has arrived."""
        for seq_id, load in list(self._unconfirmed.items()):
            if load.step <= step:
                del self._unconfirmed[seq_id]
                request = load.request
                # Computed tokens may be drafts, of which windows must not free anything.
                confirmed = min(request.num_computed_tokens, request.num_tokens)
                self._kv_cache.confirm_loaded(request, confirmed)

    def has_lost(self, request: Request, bad: Collection[int]) -> bool:
        """Return whether a request was preempted whose load into these blocks has failed."""
        unconfirmed = self._unconfirmed.get(request.seq_id)
        return (
            unconfirmed is not None
            and request.status is not RequestStatus.RUNNING
            and not unconfirmed.blocks.isdisjoint(bad)
        )

    def forget_request(self, seq_id: int) -> None:
        self._unconfirmed.pop(seq_id, None)

    def clear(self) -> None:
        self._beginning.clear()
        self._unconfirmed.clear()

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._unconfirmed


IsStorable = Callable[[int], bool]
Connect = Callable[[TransferRefs, Unblock, IsStorable], SchedulerConnector]
"""Makes a connector, from: references that keep blocks, a function that unblocks a request whose
lookup is complete, and a function that says by seq_id whether a request's KV may be stored."""


def no_connector(
    holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
) -> SchedulerConnector:
    """Return the connector that has and stores nothing."""
    return NO_CONNECTOR


@dataclass(slots=True)
class _Load:
    """A load that is under way.

    num_tokens: leading tokens of the request that will have KV, as far as is known. begun: seconds.
    num_external: tokens that are loaded.
    """

    request: Request
    num_tokens: int
    begun: float
    num_external: int
    failed: bool = False


class KVTransferManager(SchedulerFeature):
    """Asks the connector for KV of waiting requests, and keeps the transfers that are under way.

    connector: also used directly by the engine's loop. rewound_until_step: by seq_id, the last step
    whose result is ignored for a request, because the step read KV that was never loaded, sampled
    without a mask, or computed an image without its output; written here only.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(
        self,
        connect: Connect,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        waiting_block_holders: WaitingBlockHolders,
        policy: LoadFailurePolicy,
        observer: SchedulerObserver,
        swap_rule: SwapRule,
        clock: Callable[[], float],
    ) -> None:
        self._kv_cache = kv_cache
        self._waiting = lifecycle.waiting
        self._waiting_block_holders = waiting_block_holders
        self._unblock = lifecycle.unblock
        self.fails_requests = policy == "fail"
        self._swap_rule = swap_rule
        self._clock = clock
        self.connector = connect(kv_cache.transfer_refs, self._unblock_looked_up, self.is_storable)
        self.connected = self.connector is not NO_CONNECTOR
        self._observer = observer
        self._plan: StepPlan | None = None
        self._awaiting_lookup: dict[int, Request] = {}
        self._loads: dict[int, _Load] = {}
        self._loaded: dict[int, Request] = {}
        self._without_kv: set[int] = set()  # ready requests only
        self._unconfirmed = UnconfirmedLoads(kv_cache)
        self._never_load_again: set[int] = set()
        self._left_loading: dict[int, BlockIds] = {}
        self._left_sending: dict[int, BlockIds] = {}
        self.rewound_until_step: dict[int, int] = {}
        self._rewound: dict[int, Request] = {}
        self._num_queried = 0
        self._num_hit = 0

    # Lookups

    def on_request_added(self, request: Request) -> None:
        if self.connected:
            self.connector.on_new_request(request)

    def begin_admission(self, plan: StepPlan) -> None:
        self._plan = plan

    def is_blocked(self, candidate: Candidate) -> bool:
        """Ask the connector how much KV it has for a request; True while it does not know yet."""
        if not self.connected:
            return False
        request = candidate.request
        if not self._may_load(candidate):
            return False
        num_local = candidate.computed.num_tokens
        match = self._match(candidate, num_local)
        if match.num_tokens is None:
            self._awaiting_lookup[request.seq_id] = request
            return True
        usable = self._usable(request, num_local, match.num_tokens)
        if request.num_preemptions and not self._swap_rule.loads(usable):
            usable = 0
        candidate.use_external(usable, is_async=match.is_async)
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._loaded.pop(request.seq_id, None)
        self._without_kv.discard(request.seq_id)

    def on_released(self, request: Request) -> None:
        """Forget a request; `on_ending` has kept the blocks that are still being copied."""
        seq_id = request.seq_id
        self._awaiting_lookup.pop(seq_id, None)
        self._loads.pop(seq_id, None)
        self._loaded.pop(seq_id, None)
        self._without_kv.discard(seq_id)
        self._unconfirmed.forget_request(seq_id)
        self._never_load_again.discard(seq_id)
        self.rewound_until_step.pop(seq_id, None)
        self._rewound.pop(seq_id, None)

    # Admission

    def has_room_to_load(self, candidate: Candidate) -> bool:
        """Return whether the whole request fits together with all others that load or were loaded.

        So a load begins only if its KV can be used, and two loads never hold the blocks that the
        other one needs.
        """
        kv_cache, request = self._kv_cache, candidate.request
        num_missing = request.num_tokens - candidate.num_computed_tokens
        needed = min(
            kv_cache.num_blocks_needed(request, num_missing, candidate.computed),
            kv_cache.max_blocks(request.num_tokens),
        )
        for load in self._loads.values():
            needed += self._blocks_to_come(load.request)
        for other in self._loaded.values():
            if other.num_computed_tokens:  # it has not lost its blocks
                needed += self._blocks_to_come(other)
        return needed <= kv_cache.num_available_blocks

    def begin_load(self, candidate: Candidate) -> None:
        """Park a request of the queue, which was given blocks, while its KV is loaded."""
        request = candidate.request
        num_tokens = candidate.num_computed_tokens + candidate.num_external_tokens
        self._waiting.park_request(request)
        self.on_parked(request)
        request.status = self.status
        request.num_computed_tokens = num_tokens
        self._loads[request.seq_id] = _Load(
            request, num_tokens, self._clock(), candidate.num_external_tokens
        )
        self._count(request, candidate.num_external_tokens)
        self._notify_allocated(request, candidate.num_external_tokens, is_async=True)

    def on_blocks_allocated(self, candidate: Candidate) -> None:
        """Tell the connector that an admitted request was given blocks, and what it has to load."""
        if not self.connected:
            return
        request, num_external = candidate.request, candidate.num_external_tokens
        if num_external:
            self._unconfirmed.add_admitted(request)
        if request.seq_id not in self._loaded:
            self._count(request, num_external)
        self._notify_allocated(request, num_external, is_async=False)

    # A step

    @property
    def wants_step(self) -> bool:
        """Whether the connector needs a step, even one without tokens."""
        return self.connected and self.connector.needs_step()

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way for which a request waits."""
        return bool(self._loads)

    @property
    def is_awaited(self) -> bool:
        """Whether the connector or the workers will report something that may unblock a request."""
        return bool(self._loads or self._awaiting_lookup or self._kv_cache.num_copied)

    @property
    def keeps_waiting(self) -> bool:
        """Whether a look-up of the connector or a copy is awaited, so that no step is expected."""
        return bool(self._awaiting_lookup) or self.awaits_copies

    @property
    def awaits_copies(self) -> bool:
        """Whether a request waits for a load, or for blocks that only an unfinished copy holds."""
        if self._loads:
            return True
        kv_cache, waiting = self._kv_cache, self._waiting
        if not waiting.num_ready or not kv_cache.num_copied:
            return False
        return kv_cache.awaits_copies(waiting.peek_request())

    def add_connector_metadata(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the message of a step with the connector's data for the workers."""
        if not self.connected:
            return output
        self._unconfirmed.set_step(output.step)
        metadata = self.connector.build_connector_meta(output)
        return changed(output, connector_metadata=metadata) if metadata else output

    def is_storable(self, seq_id: int) -> bool:
        """Return whether the KV of a sequence may be stored elsewhere.

        Not while it depends on a load that may still fail, nor while KV is being copied into blocks
        of the sequence.
        """
        return not (
            seq_id in self._unconfirmed or seq_id in self._loads or seq_id in self._left_loading
        )

    def resend_rewound(self, plan: StepPlan) -> None:
        """Describe rewound requests in full, because the workers have invalid tokens of them."""
        for seq_id, request in list(self._rewound.items()):
            if request.status is not RequestStatus.RUNNING or request in plan.admitted:
                del self._rewound[seq_id]
            elif request in plan.continued:
                plan.resend_full(request)
                del self._rewound[seq_id]

    def confirm_loads(self, step: int) -> None:
        self._unconfirmed.confirm_loads(step)
        for seq_id, last in list(self.rewound_until_step.items()):
            if last < step:
                del self.rewound_until_step[seq_id]

    # Reports

    def apply_report(self, output: KVConnectorOutput) -> None:
        """Process finished copies of the workers; called after `discard_invalid_blocks`."""
        self.connector.update_connector_output(output)
        for seq_id in output.finished_recving:
            self._end_load(seq_id)
        for seq_id in output.finished_sending:
            blocks = self._left_sending.pop(seq_id, None)
            if blocks is not None:
                self._kv_cache.release_copied(blocks)

    def discard_invalid_blocks(
        self,
        bad_blocks: Sequence[int],
        bad_slots: Sequence[int],
        requests: Iterable[Request],
        step: int,
    ) -> list[Request]:
        """Rewind the requests that depend on blocks whose load has failed.

        They compute the tokens from the first bad block on: at once, or when their load has ended.
        bad_slots: of recurrent states. step: the last scheduled one. Returns requests that have to
        be ended instead, by policy.
        """
        kv_cache, bad = self._kv_cache, set(bad_blocks)
        kv_cache.uncache_invalid(bad, bad_slots)
        failed = []
        for request in requests:
            num_valid = kv_cache.num_valid_tokens(request, bad, bad_slots)
            if num_valid is None and self._unconfirmed.has_lost(request, bad):
                num_valid = 0
            elif num_valid is None or num_valid >= request.num_computed_tokens:
                continue
            load = self._loads.get(request.seq_id)
            if load is not None:
                load.num_tokens = min(load.num_tokens, num_valid)
                load.failed = True
                request.num_computed_tokens = load.num_tokens
            else:
                self._rewind_lost(request, num_valid, step)
            if self.fails_requests:
                failed.append(request)
        return failed

    def pop_stats(self) -> tuple[int, int]:
        """Return (tokens looked up, tokens found) in the connector since the last call."""
        stats = (self._num_queried, self._num_hit)
        self._num_queried = self._num_hit = 0
        return stats

    def pop_events(self) -> Iterable[KVEvent]:
        return self.connector.take_events()

    # Ends

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """Keep the blocks of a request while they are being copied."""
        if not self.connected:
            return
        seq_id = request.seq_id
        tables = self._kv_cache.block_ids(seq_id)
        delays, params = self.connector.request_finished(request, tables)
        if params:
            request.kv_transfer_params = to_compact_json(params)
        if delays:
            self._kv_cache.hold_for_copies(tables)
            self._left_sending[seq_id] = tables
        if seq_id in self._loads:
            self._kv_cache.hold_for_copies(tables)
            self._left_loading[seq_id] = tables

    def is_loaded(self, request: Request) -> bool:
        return request.seq_id in self._loaded

    def note_without_kv(self, request: Request) -> None:
        """Note that a ready request has to compute more than a block of its prompt."""
        self._without_kv.add(request.seq_id)

    @property
    def num_without_kv(self) -> int:
        """Number of ready requests that have to compute more than a block of their prompts."""
        return len(self._without_kv)

    def on_parked(self, request: Request) -> None:
        """Forget what is known of a request that is not ready any more: it will be asked again."""
        self._without_kv.discard(request.seq_id)

    def is_without_kv(self, request: Request) -> bool:
        """Return whether the connector had less for a ready request than all KV but a block.

        So a long queue is not looked up again in every step.
        """
        return request.seq_id in self._without_kv

    def discard_content(self, request: Request, num_valid: int = 0) -> None:
        """Make wrong KV of a request, after its first tokens, unfindable; in the connector, all.

        Also of a request that has ended, whose blocks may have been found and stored since. Equal
        content of other requests becomes unfindable, too.
        """
        self._kv_cache.uncache_content(request, num_valid)
        self.connector.invalidate_request(request)

    def drop_loads(self) -> None:
        """Return requests that load to the queue; their blocks are kept until the copies end."""
        for seq_id, load in list(self._loads.items()):
            tables = self._kv_cache.block_ids(seq_id)
            self._kv_cache.hold_for_copies(tables)
            self._left_loading[seq_id] = tables
            self._abandon(load.request)
        self._loads.clear()

    def forget_transfers(self) -> None:
        """Forget all copies: workers of a new epoch will not report them."""
        for load in list(self._loads.values()):
            self._abandon(load.request)
        for request in list(self._awaiting_lookup.values()):
            self._unblock_looked_up(request)
        self._loads.clear()
        self._loaded.clear()
        self._without_kv.clear()
        self._unconfirmed.clear()
        self._never_load_again.clear()
        self.rewound_until_step.clear()
        self._rewound.clear()
        self._left_loading.clear()
        self._left_sending.clear()
        self.connector.on_worker_restart()
        self._kv_cache.release_all_copied()

    def reset_cache(self) -> bool:
        """Clear the connector's cache; False while copies prevent it."""
        return self.connector.reset_cache()

    def close(self) -> None:
        self.connector.close()

    # Internals

    def _match(self, candidate: Candidate, num_local: int) -> Match:
        """Ask the connector what it has after the tokens that are cached."""
        request, kv_cache = candidate.request, self._kv_cache
        if not kv_cache.has_states:
            return self.connector.get_num_new_matched_tokens(request, num_local)
        num_with_kv = num_local
        if candidate.computed.kv_after:
            num_with_kv = candidate.computed.num_with_kv
        on_device = DevicePrefix(num_with_kv, kv_cache.state_ends(request, num_local))
        return self.connector.match_with_states(request, num_local, on_device)

    def _may_load(self, candidate: Candidate) -> bool:
        """Return whether the connector is asked: not for requests with blocks or a failed load."""
        request = candidate.request
        if request.num_computed_tokens or request.skip_reading_prefix_cache:
            return False
        if request.num_output_placeholders or candidate.computed.tails:
            return False
        if request.seq_id in self._never_load_again or request.seq_id in self._left_loading:
            return False
        return self._plan is None or request not in self._plan.preempted

    def _usable(self, request: Request, num_local: int, num_matched: int) -> int:
        """Return how many tokens to load: whole blocks, with at least one token left to compute.

        That token may be in the last loaded block, except with windows, where the blocks that a
        token needs are known only from the end of a block on. For a draft head the last block is
        computed again (`KVCacheManager`); with windows nothing is loaded then, because
        a connector has matched the blocks that the end of the match needs.
        """
        most = request.num_tokens - (1 if not self._kv_cache.caches_all_prefixes else 0)
        if request.num_tokens == 1:
            return 0
        most -= most % self._kv_cache.block_size
        if self._kv_cache.has_states and num_matched > most - num_local:
            return 0  # there may be no state where the load would end
        num_dropped = self._kv_cache.num_dropped_blocks * self._kv_cache.block_size
        if num_dropped and not self._kv_cache.caches_all_prefixes:
            return 0
        return max(0, min(num_matched, most - num_local) - num_dropped)

    def _blocks_to_come(self, request: Request) -> int:
        """Return how many free blocks the rest of a request's tokens will need."""
        num_missing = request.num_tokens - request.num_computed_tokens
        return min(
            self._kv_cache.num_blocks_needed(request, num_missing),
            self._kv_cache.max_blocks(request.num_tokens),
        )

    def _notify_allocated(self, request: Request, num_external: int, *, is_async: bool) -> None:
        if num_external:
            name = type(self.connector).__name__
            self._observer.on_external_hit(request, num_external, name, is_async=is_async)
        tables = self._kv_cache.block_ids(request.seq_id)
        self.connector.update_state_after_alloc(request, tables, num_external)

    def _count(self, request: Request, num_external: int) -> None:
        if request.num_preemptions == 0:
            self._num_queried += request.num_tokens
            self._num_hit += num_external
            request.num_external_tokens = num_external

    def _unblock_looked_up(self, request: Request) -> None:
        if self._awaiting_lookup.pop(request.seq_id, None) is not None:
            self._unblock(request)

    def _end_load(self, seq_id: int) -> None:
        """End a load that all ranks have reported; if its request has ended, release the blocks."""
        load = self._loads.pop(seq_id, None)
        if load is None:
            blocks = self._left_loading.pop(seq_id, None)
            if blocks is not None:
                self._kv_cache.release_copied(blocks)
            return
        request, kv_cache = load.request, self._kv_cache
        if load.failed:
            self._never_load_again.add(seq_id)
        else:
            self._swap_rule.learn_load(load.num_external, self._clock() - load.begun)
        if load.num_tokens:
            kv_cache.confirm_loaded(request, load.num_tokens)
            request.num_computed_tokens = min(load.num_tokens, request.num_tokens - 1)
            self._loaded[seq_id] = request
            self._waiting_block_holders.add_pending(request)
            self._unblock(request)
        else:
            self._abandon(request)

    def _abandon(self, request: Request) -> None:
        """Return a request to the queue without its blocks."""
        self._kv_cache.free(request)
        request.num_computed_tokens = 0
        self._unblock(request)

    def _rewind_lost(self, request: Request, num_valid: int, step: int) -> None:
        """Rewind a request whose KV after its last valid token was not loaded."""
        seq_id = request.seq_id
        num_valid = min(num_valid, request.num_tokens - 1)  # drafts in flight may be beyond
        self._unconfirmed.forget_request(seq_id)
        self._never_load_again.add(seq_id)
        self._kv_cache.rewind(request, num_valid)
        self.rewind_request(request, num_valid, step)

    def ignore_results(self, request: Request, step: int) -> None:
        """Ignore the results of a request in all steps up to this one."""
        request.num_output_placeholders = 0
        self.rewound_until_step[request.seq_id] = step

    def rewind_request(self, request: Request, num_valid: int, step: int) -> None:
        """Have a request compute its tokens from `num_valid` on again.

        step: the last scheduled one; the results of steps in flight are ignored for the request.
        """
        seq_id = request.seq_id
        request.num_computed_tokens = num_valid
        request.spec_token_ids.clear()
        self.ignore_results(request, step)
        if request.status is RequestStatus.RUNNING:
            self._rewound[seq_id] = request
        if not num_valid:
            self._kv_cache.free(request)
            self._waiting_block_holders.forget_request(request)
            self._loaded.pop(seq_id, None)
