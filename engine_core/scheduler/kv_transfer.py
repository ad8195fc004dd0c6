"""KV that is elsewhere, and the requests that wait for it, as the scheduler sees them.

A waiting request is first looked up in the prefix cache. What that lacks the connector may
have: in a form that the workers load before the step computes, or by a copy that takes a while.
Then the request is given blocks for it and set aside:

    line ─▶ asked ─┬▶ nothing elsewhere ─▶ admitted
                   ├▶ not known yet: aside until the connector wakes it ─▶ line
                   ├▶ loaded in its first step ─▶ admitted ─▶ proven by the result
                   └▶ blocks, WAITING_FOR_REMOTE_KVS ─▶ reported ─▶ line, with blocks ─▶ admitted

    tokens      |-- in the cache --|--- external ---|-- to be computed --|
    findable    |<---------------->|  when the load is known to be good

Nothing that was to be loaded can be found by anybody before that, and where it failed nobody
ever finds it: the request computes it, or ends, by policy. Blocks stay out of the pool as long as a
worker may write to them or read them, whatever becomes of the request.

Owns the loads, the blocks of requests that are over and still being copied, and the
statistics of what was found elsewhere. Neither knows how anything is copied nor waits for it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import NO_CONNECTOR, SchedulerConnector
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Candidate, SchedulerObserver, Unblock
from engine_core.scheduler.preemption import NonRunningBlocks, SwapRule
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.codec import changed, to_compact_json
from proto.kv_connector import KVConnectorOutput, LoadFailurePolicy
from proto.kv_events import KVEvent
from proto.scheduler_output import SchedulerOutput

# Requests whose KV is loaded within their first step: not known to be there before its result.
#
#     admitted ─▶ begins ─▶ sent with a step ─▶ its result is here ─▶ proven: others may find it
#                                 └─▶ a load has failed ─▶ forgotten here, rewound elsewhere
#
# Owns these requests, and the blocks they had when their step was sent: a request preempted before
# the result is here has none by then, and may have lost KV all the same.


@dataclass(frozen=True, slots=True)
class _UnconfirmedLoad:
    """Loaded for in this step, whose result is not here. blocks: its tables by then."""

    request: Request
    step: int
    blocks: frozenset[int]


class UnconfirmedLoads:
    """By seq_id; what the KV cache is told when they are proven."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._beginning: list[Request] = []
        self._unconfirmed: dict[int, _UnconfirmedLoad] = {}

    def begin(self, request: Request) -> None:
        """It is loaded for in the step that is being decided."""
        self._beginning.append(request)

    def note_step(self, step: int) -> None:
        """This is the step."""
        for request in self._beginning:
            tables = self._kv_cache.block_ids(request.seq_id)
            blocks = frozenset(chain.from_iterable(tables))
            self._unconfirmed[request.seq_id] = _UnconfirmedLoad(request, step, blocks)
        self._beginning.clear()

    def confirm_loads(self, step: int) -> None:
        """The result of a step is here, and nobody has said that its loads failed."""
        for seq_id, each in list(self._unconfirmed.items()):
            if each.step <= step:
                del self._unconfirmed[seq_id]
                self._kv_cache.confirm_loaded(each.request, each.request.num_computed_tokens)

    def has_lost(self, request: Request, bad: Collection[int]) -> bool:
        """It began with a load that failed, and gave way before anybody knew."""
        unconfirmed = self._unconfirmed.get(request.seq_id)
        return (
            unconfirmed is not None
            and request.status is not RequestStatus.RUNNING
            and not unconfirmed.blocks.isdisjoint(bad)
        )

    def forget(self, seq_id: int) -> None:
        """Nothing of it is to be proven."""
        self._unconfirmed.pop(seq_id, None)

    def clear(self) -> None:
        """No step is in flight any more."""
        self._beginning.clear()
        self._unconfirmed.clear()

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._unconfirmed


