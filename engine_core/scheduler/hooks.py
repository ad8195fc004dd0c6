"""Interfaces by which other parts attach to the scheduler.

    AdmissionGate       can hold a waiting request back: a grammar is being compiled, KV is being
                        loaded, another request is computing the same prefix
    RequestListener     is notified of admissions and ends, and holds nothing back
    DraftProvider       proposes next tokens of running requests, which a step then verifies
    SchedulerObserver   is notified of every decision and changes none: the trace recorder

A request that a gate blocks is parked: it keeps its place in the queue, requests behind it pass,
and the scheduler does not look at it again until its gate unblocks it. `setup.py` lists the gates
and listeners, and explains their order.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from engine_core.kv_cache.manager import ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.step_plan import StepPlan
from proto.model_runner_output import ModelRunnerOutput

if TYPE_CHECKING:
    from engine_core.retention.retained_prefixes import RetainedPrefix

Unblock = Callable[[Request], None]
"""Makes a parked request ready again, in its old place; does nothing for any other request."""


class Candidate:
    """The request at the head of the queue, and the KV from which it can start.

    The prefix cache is looked up on demand, once. A gate may offer the KV of a fork instead.
    num_external_tokens: tokens behind the cached prefix whose KV the connector has. loads_async:
    that KV is loaded before the request is admitted, not within its first step.
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
        """Blocks of the prefix that the request need not compute, until blocks are allocated."""
        if self._computed is None:
            self._computed = self._kv_cache.get_computed_blocks(self.request)
        return self._computed

    def offer_fork(self, blocks: ComputedBlocks) -> None:
        """Start from these blocks, unless a longer prefix is cached."""
        if blocks.num_tokens >= self.computed.num_tokens:
            self._computed = blocks

    def without_external(self) -> "Candidate":
        """Return the candidate itself, changed to load nothing from the connector."""
        self.num_external_tokens = 0
        self.loads_async = False
        return self

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the request need not compute, without external ones."""
        return self.request.num_computed_tokens + self.computed.num_tokens


class RequestListener(Protocol):
    """Is notified when a request is admitted and when it has ended."""

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """A request was given blocks; this step computes `num_new_tokens` of its tokens."""
        ...

    def on_released(self, request: Request) -> None:
        """A request has ended, from any status, and its blocks are freed."""
        ...


class AdmissionGate(RequestListener, Protocol):
    """A reason to hold a waiting request back although it would have room.

    status: of the requests that the gate holds back.
    """

    status: ClassVar[RequestStatus]

    def attach(self, unblock: Unblock) -> None:
        """Keep `unblock` for later; called once, before all other methods."""
        ...

    def begin_admission(self, plan: StepPlan) -> None:
        """Prepare for the questions of this step, in which running requests are planned."""
        ...

    def is_blocked(self, candidate: Candidate) -> bool:
        """Return whether the request at the head of the queue has to wait.

        If so, the gate unblocks it later, unless the request ends before.
        """
        ...


class TokenConstraints(AdmissionGate, Protocol):
    """The gate of requests that wait for a grammar; it also names the rows that need a mask.

    held: sequences that no step may sample, because they wait for a mask. The set object
    stays the same, its members change.
    """

    held: set[int]

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        """Return the sequences that sample under a grammar in this step.

        Called before the counters of the requests advance.
        """
        ...

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        """Return how many of these tokens, one after the other, may follow the known ones.

        All of them for a request without a grammar, and where the position in the grammar is
        not known yet because steps are in flight.
        """
        ...


class DraftProvider(Protocol):
    """Proposes drafts for running requests, and learns which of their tokens were accepted.

    The daemon has `engine_core/speculation/drafting.py:Drafting`. It learns only of requests that
    may be drafted for (`speculative_decoding.py:is_drafted_for`), and the scheduler clears their
    drafts after each plan.
    """

    has_draft_model: bool
    """Whether a model in the workers proposes drafts; the last five methods are for it."""
    max_proposal_len: int
    """Tokens of a sequence beyond which that model proposes nothing."""

    def add_request(self, request: Request) -> None:
        """Begin to draft for a request that was admitted for the first time; `end_request` ends it.

        It may have outputs already, of an earlier epoch.
        """
        ...

    def add_outputs(self, request: Request, num_new: int) -> None:
        """Learn the last `num_new` of `request.all_token_ids`, which are verified.

        Also those of a preempted request.
        """
        ...

    def begin_step(self) -> None:
        """Do a part of work that would be too long for one step; called before each plan."""
        ...

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None:
        """Set `spec_token_ids` of those requests that shall be drafted for in the next step.

        Called once a step. A draft follows `all_token_ids`; the scheduler cuts it to the room that
        the step, the request and its grammar have. If a step of the request is in flight, the first
        token of the draft is that of the step, and is not computed again.

        requests: running ones that decode, in the order in which they are planned; each has one row
        besides its draft. limits: draft tokens that each of them has use for, without that of a
        step in flight. num_other_tokens: further rows of the step, nearly all of prompts.
        """
        ...

    def record_verified(self, request: Request, num_tried: int, num_accepted: int) -> None:
        """Note how much of the last draft of a request was accepted; not called for a dropped one.

        Called before the `add_outputs` or `end_request` of the same result, and before the next
        `fill_drafts`. num_tried: verified tokens, without those behind the end of the request, of
        which nothing is known.
        """
        ...

    def learn_step(self, num_rows: int, seconds: float) -> None:
        """Learn the duration of a step. num_rows: all of its tokens, drafts included."""
        ...

    def end_request(self, request: Request) -> None:
        """Forget a request that was added and has ended; its status says how."""
        ...

    def forget_outputs(self) -> None:
        """Forget the outputs of ended requests, as when the prefix cache is reset."""
        ...

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        """Return (verified, accepted) tokens by drafter since the last call."""
        ...

    def note_draft_kv(self, request: Request, num_tokens: int) -> None:
        """Note how many leading tokens of a request have KV of the draft model.

        Called when a request that was added gets blocks, for the first time or after a preemption.
        """
        ...

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        """Return whether `choose_proposals` may ask for any in a step; called once for each.

        num_requests: that decode. num_other_tokens: rows of the step that belong to prompts.
        """
        ...

    def choose_proposals(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        """Return how many tokens the draft model proposes for each request behind a step.

        And the survival, as the model has it, below which a proposal ends. requests: planned in the
        step, which decode. limits: tokens that each of them has use for, at least 1.
        num_other_tokens: as in `may_propose`.
        """
        ...

    def keep_proposal(
        self, request: Request, num_asked: int, token_ids: list[int], survivals: Sequence[float]
    ) -> None:
        """Keep a proposal to follow `request.all_token_ids`, of up to `num_asked` tokens.

        It is empty if the model had none. survivals: for each token the probability that it and all
        before it are accepted, as the model has it.
        """
        ...

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Learn the time of each pass of the draft model. rows: tokens of the pass."""
        ...


