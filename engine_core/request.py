"""A request in the engine: one choice of an EngineCoreRequest, with its tokens and counters.

Queues, blocks and text are unknown here. `Request` documents every attribute.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from engine_core.block_hashing import NO_EXTRA_KEYS, BlockHasher, ExtraKeys, adapter_key
from proto.codec import changed
from proto.messages.engine_io import (
    NO_AGENT,
    AgentHint,
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
)
from proto.messages.lora import LoRARequest
from proto.messages.pooling import PoolingParams
from proto.messages.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Status of a request; numbers grow from waiting to finished.

    WAITING: in the queue, without blocks (except the next turn of a session, which has those of
        the last one, a choice that was given those of a sibling, and a request whose KV a connector
        has loaded).
    WAITING_FOR_*: parked in the queue until something other than room is there: a grammar, KV from
        a connector, more input, a prefix that another request is computing, the end of a pause, the
        prompt's KV of another choice, the other rows of a beam search, the trial of a request that
        may have crashed processes, an adapter, a feature from outside, the encoder output of an
        image.
    RUNNING: holds blocks and is scheduled.
    PREEMPTED: back in the queue; its tokens are kept, its KV can be found until it is overwritten.
    FINISHED_*: ended; the number decides the finish reason.
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
    WAITING_FOR_FEATURE = 9
    WAITING_FOR_ADAPTER = 10
    WAITING_FOR_ENCODER = 11
    RUNNING = 12
    PREEMPTED = 13
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
        """Whether it waits for something other than room."""
        return RequestStatus.WAITING < self < RequestStatus.RUNNING

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason for the front end; raises KeyError for an unfinished request."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class Request:
    """One choice that is being generated. Only engine_core/scheduler changes it.

    Except its drafts (speculation/drafting.py), and the status of a choice that is complete when it
    arrives (frontend_io.py).

    Identity, fixed:
        seq_id: its name in messages to workers, never used twice in an epoch.
        request_id, choice: its name in messages to the front end `front_end_index`.
        prompt_token_ids: [num_prompt_tokens], shared by all choices, never changed (the next turn
            of a session gets another list with its input).
        tenant: for fairness; 0 for none. label: the id of its response, which the live view shows
            only to `reader`.
        agent: the agent session that it is a turn of; its name is empty for none.
            agent_session_arrival: arrival of the session's first turn, in seconds;
            continues_agent_session: whether it is neither the first turn nor the last.
            finds_retained_prefix: whether the KV of an earlier turn is retained for it while it
            waits.
        stop_ids: token ids that end it. repetition: repeated outputs end it too, if set.
        seed, choice: key of its random numbers.
        order: (priority, arrival, request id, choice); the lower goes first by priority.
        lora_request: the adapter that computes it; None for the model alone.
        mm_features: images of the prompt, in its order. mm_end: position after the last one, 0
            without any.
        pooling_params: of a request whose prompt is pooled; None for one that generates.
        skip_reading_prefix_cache: every prompt position must be computed, for prompt logprobs or
            pooling, or because the client wants it. Becomes False for all choices once one of
            them has a token.
    Tokens:
        all_token_ids: prompt, then verified outputs; grows at the end only.
        spec_token_ids: drafts that are not verified yet.
    Counters, in tokens:
        num_computed_tokens: positions [0, n) have KV that is valid or being computed.
        num_output_placeholders: outputs being sampled whose ids are not known yet; 0 without
            asynchronous scheduling.
        num_accepted_drafts: outputs that were drafts and came with a step's other token.
        num_cached_tokens: prompt tokens that were in the prefix cache, or kept from the turn
            before, when it was first scheduled. num_external_tokens: tokens that a connector had.
    Life cycle:
        status, stop_reason (the stop token that ended it, unless it is an EOS), num_preemptions;
        queued_at, scheduled_at (first time): seconds of the machine's monotonic clock, None before
        it happened. has_events: whether the next output has events.
        running_index: while it runs, a number that grows along the running list.
        kv_transfer_params: of a finished request, a JSON object for the client about where its KV
            is; empty for none. kv_transfer_request: what the client has sent of that kind.
        crash_count: crashes while it was being computed, since its last progress.
    """

    def __init__(
        self,
        *,
        seq_id: int,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        hasher: BlockHasher | None,
        choice: int = 0,
        front_end_index: int = 0,
        output_token_ids: Iterable[int] = (),
        prompt_hashes: Sequence[bytes] = (),
        seed: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        crash_count: int = 0,
        tenant: int = 0,
        agent: AgentHint = NO_AGENT,
        label: str = "",
        reader: int = 0,
        pooling_params: PoolingParams | None = None,
        skip_reading_prefix_cache: bool = False,
        kv_transfer_request: bytes = b"",
    ) -> None:
        """output_token_ids: generated in an earlier epoch. prompt_hashes: already known hashes."""
        self.seq_id = seq_id
        self.request_id = request_id
        self.choice = choice
        self.front_end_index = front_end_index
        self.pooling_params = pooling_params
        self.skip_reading_prefix_cache = (
            skip_reading_prefix_cache
            or sampling_params.prompt_logprobs is not None
            or (pooling_params is not None and pooling_params.needs_all_tokens)
        )
        self._set_prompt(prompt_token_ids, sampling_params)
        self.seed = seed
        self.priority = priority
        self.arrival_time = arrival_time
        self.extra_keys = extra_keys
        self.lora_request = extra_keys.lora_request
        self.mm_features = extra_keys.mm_features
        self.mm_end = self.mm_features[-1].end if self.mm_features else 0
        self.tenant = tenant
        self.agent = agent
        self.label = label
        self.reader = reader
        self.agent_session_arrival = arrival_time
        self.continues_agent_session = self.finds_retained_prefix = False
        self.order = (priority, arrival_time, request_id, choice)

        self.all_token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.spec_token_ids: list[int] = []
        self._hasher = hasher
        self._block_hashes = list(prompt_hashes)

        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_accepted_drafts = 0
        self.num_cached_tokens = self.num_external_tokens = 0
        self.num_preemptions = 0
        self.running_index = 0

        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self.queued_at: float | None = None
        self.scheduled_at: float | None = None
        self.has_events = False
        self._events: list[tuple[EventType, float]] = []
        self.kv_transfer_params = b""
        self.kv_transfer_request = kv_transfer_request
        self.crash_count = crash_count

    def _set_prompt(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.max_tokens = sampling_params.max_tokens
        self.stop_ids = sampling_params.stop_ids
        self.repetition = sampling_params.repetition

    def next_turn(self, seq_id: int) -> "Request":
        """Return the next turn of a session, which continues where this finished turn ended.

            this one    |------- prompt -------|---- outputs ----|x|
            next turn   |---------------- prompt ----------------|-- input to come --

        The last output (x) was sampled and never computed, so it is dropped. Blocks are not handed
        over here.
        """
        assert self.num_output_tokens > 0, f"{self!r} is not over"
        return Request(
            seq_id=seq_id,
            request_id=self.request_id,
            prompt_token_ids=self.all_token_ids[:-1],
            sampling_params=self.sampling_params,
            hasher=self._hasher,
            choice=self.choice,
            front_end_index=self.front_end_index,
            seed=self.seed,
            priority=self.priority,
            arrival_time=self.arrival_time,
            extra_keys=self.extra_keys,
            tenant=self.tenant,
            label=self.label,
            reader=self.reader,
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )

    def append_input(self, token_ids: list[int], sampling_params: SamplingParams) -> None:
        """Append the input of a turn that has not begun; the prompt becomes a new list."""
        self._set_prompt([*self.prompt_token_ids, *token_ids], sampling_params)
        self.all_token_ids += token_ids

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and verified outputs."""
        return len(self.all_token_ids)

    @property
    def num_tokens_ahead(self) -> int:
        """Number of tokens up to which the next step may compute, including placeholders.

        Without the last token that the request can have, because no token follows it.
        """
        num_tokens = len(self.all_token_ids) + len(self.spec_token_ids)
        if not self.num_output_placeholders:
            return num_tokens
        return min(
            num_tokens + self.num_output_placeholders, self.num_prompt_tokens + self.max_tokens - 1
        )

    @property
    def is_prefilling(self) -> bool:
        """Whether it has known tokens to compute before the last one.

        Otherwise it decodes: a step computes its last known token, and drafts.
        """
        num_known = len(self.all_token_ids) + self.num_output_placeholders
        return self.num_computed_tokens + 1 < num_known

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Copy of the verified outputs, [num_output_tokens]."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks of all_token_ids, computed as far as needed when read.

        Empty without prefix caching.
        """
        if self._hasher is not None:
            self._hasher.extend(self._block_hashes, self.all_token_ids, self.extra_keys)
        return self._block_hashes

    def record_event(self, event: EventType, now: float) -> None:
        """Record an event for the next output. now: monotonic seconds."""
        if event is EventType.QUEUED:
            self.queued_at = now
            self._events.clear()  # of a turn that was queued before it had its input
        elif event is EventType.PREEMPTED:
            self.num_preemptions += 1
        elif self.scheduled_at is None:
            self.scheduled_at = now
        self._events.append((event, now))
        self.has_events = True

    def pop_events(self) -> tuple[EngineCoreEvent, ...]:
        """Return the events since the last call."""
        events, self._events, self.has_events = self._events, [], False
        return tuple(
            EngineCoreEvent(event, at, self.num_cached_tokens, self.num_external_tokens)
            if event is EventType.SCHEDULED
            else EngineCoreEvent(event, at)
            for event, at in events
        )

    def copy_tokens(self, sibling: "Request") -> None:
        """Replace the tokens by those of another choice."""
        self.all_token_ids = sibling.all_token_ids.copy()
        self._block_hashes = sibling.block_hashes.copy()
        if self.scheduled_at is None:
            self.scheduled_at = sibling.scheduled_at
            self.num_cached_tokens = sibling.num_cached_tokens

    def __lt__(self, other: "Request") -> bool:
        return self.order < other.order

    def __hash__(self) -> int:
        return self.seq_id

    def __repr__(self) -> str:
        return (
            f"Request(seq_id={self.seq_id}, request_id={self.request_id}, choice={self.choice}, "
            f"{self.status.name}, tokens={self.num_prompt_tokens}+{self.num_output_tokens}, "
            f"computed={self.num_computed_tokens})"
        )


def with_adapter(message: EngineCoreRequest, lora: LoRARequest) -> EngineCoreRequest:
    """Return a request with an adapter.

    One that changes the encoding of images has encoder outputs and KV of them to itself, by hashes
    that know its content and its scale.
    """
    images = message.mm_features
    if lora.changes_images:
        key = adapter_key(lora)
        images = [changed(image, mm_hash=sha256(image.mm_hash + key).digest()) for image in images]
    return changed(message, lora_request=lora, mm_features=images)


def choices_of(
    message: EngineCoreRequest,
    next_seq_id: Callable[[], int],
    front_end_index: int,
    hasher: BlockHasher | None,
) -> list[Request]:
    """Return the choices of a message that still need tokens, each with a new seq_id.

    They share the prompt, whose hashes are computed once.
    """
    prompt_hashes: list[bytes] = []
    extra_keys = NO_EXTRA_KEYS
    lora, images = message.lora_request, message.mm_features
    if message.cache_salt is not None or message.prompt_embeds or lora is not None or images:
        extra_keys = ExtraKeys(
            message.cache_salt, message.prompt_embeds, len(message.prompt_token_ids), lora, images
        )
    if hasher is not None:
        hasher.extend(prompt_hashes, message.prompt_token_ids, extra_keys)
    outputs = dict(enumerate(message.output_token_ids))
    return [
        Request(
            seq_id=next_seq_id(),
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            hasher=hasher,
            choice=choice,
            front_end_index=front_end_index,
            output_token_ids=outputs.get(choice, ()),
            prompt_hashes=prompt_hashes,
            seed=message.seed,
            priority=message.priority,
            arrival_time=message.arrival_time,
            extra_keys=extra_keys,
            crash_count=message.crash_count,
            tenant=message.tenant,
            agent=message.agent or NO_AGENT,
            label=message.label,
            reader=message.reader,
            pooling_params=message.pooling_params,
            skip_reading_prefix_cache=message.skip_reading_prefix_cache,
            kv_transfer_request=message.kv_transfer_request,
        )
        for choice in range(message.n)
        if choice not in message.finished_choices
    ]