IsStorable = Callable[[int], bool]
Connect = Callable[[TransferRefs, Unblock, IsStorable], SchedulerConnector]
"""Makes a connector from the references it may take, the way to wake who was told to wait, and
whether what a request computes, by seq_id, may be stored."""


def no_connector(
    holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
) -> SchedulerConnector:
    """Connect to nothing."""
    return NO_CONNECTOR


@dataclass(slots=True)
class _Load:
    """num_tokens: leading tokens of the request with KV once it is over, as far as is known.

    begun: seconds of the clock. num_external: tokens that are loaded.
    """

    request: Request
    num_tokens: int
    begun: float
    num_external: int
    failed: bool = False


class KVTransferManager:
    """An admission gate that asks the connector for KV, and the loads that are under way.

    waiting: a request is parked in it while its KV is loaded. non_running_blocks: gets requests
    whose load has finished, until they run.
    discard_until_step: by seq_id, the last step whose result does not count for a request, because
    that step read KV that was never loaded. Written here only.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(
        self,
        connect: Connect,
        kv_cache: KVCacheManager,
        waiting: RequestQueue,
        non_running_blocks: NonRunningBlocks,
        policy: LoadFailurePolicy,
        observer: SchedulerObserver,
        swap_rule: SwapRule,
        clock: Callable[[], float],
    ) -> None:
        self._kv_cache = kv_cache
        self._waiting = waiting
        self._non_running_blocks = non_running_blocks
        self.fails_requests = policy == "fail"
        self._swap_rule = swap_rule
        self._clock = clock
        self.connector = connect(kv_cache.transfer_refs, self._unblock_asked, self.is_storable)
        self.connected = self.connector is not NO_CONNECTOR
        self._observer = observer
        self._plan: StepPlan | None = None
        self._asked: dict[int, Request] = {}
        self._loads: dict[int, _Load] = {}
        self._loaded: dict[int, Request] = {}
        self._unconfirmed = UnconfirmedLoads(kv_cache)
        self._given_up: set[int] = set()
        self._left_loading: dict[int, list[int]] = {}
        self._left_sending: dict[int, list[int]] = {}
        self.discard_until_step: dict[int, int] = {}
        self._rewound: dict[int, Request] = {}
        self._num_queried = 0
        self._num_hit = 0

    # As a gate

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        self._plan = plan

    def is_blocked(self, candidate: Candidate) -> bool:
        """Ask what there is; whoever is told to ask again is set aside until it is woken."""
        if not self.connected:
            return False
        request = candidate.request
        if not self._may_load(candidate):
            return False
        num_local = candidate.computed.num_tokens
        match = self.connector.get_num_new_matched_tokens(request, num_local)
        if match.num_tokens is None:
            self._asked[request.seq_id] = request
            return True
        usable = self._usable(request, num_local, match.num_tokens)
        if request.num_preemptions and not self._swap_rule.loads(usable):
            usable = 0
        candidate.num_external_tokens = usable
        candidate.loads_async = match.is_async and candidate.num_external_tokens > 0
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._loaded.pop(request.seq_id, None)

    def on_released(self, request: Request) -> None:
        """It is over; `on_finish` has seen to its blocks."""
        seq_id = request.seq_id
        self._asked.pop(seq_id, None)
        self._loads.pop(seq_id, None)
        self._loaded.pop(seq_id, None)
        self._unconfirmed.forget(seq_id)
        self._given_up.discard(seq_id)
        self.discard_until_step.pop(seq_id, None)
        self._rewound.pop(seq_id, None)

    # Admission

    def has_room_to_load(self, candidate: Candidate) -> bool:
        """Whether the whole request has room beside all that are loaded for and do not run yet.

        So a load is only begun where what it brings can be used, and two of them never hold
        what each of them lacks.
        """
        kv_cache, request = self._kv_cache, candidate.request
        num_missing = request.num_tokens - candidate.num_computed_tokens
        needed = min(
            kv_cache.num_blocks_needed(request, num_missing, candidate.computed),
            kv_cache.max_blocks(request.num_tokens),
        )
        for load in self._loads.values():
            needed += self._blocks_to_come(load.request)
        for each in self._loaded.values():
            if each.num_computed_tokens:  # nobody took its blocks
                needed += self._blocks_to_come(each)
        return needed <= kv_cache.num_free_blocks

    def begin_load(self, candidate: Candidate) -> None:
        """The head of the line was given blocks for what is loaded; it is set aside."""
        request = candidate.request
        num_tokens = candidate.num_computed_tokens + candidate.num_external_tokens
        self._waiting.park(request)
        request.status = self.status
        request.num_computed_tokens = num_tokens
        self._loads[request.seq_id] = _Load(
            request, num_tokens, self._clock(), candidate.num_external_tokens
        )
        self._count(request, candidate.num_external_tokens)
        self._notify_allocated(request, candidate.num_external_tokens, is_async=True)

    def begin_request(self, candidate: Candidate) -> None:
        """The head of the line was given blocks for its first tokens in this step."""
        if not self.connected:
            return
        request, num_external = candidate.request, candidate.num_external_tokens
        if num_external:
            self._unconfirmed.begin(request)
        if request.seq_id not in self._loaded:
            self._count(request, num_external)
        self._notify_allocated(request, num_external, is_async=False)

    # A step

    @property
    def wants_step(self) -> bool:
        """The workers are to have a step, even one without tokens."""
        return self.connected and self.connector.needs_step()

    @property
    def is_loading(self) -> bool:
        """A load is under way that somebody waits for."""
        return bool(self._loads)

    @property
    def is_awaited(self) -> bool:
        """The connector or its other half will say something that may let somebody begin."""
        return bool(self._loads or self._asked or self._kv_cache.transfer_refs.num_blocks)

    @property
    def keeps_waiting(self) -> bool:
        """Where nobody runs: somebody waits for a load or an answer, or for room that is held."""
        return bool(self._asked) or self.awaits_copies

    @property
    def awaits_copies(self) -> bool:
        """Where nobody runs: somebody waits for a load, or for room that a copy gives back."""
        if self._loads:
            return True
        kv_cache, waiting = self._kv_cache, self._waiting
        if not waiting.num_ready or not kv_cache.transfer_refs.num_alone:
            return False
        return kv_cache.max_blocks(waiting.peek().num_tokens) > kv_cache.num_free_blocks

    def complete(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step is decided: add what the connector has to say about it."""
        if not self.connected:
            return output
        self._unconfirmed.note_step(output.step)
        metadata = self.connector.build_connector_meta(output)
        return changed(output, connector_metadata=metadata) if metadata else output

    def is_storable(self, seq_id: int) -> bool:
        """Nothing of a request rests on a load of which it is not known whether it succeeds.

        Nor is anything still being copied into blocks that were given to it.
        """
        return not (
            seq_id in self._unconfirmed or seq_id in self._loads or seq_id in self._left_loading
        )

    def describe_rewound(self, plan: StepPlan) -> None:
        """Workers have tokens of theirs that never were: they are told of them anew."""
        for seq_id, request in list(self._rewound.items()):
            if request.status is not RequestStatus.RUNNING:
                del self._rewound[seq_id]
            elif request in plan.continued:
                plan.resend_full(request)
                del self._rewound[seq_id]

    def confirm_loads(self, step: int) -> None:
        """The result of a step is here, and nobody has said that its loads failed."""
        self._unconfirmed.confirm_loads(step)
        for seq_id, last in list(self.discard_until_step.items()):
            if last < step:
                del self.discard_until_step[seq_id]

    # Reports

    def note(self, output: KVConnectorOutput) -> None:
        """The connector's other half has finished this; failed blocks have been seen to."""
        self.connector.update_connector_output(output)
        for seq_id in output.finished_recving:
            self._end_load(seq_id)
        for seq_id in output.finished_sending:
            blocks = self._left_sending.pop(seq_id, None)
            if blocks is not None:
                self._kv_cache.transfer_refs.release(blocks)

    def invalidate(
        self, bad_blocks: Sequence[int], requests: Iterable[Request], step: int
    ) -> list[Request]:
        """These blocks do not hold what they should. step: the last that was scheduled.

        Who relies on one computes it, and what follows, itself: at once, or when all that is
        loaded for it is over. Returns those that are to be ended instead, by policy.
        """
        kv_cache, bad = self._kv_cache, set(bad_blocks)
        kv_cache.pool.uncache([block for block in bad if 0 < block < kv_cache.pool.num_blocks])
        ended = []
        for request in requests:
            num_sound = kv_cache.num_valid_tokens(request, bad)
            if num_sound is None and self._unconfirmed.has_lost(request, bad):
                num_sound = 0
            elif num_sound is None or num_sound >= request.num_computed_tokens:
                continue
            load = self._loads.get(request.seq_id)
            if load is not None:
                load.num_tokens = min(load.num_tokens, num_sound)
                load.failed = True
                request.num_computed_tokens = load.num_tokens
            else:
                self._rewind(request, num_sound, step)
            if self.fails_requests:
                ended.append(request)
        return ended

    def take_stats(self) -> tuple[int, int]:
        """(tokens looked up elsewhere, tokens found there) since the last call."""
        taken = (self._num_queried, self._num_hit)
        self._num_queried = self._num_hit = 0
        return taken

    def take_events(self) -> Iterable[KVEvent]:
        """What changed elsewhere since the last call."""
        return self.connector.take_events()

    # Ends

    def on_finish(self, request: Request) -> None:
        """A request is over, and still has its blocks: some may have to outlast it."""
        if not self.connected:
            return
        seq_id = request.seq_id
        tables = self._kv_cache.block_ids(seq_id)
        delays, params = self.connector.request_finished(request, tables)
        if params:
            request.kv_transfer_params = to_compact_json(params)
        blocks = list(chain.from_iterable(tables))
        if delays:
            self._kv_cache.transfer_refs.hold(blocks)
            self._left_sending[seq_id] = blocks
        if seq_id in self._loads:
            self._kv_cache.transfer_refs.hold(blocks)
            self._left_loading[seq_id] = blocks

    def invalidate_cache(self, request: Request) -> None:
        """What a request computed is no numbers: nobody is to find any of it, wherever it is.

        Also of one that is over: by then its blocks may be found, and be on every medium.
        """
        self._kv_cache.uncache_content(request)
        self.connector.invalidate_request(request)

    def drop_loads(self) -> None:
        """Nobody waits for a load any more; blocks are kept until the copies are over."""
        for seq_id, load in list(self._loads.items()):
            blocks = list(chain.from_iterable(self._kv_cache.block_ids(seq_id)))
            self._kv_cache.transfer_refs.hold(blocks)
            self._left_loading[seq_id] = blocks
            self._abandon(load.request)
        self._loads.clear()

    def start_over(self) -> None:
        """Workers of a new epoch: no copy is under way, and none is reported any more."""
        for load in list(self._loads.values()):
            self._abandon(load.request)
        for request in list(self._asked.values()):
            self._unblock_asked(request)
        self._loads.clear()
        self._loaded.clear()
        self._unconfirmed.clear()
        self._given_up.clear()
        self.discard_until_step.clear()
        self._rewound.clear()
        self._left_loading.clear()
        self._left_sending.clear()
        self.connector.on_worker_restart()
        self._kv_cache.transfer_refs.release_all()

    def reset_cache(self) -> bool:
        """Forget what is kept elsewhere; False where it is being copied."""
        return self.connector.reset_cache()

    def close(self) -> None:
        """The engine ends."""
        self.connector.close()

    # Parts of the above

    def _may_load(self, candidate: Candidate) -> bool:
        """Nobody is asked for who has blocks, needs every position, or has failed before."""
        request = candidate.request
        if request.num_computed_tokens or request.skip_reading_prefix_cache:
            return False
        if request.num_output_placeholders or candidate.computed.tails:
            return False
        if request.seq_id in self._given_up or request.seq_id in self._left_loading:
            return False
        return self._plan is None or request not in self._plan.preempted

    def _usable(self, request: Request, num_local: int, num_matched: int) -> int:
        """Whole blocks. At least one token is left to compute, if need be in the last of them.

        Not there where there are windows: which blocks a token sees, those behind the end of a
        block say.
        """
        most = request.num_tokens - (1 if not self._kv_cache.is_downward_closed else 0)
        if request.num_tokens == 1:
            return 0
        most -= most % self._kv_cache.block_size
        return max(0, min(num_matched, most - num_local))

    def _blocks_to_come(self, request: Request) -> int:
        """Free blocks that the rest of what a request has by now will take."""
        num_missing = request.num_tokens - request.num_computed_tokens
        return min(
            self._kv_cache.num_blocks_needed(request, num_missing),
            self._kv_cache.max_blocks(request.num_tokens),
        )

    def _notify_allocated(self, request: Request, num_external: int, *, is_async: bool) -> None:
        if num_external:
            name = type(self.connector).__name__
            self._observer.found_elsewhere(request, num_external, name, is_async=is_async)
        tables = self._kv_cache.block_ids(request.seq_id)
        self.connector.update_state_after_alloc(request, tables, num_external)

    def _count(self, request: Request, num_external: int) -> None:
        if request.num_preemptions == 0:
            self._num_queried += request.num_tokens
            self._num_hit += num_external
            request.num_external_tokens = num_external

    def _unblock_asked(self, request: Request) -> None:
        """The connector has an answer for who was told to ask again."""
        if self._asked.pop(request.seq_id, None) is not None:
            self._unblock(request)

    def _end_load(self, seq_id: int) -> None:
        """All ranks have ended a load; one that nobody waits for gives its blocks back."""
        load = self._loads.pop(seq_id, None)
        if load is None:
            blocks = self._left_loading.pop(seq_id, None)
            if blocks is not None:
                self._kv_cache.transfer_refs.release(blocks)
            return
        request, kv_cache = load.request, self._kv_cache
        if load.failed:
            self._given_up.add(seq_id)
        else:
            self._swap_rule.learn_load(load.num_external, self._clock() - load.begun)
        if load.num_tokens:
            kv_cache.confirm_loaded(request, load.num_tokens)
            request.num_computed_tokens = min(load.num_tokens, request.num_tokens - 1)
            self._loaded[seq_id] = request
            self._non_running_blocks.add_resting(request)
            self._non_running_blocks.move_to_queued(request)
        else:
            kv_cache.free(request)
            request.num_computed_tokens = 0
        self._unblock(request)

    def _abandon(self, request: Request) -> None:
        """It waits as one of which nothing is computed."""
        self._kv_cache.free(request)
        request.num_computed_tokens = 0
        self._unblock(request)

    def _rewind(self, request: Request, num_sound: int, step: int) -> None:
        """Back to the last token whose KV is good; what steps in flight make of it is void."""
        seq_id = request.seq_id
        self._unconfirmed.forget(seq_id)
        self._given_up.add(seq_id)
        request.num_computed_tokens = num_sound
        request.num_output_placeholders = 0
        request.spec_token_ids.clear()
        self.discard_until_step[seq_id] = step
        self._kv_cache.rewind(request, num_sound)
        if request.status is RequestStatus.RUNNING:
            self._rewound[seq_id] = request
        if not num_sound:
            self._kv_cache.free(request)
            self._non_running_blocks.forget(request)
            self._loaded.pop(seq_id, None)
