"""Gates: why a waiting request cannot start yet, apart from room.

A gate holds a request back for the sake of something outside the scheduler's
books: a grammar that is being compiled, KV that is on its way, a prefix that
another request is computing. A request that is held is set aside: it keeps its
place, those behind it pass, and nobody looks at it again until its gate wakes it.
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
"""Puts a request that is held back into the line; does nothing for any other."""


class Candidate:
    """The request at the head of the line, and what it can start from.

    Its cached prefix is looked up on demand, once. A gate may offer something longer.
    num_external_tokens: after that prefix, tokens with KV elsewhere; loads_async: it is to be
    loaded before the request gets any further.
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


class AdmissionGate(Protocol):
    """One reason for holding requests back.

    status: of a request that is held.
    """

    status: ClassVar[RequestStatus]

    def attach(self, unblock: Unblock) -> None:
        """Called once, before everything else, with the way to wake a request."""
        ...

    def begin_admission(self, plan: StepPlan) -> None:
        """An admission pass begins; running requests have been planned."""
        ...

    def is_blocked(self, candidate: Candidate) -> bool:
        """Whether the head of the line is to be set aside.

        After a True the gate owes the request a wake, unless it is forgotten first.
        """
        ...

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; it computes so many tokens in this step."""
        ...

    def on_released(self, request: Request) -> None:
        """A request is over, whatever state it was in."""
        ...


# What the scheduler asks of whoever constrains the tokens of requests.
#
# It is a gate, because a request waits for its grammar, and it says which sequences of a step
# are to be held to theirs. It hears of every request that is over, as all gates do.


class Constraints(Protocol):
    """A `AdmissionGate` that knows more."""

    status: ClassVar[RequestStatus]

    def attach(self, unblock: Unblock) -> None: ...

    def begin_admission(self, plan: StepPlan) -> None: ...

    def is_blocked(self, candidate: Candidate) -> bool: ...

    def on_admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def on_released(self, request: Request) -> None: ...

    def handles_of(self, plan: StepPlan) -> list[int]:
        """Constrained sequences that sample in this step; before the counters advance."""
        ...


class NoConstraints:
    """Every token is as good as any other."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_GRAMMAR

    def attach(self, unblock: Unblock) -> None: ...

    def begin_admission(self, plan: StepPlan) -> None: ...

    def is_blocked(self, candidate: Candidate) -> bool:
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def on_released(self, request: Request) -> None: ...

    def handles_of(self, plan: StepPlan) -> list[int]:
        return []


NO_CONSTRAINTS: Final = NoConstraints()


# Who may watch the scheduler: what arrives, what each step decides and brings, what ends.
#
# Owns nothing. An observer looks and changes nothing; it is called in the step, so it is quick.
# Without one the scheduler calls a null object, three times a step.


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
