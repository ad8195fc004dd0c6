"""Where other parts attach to the scheduler: admission gates, listeners, and one observer.

    AdmissionGate       can hold a waiting request back: a grammar is being compiled, KV is being
                        loaded, another request is computing the same prefix
    RequestListener     is notified of admissions and ends, and holds nothing back
    SchedulerObserver   sees every decision and changes none

A request that a gate blocks is parked: it keeps its place in the queue, requests behind it pass,
and it is not looked at again until its gate unblocks it. `setup.py` lists the gates and listeners
and says why they are asked in that order.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.model_runner_output import ModelRunnerOutput

if TYPE_CHECKING:
    from engine_core.retention.retained_prefixes import RetainedPrefix

Unblock = Callable[[Request], None]
"""Makes a parked request ready again, in its old place; does nothing for any other."""


class Candidate:
    """The first request of the queue, and the KV that it can start from.

    Its cached prefix is looked up on demand, once. A gate may offer a longer one.
    num_external_tokens: tokens after that prefix whose KV the connector has. loads_async: this KV
    is loaded before the request is admitted, not within its first step.
    """

    __slots__ = ("_computed", "_kv_cache", "loads_async", "num_external_tokens", "request")

    def __init__(self, request: Request, kv_cache: KVCacheManager) -> None:
        self.request = request
        self._kv_cache = kv_cache
        self._computed: ComputedBlocks | None = None
        self.num_external_tokens = 0
        self.loads_async = False

    @property
    def computed(self) -> ComputedBlocks:
        """Valid until blocks are allocated."""
        if self._computed is None:
            self._computed = self._kv_cache.get_computed_blocks(self.request)
        return self._computed

    def offer(self, blocks: ComputedBlocks) -> None:
        """Start from these instead, unless more is cached; valid as long as `computed` is."""
        if blocks.num_tokens >= self.computed.num_tokens:
            self._computed = blocks

    def without_external(self) -> "Candidate":
        """The same, which computes what the cache does not have."""
        self.num_external_tokens = 0
        self.loads_async = False
        return self

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that it need not compute: those in its own blocks, or in the cached ones."""
        return self.request.num_computed_tokens + self.computed.num_tokens


class RequestListener(Protocol):
    """Is notified of each request's admissions and of its end; decides nothing."""

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; this step computes `num_new_tokens` of its tokens."""
        ...

    def on_released(self, request: Request) -> None:
        """A request has ended, in whatever state it was, and its blocks are freed."""
        ...


class AdmissionGate(RequestListener, Protocol):
    """A reason to hold a waiting request back although it would have room.

    status: of a request that is held back.
    """

    status: ClassVar[RequestStatus]

    def attach(self, unblock: Unblock) -> None:
        """Keep `unblock` for later; called once, before everything else."""
        ...

    def begin_admission(self, plan: StepPlan) -> None:
        """Running requests have been planned, and the queue is about to be looked at."""
        ...

    def is_blocked(self, candidate: Candidate) -> bool:
        """Whether the first request of the queue has to wait, so that those behind it pass.

        Where it does, the gate unblocks the request later, unless that ends first.
        """
        ...


class TokenConstraints(AdmissionGate, Protocol):
    """The gate of requests that wait for a grammar; it also knows which rows are masked."""

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        """Constrained sequences that sample in this step; call it before the counters advance."""
        ...


# An observer runs within the step, so it has to be quick. Without one the scheduler calls
# NO_OBSERVER, three times a step: eleven places would need an `if` otherwise.


class SchedulerObserver(Protocol):
    """Told by one scheduler, in the order in which things happen."""

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None:
        """What it may look at from now on; called once, before anything else."""
        ...

    def added(self, request: Request) -> None:
        """It is in the queue."""
        ...

    def step_begins(self, plan: StepPlan) -> None:
        """Nothing of this step is decided."""
        ...

    def step_decided(self, step: int, plan: StepPlan) -> None:
        """All of it is; the counters of its requests are those of before the step."""
        ...

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        """A connector brings tokens of it: asynchronously, or with its first step, this one."""
        ...

    def step_done(self, result: ModelRunnerOutput) -> None:
        """A result has come and is about to be taken in."""
        ...

    def finished(self, request: Request) -> None:
        """It is over, with the status that says how, and has no blocks any more."""
        ...

    def turn_ended(self, request_id: int, job: str, tool: str) -> None:
        """A front end says what the job waits for."""
        ...

    def pinned(self, pin: "RetainedPrefix", ttl: float) -> None:
        """A job keeps blocks for so many seconds after its turn; told again when that changes."""
        ...

    def unpinned(self, pin: "RetainedPrefix", reason: str) -> None:
        """It has given them up."""
        ...

    def happened(self, what: str, detail: str) -> None:
        """Anything else that changes decisions."""
        ...


class NoObserver:
    """Nobody watches."""

    def watch(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None: ...

    def added(self, request: Request) -> None: ...

    def step_begins(self, plan: StepPlan) -> None: ...

    def step_decided(self, step: int, plan: StepPlan) -> None: ...

    def found_elsewhere(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def step_done(self, result: ModelRunnerOutput) -> None: ...

    def finished(self, request: Request) -> None: ...

    def turn_ended(self, request_id: int, job: str, tool: str) -> None: ...

    def pinned(self, pin: "RetainedPrefix", ttl: float) -> None: ...

    def unpinned(self, pin: "RetainedPrefix", reason: str) -> None: ...

    def happened(self, what: str, detail: str) -> None: ...


NO_OBSERVER: Final = NoObserver()