class SchedulerObserver(Protocol):
    """Is notified of the scheduler's decisions, in order, within the step: it has to be quick."""

    def on_attached(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None:
        """Keep what the observer may read; called once, before all other methods."""
        ...

    def on_request_added(self, request: Request) -> None:
        """A request was added to the queue."""
        ...

    def on_step_begin(self, plan: StepPlan) -> None:
        """A step is about to be scheduled; the plan is still empty."""
        ...

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        """The plan is complete; the counters of its requests have not advanced yet."""
        ...

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        """A connector loads KV of a request: before its first step, or within it."""
        ...

    def on_step_result(self, result: ModelRunnerOutput) -> None:
        """The result of a step has arrived and was not processed yet."""
        ...

    def on_request_finished(self, request: Request) -> None:
        """A request has ended with the status that says how, and its blocks are freed."""
        ...

    def on_turn_ended(self, request_id: int, agent_session: str, tool: str) -> None:
        """A front end has reported which tool an agent's session waits for after a turn."""
        ...

    def on_prefix_retained(self, prefix: "RetainedPrefix", ttl: float) -> None:
        """A prefix is retained for `ttl` seconds after its turn, or its time has changed."""
        ...

    def on_prefix_released(self, prefix: "RetainedPrefix", reason: str) -> None:
        """A prefix is no longer retained."""
        ...

    def on_event(self, what: str, detail: str) -> None:
        """Another event that changes decisions: a pause, a restart, a reset."""
        ...


class NoObserver:
    """Ignores all notifications: without it, eleven calls would need an `if`."""

    def on_attached(
        self, waiting: RequestQueue, running: Collection[Request], kv_cache: KVCacheManager
    ) -> None: ...

    def on_request_added(self, request: Request) -> None: ...

    def on_step_begin(self, plan: StepPlan) -> None: ...

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None: ...

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def on_step_result(self, result: ModelRunnerOutput) -> None: ...

    def on_request_finished(self, request: Request) -> None: ...

    def on_turn_ended(self, request_id: int, agent_session: str, tool: str) -> None: ...

    def on_prefix_retained(self, prefix: "RetainedPrefix", ttl: float) -> None: ...

    def on_prefix_released(self, prefix: "RetainedPrefix", reason: str) -> None: ...

    def on_event(self, what: str, detail: str) -> None: ...


NO_OBSERVER: Final = NoObserver()
