"""What a feature of the scheduler can do: see `SchedulerFeature`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from engine_core.kv_cache.manager import CachedPrefix, KVCacheManager
from engine_core.kv_connector.base import SchedulerConnector
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.outside import OutsideFeature
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.model_runner_output import ModelRunnerOutput

if TYPE_CHECKING:
    from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefix

Unblock = Callable[[Request], None]
"""Makes a parked request ready again, in its old place; does nothing for any other request."""


class Candidate:
    """A waiting request that may be admitted next, and the KV from which it can start.

    The prefix cache is looked up on demand, once. Sibling forks may offer the KV of a fork instead.
    num_external_tokens: tokens after the cached prefix whose KV the connector has. loads_async:
    that KV is loaded before the request is admitted, not within its first step.
    """

    __slots__ = (
        "_computed",
        "_kv_cache",
        "_without_load",
        "loads_async",
        "num_external_tokens",
        "request",
    )

    def __init__(self, request: Request, kv_cache: KVCacheManager) -> None:
        self.request = request
        self._kv_cache = kv_cache
        self._computed: CachedPrefix | None = None
        self._without_load: CachedPrefix | None = None
        self.num_external_tokens = 0
        self.loads_async = False

    @property
    def is_looked_up(self) -> bool:
        """Whether the prefix cache was looked up for the request."""
        return self._computed is not None

    @property
    def computed(self) -> CachedPrefix:
        """Blocks of the prefix that the request need not compute, until blocks are allocated."""
        if self._computed is None:
            self._computed = self._kv_cache.get_computed_blocks(self.request)
        return self._computed

    def offer_fork(self, blocks: CachedPrefix) -> None:
        """Start from these blocks, unless a longer prefix is cached."""
        if blocks.num_tokens >= self.computed.num_tokens:
            self._computed = blocks

    def use_external(self, num_tokens: int, *, is_async: bool) -> None:
        """Load the tokens after the cached prefix that the connector has."""
        self.num_external_tokens = num_tokens
        self.loads_async = is_async and num_tokens > 0
        if num_tokens:
            self._without_load = self.computed
            num_loaded = self.computed.num_tokens + num_tokens
            self._computed = self._kv_cache.use_loaded(self.request, self.computed, num_loaded)

    def drop_external(self) -> None:
        """Load nothing from the connector."""
        if self.num_external_tokens:
            self._computed = self._without_load
        self.num_external_tokens = 0
        self.loads_async = False

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the request need not compute, without external ones."""
        return self.request.num_computed_tokens + self.computed.num_tokens


class SchedulerFeature(Protocol):
    """A feature: takes part in the life of requests where it replaces a method of this class.

        on_request_added ─▶ is_blocked? ─▶ on_admitted ─▶ … ─▶ on_ending ─▶ on_released
                                 ▲── preempted ──┘

    `Scheduler` builds all features in one list; methods are called in the order of that list.
    A request that `is_blocked` holds back is parked: it keeps its place in the queue, the requests
    after it pass, and it is not considered again until the feature unblocks it.

    A protocol, because interpreted classes cannot extend a compiled one: those of tests and from
    outside (outside.py) have the same methods. Without the `return` a method would count as
    abstract.

    status: of the requests that the feature holds back.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING

    def on_request_added(self, request: Request) -> None:
        """A request is about to be queued."""
        return None

    def begin_admission(self, plan: StepPlan) -> None:
        """Prepare for the admissions of this step, in which running requests are planned."""
        return None

    def is_blocked(self, candidate: Candidate) -> bool:
        """Return whether a request that could be admitted next has to wait.

        If so, the feature unblocks it later, unless the request ends before.
        """
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; this step computes `num_new_tokens` of its tokens."""
        return None

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """A request, which still has its blocks, ends with the status that says how.

        Called from the last feature to the first: a connector sees the blocks before the next turn
        of a session inherits them. succeeded: the client has received all that it wanted.
        """
        return None

    def on_released(self, request: Request) -> None:
        """A request has ended, from any status, and its blocks are freed."""
        return None


def features_with(method: str, features: Sequence[SchedulerFeature]) -> list[SchedulerFeature]:
    """Return the features that replace this method of `SchedulerFeature`, in the same order."""
    inherited = (getattr(SchedulerFeature, method), getattr(OutsideFeature, method))
    return [feature for feature in features if getattr(type(feature), method) not in inherited]


class SchedulerObserver(Protocol):
    """Is notified of the scheduler's decisions, in order, within the step: it has to be quick."""

    def on_request_added(self, request: Request) -> None:
        """A request was added to the queue."""
        return None

    def on_step_begin(
        self,
        plan: StepPlan,
        waiting: RequestQueue,
        running: Sequence[Request],
        kv_cache: KVCacheManager,
        connector: SchedulerConnector,
    ) -> None:
        """A step is about to be scheduled; the plan is still empty. The others are only read."""
        return None

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        """The plan is complete; the counters of its requests have not advanced yet."""
        return None

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        """A connector loads KV of a request: before its first step, or within it."""
        return None

    def on_step_result(self, result: ModelRunnerOutput) -> None:
        """The result of a step has arrived and was not processed yet."""
        return None

    def on_request_finished(self, request: Request) -> None:
        """A request has ended with the status that says how, and its blocks are freed."""
        return None

    def on_turn_ended(self, request_id: int, agent_session: str, tool: str) -> None:
        """A front end has reported which tool an agent's session waits for after a turn."""
        return None

    def on_prefix_retained(self, prefix: "RetainedPrefix", ttl: float) -> None:
        """A prefix is retained for `ttl` seconds after its turn.

        Called again when that time or the number of its blocks has changed.
        """
        return None

    def on_prefix_released(self, prefix: "RetainedPrefix", reason: str) -> None:
        """A prefix is no longer retained."""
        return None

    def on_event(self, what: str, detail: str) -> None:
        """Another event that changes decisions: a pause, a restart, a reset."""
        return None


class NoObserver(SchedulerObserver):
    """Ignores all notifications."""


NO_OBSERVER: Final = NoObserver()
