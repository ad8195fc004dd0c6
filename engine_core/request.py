"""A request as the engine sees it: one choice of one EngineCoreRequest.

Owns the token ids, the counters and the life cycle of a choice. Knows nothing
of queues, blocks or text.
"""

import enum
from collections.abc import Callable, Iterable, Sequence

from engine_core.kv_cache.hashing import ExtraKeys, Hasher
from proto.engine_io import NO_AGENT, AgentHint, EngineCoreRequest, FinishReason
from proto.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Numbers grow from waiting to finished.

    WAITING: in the queue, holds no blocks (but a session's next turn has those of the last).
    WAITING_FOR_*: in the queue but set aside, until something else than room is there:
        a grammar, KV from elsewhere, more input, a prefix that another request is
        computing, the end of a pause, the prompt's KV from another choice, the
        other rows of a beam search, the trial of a request that processes may have
        died of.
    RUNNING: holds blocks and is scheduled.
    PREEMPTED: back in the queue; its KV is gone, its tokens are kept.
    FINISHED_*: over; the number decides the finish reason.
    """

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    WAITING_FOR_PREFIX = 4
    WAITING_FOR_RESUME = 5
    WAITING_FOR_FORK = 6
    WAITING_FOR_BEAMS = 7
    WAITING_FOR_ISOLATION = 8
    RUNNING = 10
    PREEMPTED = 11
    FINISHED_STOPPED = 20
    FINISHED_LENGTH = 21
    FINISHED_ABORTED = 22
    FINISHED_ERROR = 23
    FINISHED_REPETITION = 24

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def is_blocked(self) -> bool:
        """It waits for something else than room."""
        return RequestStatus.WAITING < self < RequestStatus.RUNNING

    @property
    def finish_reason(self) -> FinishReason:
        """What the front end is told; raises KeyError for a request that is not finished."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class Request:
    """One choice being generated. Only engine_core/scheduler changes it.

    Identity, fixed:
        seq_id: names it towards the worker, never used twice in an epoch.
        request_id, choice: name it towards the front end `client_index`.
        prompt_token_ids: [num_prompt_tokens], shared by all choices, never changed (the
            next turn of a session gets another list with its input).
        tenant: whose it is, for fairness; 0 where nobody said so. label: the id of its answer, of
            which in the live view only `reader` is told.
        agent: which job it is a turn of; its name is empty for none. job_arrival: seconds, when
            the job's first turn came; continues_job: it is not the first, nor the last.
            finds_retained_prefix: while it waits, its job retains the KV of an earlier turn.
        stop_ids: token ids that end it. repetition: so do outputs that repeat themselves, if set.
        seed, choice: key of its draws.
        order: (priority, arrival, request id, choice); the lower goes first, where
            the policy asks.
        skip_reading_prefix_cache: every prompt position must be computed, because
            prompt logprobs are asked for.
    Tokens:
        all_token_ids: prompt, then verified outputs; grows at the end only.
        spec_token_ids: drafts not verified yet.
    Counters, in tokens:
        num_computed_tokens: positions [0, n) whose KV is valid or being computed.
        num_output_placeholders: outputs being computed whose ids are not known yet; 0
            where every step waits for the one before.
        num_cached_tokens: prompt tokens that were in the prefix cache, or kept from the
            turn before, when first scheduled. num_external_tokens: of those, a connector's.
    Life cycle:
        status, stop_reason (the stop token that ended it, unless it is an EOS),
        num_preemptions; queued_at, scheduled_at (first time), preempted_at (every
        time): seconds on the machine's monotonic clock, None before it happened.
        place: while it runs, a number that grows along the running list.
        first_info_sent: FirstTokenInfo has left with an output.
        kv_transfer_params: of one that is over: what its client is told of where its KV is, a
            JSON object; empty for nothing.
        crash_count: processes that died while this was computed, since it got further.
    """

    __slots__ = (
        "_block_hashes",
        "_extra_keys",
        "_hasher",
        "agent",
        "all_token_ids",
        "arrival_time",
        "cache_salt",
        "choice",
        "client_index",
        "continues_job",
        "crash_count",
        "finds_retained_prefix",
        "first_info_sent",
        "job_arrival",
        "kv_transfer_params",
        "label",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "place",
        "preempted_at",
        "priority",
        "prompt_token_ids",
        "queued_at",
        "reader",
        "repetition",
        "request_id",
        "sampling_params",
        "scheduled_at",
        "seed",
        "seq_id",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
        "stop_ids",
        "stop_reason",
        "tenant",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        hasher: Hasher,
        choice: int = 0,
        client_index: int = 0,
        output_token_ids: Iterable[int] = (),
        prompt_hashes: Sequence[bytes] = (),
        seed: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str | None = None,
        crash_count: int = 0,
        tenant: int = 0,
        agent: AgentHint = NO_AGENT,
        label: str = "",
        reader: int = 0,
    ) -> None:
        """output_token_ids: generated in an earlier epoch. prompt_hashes: already known hashes."""
        self.seq_id = seq_id
        self.request_id = request_id
        self.choice = choice
        self.client_index = client_index
        self._ask(prompt_token_ids, sampling_params)
        self.seed = seed
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.agent = agent
        self.label = label
        self.reader = reader
        self.job_arrival = arrival_time
        self.continues_job = self.finds_retained_prefix = False
        self.order = (priority, arrival_time, request_id, choice)

        self.all_token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.spec_token_ids: list[int] = []
        self._hasher = hasher
        self._extra_keys = ExtraKeys(cache_salt)
        self._block_hashes = list(prompt_hashes)

        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens = self.num_external_tokens = 0
        self.num_preemptions = 0
        self.place = 0

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.queued_at: float | None = None
        self.scheduled_at: float | None = None
        self.preempted_at: list[float] = []
        self.first_info_sent = False
        self.kv_transfer_params = b""
        self.crash_count = crash_count

    def _ask(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        """What is wanted: everything that follows from prompt and parameters."""
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = sampling_params.max_tokens
        self.stop_ids = sampling_params.stop_ids
        self.repetition = sampling_params.repetition
        self.skip_reading_prefix_cache = sampling_params.prompt_logprobs is not None

    def next_turn(self, seq_id: int) -> "Request":
        """The request that goes on where this one, a finished turn of a session, ended.

            this one    |------- prompt -------|---- outputs ----|x|
            next turn   |---------------- prompt ----------------|-- input to come --

        The last output (x) was drawn and never computed: it is dropped. Its KV is not
        handed over here.
        """
        assert self.num_output_tokens > 0, f"{self!r} is not over"
        return Request(
            seq_id=seq_id,
            request_id=self.request_id,
            prompt_token_ids=self.all_token_ids[:-1],
            sampling_params=self.sampling_params,
            hasher=self._hasher,
            choice=self.choice,
            client_index=self.client_index,
            seed=self.seed,
            priority=self.priority,
            arrival_time=self.arrival_time,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            label=self.label,
            reader=self.reader,
        )

    def take_input(self, token_ids: list[int], sampling_params: SamplingParams) -> None:
        """The input of a turn that has not begun; the prompt becomes a new list."""
        self._ask([*self.prompt_token_ids, *token_ids], sampling_params)
        self.all_token_ids += token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and verified outputs."""
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, verified outputs and drafts."""
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens that the next step may compute up to: also those that are being sampled.

        Not the last one that the request can have, because nothing follows it.
        """
        num_tokens = self.num_tokens_with_spec
        if not self.num_output_placeholders:
            return num_tokens
        return min(
            num_tokens + self.num_output_placeholders, self.num_prompt_tokens + self.max_tokens - 1
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the verified outputs, [num_output_tokens]."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks of all_token_ids, brought up to date when read.

        So a token costs nothing to append, and a block is hashed when it is looked
        up or cached.
        """
        self._hasher.extend(self._block_hashes, self.all_token_ids, self._extra_keys)
        return self._block_hashes

    def take_over(self, sibling: "Request") -> None:
        """Have the tokens of another choice in place of its own."""
        self.all_token_ids = sibling.all_token_ids.copy()
        self._block_hashes = sibling.block_hashes.copy()
        if self.scheduled_at is None:
            self.scheduled_at = sibling.scheduled_at
            self.num_cached_tokens = sibling.num_cached_tokens

    def __lt__(self, other: "Request") -> bool:
        """Whether it goes first: by priority (lower), arrival, request id, choice."""
        return self.order < other.order

    def __hash__(self) -> int:
        return self.seq_id

    def __repr__(self) -> str:
        return (
            f"Request(seq_id={self.seq_id}, request_id={self.request_id}, choice={self.choice}, "
            f"{self.status.name}, tokens={self.num_prompt_tokens}+{self.num_output_tokens}, "
            f"computed={self.num_computed_tokens})"
        )


def choices_of(
    message: EngineCoreRequest, next_seq_id: Callable[[], int], client_index: int, hasher: Hasher
) -> list[Request]:
    """The choices of a message that still need tokens, each with a fresh seq_id.

    They share the prompt, whose hashes are computed once.
    """
    prompt_hashes: list[bytes] = []
    hasher.extend(prompt_hashes, message.prompt_token_ids, ExtraKeys(message.cache_salt))
    outputs = dict(enumerate(message.output_token_ids))
    return [
        Request(
            seq_id=next_seq_id(),
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            hasher=hasher,
            choice=choice,
            client_index=client_index,
            output_token_ids=outputs.get(choice, ()),
            prompt_hashes=prompt_hashes,
            seed=message.seed,
            priority=message.priority,
            arrival_time=message.arrival_time,
            cache_salt=message.cache_salt,
            crash_count=message.crash_count,
            tenant=message.tenant,
            agent=message.agent or NO_AGENT,
            label=message.label,
            reader=message.reader,
        )
        for choice in range(message.n)
        if choice not in message.finished_choices
    ]
