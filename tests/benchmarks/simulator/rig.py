"""The scheduler and KV cache of a trace, and a worker that gives its recorded answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from engine_core.block_hashing import NO_EXTRA_KEYS, ExtraKeys
from engine_core.kv_cache.events import PoolObserver
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import SchedulerConnector, SchedulerContext
from engine_core.kv_connector.offload.connector import OffloadingScheduler
from engine_core.request import Request
from engine_core.scheduler.features.base import SchedulerObserver, Unblock
from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefix
from engine_core.scheduler.kv_transfer import Connect, IsStorable, no_connector
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.result import ends_of_rows
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.step_plan import StepPlan
from engine_core.trace.file import TraceFile
from engine_core.trace.recorder import TraceRecorder
from proto.messages.engine_io import NO_AGENT, AgentHint
from proto.messages.kv_connector import (
    NO_PAYLOAD,
    FinishedJob,
    KVConnectorOutput,
    OffloadMetadata,
    OffloadReport,
    Payload,
    TransferJob,
    pack,
    unpack,
)
from proto.messages.lifecycle import KVCacheGeometry
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.multimodal import MultiModalFeature, SharedPixels
from proto.messages.sampling_params import SamplingParams
from proto.messages.sched_trace import Arrival, Decision, TraceHeader
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.benchmarks.simulator.messages import HostTier, ReplayOrder
from tests.benchmarks.simulator.recording import STOP, VOCAB_SIZE, RecordedRequest, Tokens

# A simulated host memory tier: the offloading connector, whose copies only take time.
#
# The scheduler's side is the real one; this replaces the workers' side. Copies of one direction are
# sequential and take time in proportion to their blocks; a step waits only for copies it flushes.


_RANKS = 1


class Tier(Protocol):
    """The KV tier behind the pool of a simulation."""

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        """Return the function that creates the scheduler's connector for this pool."""
        ...

    def begin(self, metadata: Payload, now: float) -> float:
        """Begin the copies of a step at its decision; return when it may be computed."""
        ...

    def take(self, now: float) -> KVConnectorOutput | None:
        """Return a finished copy, or None."""
        ...

    def next_end(self) -> list[float]:
        """Yield the end of the copy that finishes first, if any."""
        ...


class NoTier:
    """No tier behind the pool."""

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        return no_connector

    def begin(self, metadata: Payload, now: float) -> float:
        return now

    def take(self, now: float) -> KVConnectorOutput | None:
        return None

    def next_end(self) -> list[float]:
        return []


NO_TIER: Final = NoTier()


class SimulatedTier:
    """A tier in host memory."""

    def __init__(self, tier: HostTier, header: TraceHeader) -> None:
        self._block_seconds = tier.block_ms / 1e3
        self._num_slots = tier.num_blocks
        self._header = header
        self._free_at = {True: 0.0, False: 0.0}
        self._under_way: dict[int, tuple[float, TransferJob]] = {}
        self._put_off: list[TransferJob] = []
        self._seq_ids: dict[int, int] = {}

    def connect(self, kv_cache: KVCacheManager) -> Connect:
        header = self._header
        # A state counts as a block, of a tier of its own.
        num_tiers = 2 if kv_cache.has_states else 1
        extra = {"cpu_bytes_to_use": num_tiers * self._num_slots * header.block_size}
        config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_connector_extra_config=extra
        )

        def made(
            holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
        ) -> SchedulerConnector:
            context = SchedulerContext(
                geometry=KVCacheGeometry(
                    1, 1, 1, "none", 1, header.groups, state_bytes=header.block_size
                ),
                block_size=header.block_size,
                num_blocks=header.num_blocks,
                fingerprint=bytes(32),
                num_ranks=_RANKS,
                transfer_refs=holds,
                block_ids=kv_cache.block_ids,
                unblock=unblock,
                is_storable=is_storable,
                state_slots=kv_cache if kv_cache.has_states else None,
            )
            return OffloadingScheduler(config, context)

        return made

    def begin(self, metadata: Payload, now: float) -> float:
        """Begin stores deferred by an earlier step, then the step's loads."""
        orders = OffloadMetadata() if metadata == NO_PAYLOAD else unpack(metadata, OffloadMetadata)
        for job in (*self._put_off, *orders.loads):
            self._start(job, now)
        self._put_off = list(orders.stores)
        for job, seq_id in zip(orders.loads, orders.load_seq_ids, strict=True):
            self._seq_ids[job.job_id] = seq_id
        for job in [each for each in self._put_off if each.job_id in orders.flush]:
            self._put_off.remove(job)
            self._start(job, now)
        flushed = (self._under_way[each][0] for each in orders.flush if each in self._under_way)
        return max(flushed, default=now)

    def take(self, now: float) -> KVConnectorOutput | None:
        for number, (end, job) in self._under_way.items():
            if end <= now:
                del self._under_way[number]
                return self._report(job)
        return None

    def next_end(self) -> list[float]:
        return [min(end for end, _ in self._under_way.values())] if self._under_way else []

    def _start(self, job: TransferJob, now: float) -> None:
        seconds = _num_blocks(job) * self._block_seconds
        end = max(now, self._free_at[job.is_load]) + seconds
        self._free_at[job.is_load] = end
        self._under_way[job.job_id] = (end, job)

    def _report(self, job: TransferJob) -> KVConnectorOutput:
        num_blocks = _num_blocks(job)
        num_bytes = num_blocks * self._header.block_size
        done = FinishedJob(job.job_id, True, num_bytes, num_blocks * self._block_seconds)
        seq_id = self._seq_ids.pop(job.job_id, None)
        waits = seq_id in self._seq_ids.values()  # for a state, too
        return KVConnectorOutput(
            finished_recving=[] if seq_id is None or waits else [seq_id],
            worker_metadata=pack(OffloadReport([done])),
        )


def _num_blocks(job: TransferJob) -> int:
    return sum(len(each.block_ids) for each in job.device)


NO_DRAFTS: Final[Mapping[int, int]] = {}
_WRONG: Final = STOP - 1
"""A token that no sequence has."""
EPOCH = 1
CUT_SHORT = ("abort", "error")
_FINGERPRINT = bytes(32)


def settings(header: TraceHeader, order: ReplayOrder) -> TraceHeader:
    """Return the header with the order's replacements; raise msgspec.ValidationError."""
    given = {
        "scheduling_policy": order.policy,
        "pin_policy": order.pin_policy,
        "max_num_seqs": order.max_num_seqs,
        "max_num_batched_tokens": order.max_num_batched_tokens,
    }
    changes: dict[str, str | int | None] = {
        name: value for name, value in given.items() if value is not None
    }
    if "max_num_batched_tokens" in changes:
        changes["max_num_scheduled_tokens"] = None
    scheduler = msgspec.convert(
        msgspec.to_builtins(header.scheduler) | changes, type(header.scheduler)
    )
    num_blocks = order.num_blocks or header.num_blocks
    return msgspec.structs.replace(header, scheduler=scheduler, num_blocks=num_blocks)


class Rig:
    """The scheduler, its KV cache, and their requests.

    one_tenant: all requests have one tenant. aborts: requests aborted in the trace are aborted by
    the caller; otherwise they stop after their last recorded token.
    tier: the KV tier behind the pool. drafts: those of the trace, if it has some.
    """

    def __init__(
        self,
        header: TraceHeader,
        observer: SchedulerObserver,
        clock: Callable[[], float],
        *,
        one_tenant: bool = False,
        aborts: bool = False,
        pool_observers: Sequence[PoolObserver] = (),
        tier: Tier = NO_TIER,
        drafts: "RecordedDrafts | None" = None,
    ) -> None:
        config = header.scheduler
        self.worker = ReplayWorker()
        if drafts is not None:
            drafts.worker = self.worker
        self.kv_cache = KVCacheManager(
            header.num_blocks,
            header.block_size,
            header.enable_prefix_caching,
            _FINGERPRINT,
            groups=header.groups,
            longest_chunk=ChunkRule.from_config(config).longest_chunk,
            num_state_slots=header.num_state_slots,
            observers=pool_observers,
            num_dropped_blocks=header.num_dropped_blocks,
        )
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            epoch=EPOCH,
            max_model_len=header.max_model_len,
            vocab_size=VOCAB_SIZE,
            clock=clock,
            connect=tier.connect(self.kv_cache),
            observer=observer,
            drafting=drafts,
            num_draft_positions=header.num_draft_positions,
            encoder=header.encoder,
        )
        self._image_token_id = header.encoder.vision.image_token_id if header.encoder else 0
        self._one_tenant = one_tenant
        self._aborts = aborts

    def add(self, sequence: RecordedRequest, tokens: Tokens, arrival_time: float) -> None:
        """Add a request with this content to the queue."""
        arrival = sequence.arrival
        num_prompt = arrival.num_prompt_tokens
        known = tokens.first(num_prompt + arrival.num_output_tokens)
        features = []
        for image in arrival.images:
            for position in range(image.first, image.first + image.num_embeds):
                known[position] = self._image_token_id
            mm_hash, pixels = image.number.to_bytes(32, "big"), SharedPixels("image", (1,))
            features.append(
                MultiModalFeature(image.offset, image.length, image.num_embeds, mm_hash, pixels)
            )
        self.worker.expect(arrival.seq_id, tokens, _end(sequence, self._aborts))
        self._add(
            Request(
                seq_id=arrival.seq_id,
                request_id=arrival.request_id,
                choice=arrival.choice,
                prompt_token_ids=known[:num_prompt],
                output_token_ids=known[num_prompt:],
                sampling_params=SamplingParams(
                    max_tokens=arrival.max_tokens,
                    stop_token_ids=(STOP,),
                    prompt_logprobs=None if arrival.reads_cache else 0,
                ),
                hasher=self.kv_cache.hasher,
                priority=arrival.priority,
                arrival_time=arrival_time,
                tenant=0 if self._one_tenant else arrival.tenant,
                agent=_agent_of(arrival),
                extra_keys=ExtraKeys(mm_features=features) if features else NO_EXTRA_KEYS,
            )
        )

    def _add(self, request: Request) -> None:
        """Add a request like the engine's input processor."""
        self.scheduler.add_request(request)
        self.scheduler.queue_limits.count_request(request)


def _end(sequence: RecordedRequest, aborts: bool) -> int:
    """Return the number of tokens after which a stop token ends it; 0 for never."""
    finish = sequence.finish
    if finish is None or finish.reason == "length" or not finish.num_output_tokens:
        return 0
    if aborts and finish.reason in CUT_SHORT:
        return 0
    return sequence.arrival.num_prompt_tokens + finish.num_output_tokens


def _agent_of(arrival: Arrival) -> AgentHint:
    if not arrival.job:
        return NO_AGENT
    return AgentHint(arrival.job, arrival.is_last_step, arrival.ttl_ms)


class ReplayWorker:
    """A worker that knows the outputs of all sequences."""

    def __init__(self) -> None:
        self._tokens: dict[int, Tokens] = {}
        self._ends: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}

    def expect(self, seq_id: int, tokens: Tokens, end: int) -> None:
        """Set the outputs of a sequence. end: total tokens at which it stops; 0 for never."""
        self._tokens[seq_id] = tokens
        self._ends[seq_id] = end

    def token(self, seq_id: int, position: int) -> int:
        """Return the token of a sequence at a position."""
        if position + 1 == self._ends[seq_id]:
            return STOP
        return self._tokens[seq_id].at(position)

    def answer(
        self, output: SchedulerOutput, accepted: Mapping[int, int] = NO_DRAFTS
    ) -> ModelRunnerOutput:
        """Return a token for each sequence whose tokens are all computed after this step.

        Must be called for every step in order, also for empty ones. accepted: by seq_id, tokens of
        a draft, which the sequence gets besides.
        """
        num_tokens = self._num_tokens
        for seq_id in output.finished_seq_ids:
            num_tokens.pop(seq_id, None)
        for new in output.new_requests:
            num_tokens[new.seq_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
        seq_ids = [each.seq_id for each in output.new_requests] + output.cached_requests.seq_ids
        sampled: list[list[int]] = []
        for seq_id, end in zip(seq_ids, ends_of_rows(output), strict=True):
            number = num_tokens[seq_id]
            if end < number:
                sampled.append([])
                continue
            num_tokens[seq_id] = number + 1 + accepted.get(seq_id, 0)
            positions = range(number, num_tokens[seq_id])
            sampled.append([self.token(seq_id, position) for position in positions])
        return ModelRunnerOutput(output.epoch, output.step, seq_ids, sampled)


class RecordedDrafts:
    """A DraftProvider that drafts what a trace says, so that as much is accepted.

    Call `begin` before each step. decisions: of the trace's steps, by number. accepted: tokens of
    their drafts, by step and seq_id. computes_ahead: steps were planned before the result of the
    one before.

        trace     drafted 7 (3 tokens), accepted 2
        replay    the next two tokens of sequence 7, and a wrong one
    """

    max_proposal_len = 1 << 40

    def __init__(
        self,
        decisions: Mapping[int, Decision],
        accepted: Mapping[int, Mapping[int, int]],
        *,
        computes_ahead: bool,
    ) -> None:
        self.worker = ReplayWorker()
        self._computes_ahead = computes_ahead
        self.accepted: Mapping[int, int] = NO_DRAFTS
        self.has_draft_model = any(decision.lookahead for decision in decisions.values())
        self._decisions = decisions
        self._accepted_of = accepted
        self._drafts: dict[int, int] = {}
        self._lookahead: dict[int, int] = {}

    def begin(self, step: int) -> None:
        decision = self._decisions.get(step, Decision())
        self.accepted = self._accepted_of.get(step, NO_DRAFTS)
        self._drafts = dict(zip(decision.drafted, decision.draft_tokens, strict=True))
        self._lookahead = dict(zip(decision.lookahead, decision.lookahead_tokens, strict=True))

    def fill_drafts(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> None:
        for request in requests:
            seq_id, number = request.seq_id, self._drafts.get(request.seq_id, 0)
            if number:
                num_in_flight = request.num_output_placeholders
                first = len(request.all_token_ids)
                num_right = num_in_flight + self.accepted.get(seq_id, 0)
                right = [self.worker.token(seq_id, first + index) for index in range(num_right)]
                num_wrong = num_in_flight + number - num_right
                request.spec_token_ids = right + [_WRONG] * num_wrong

    def may_propose(self, num_requests: int, num_other_tokens: int) -> bool:
        return bool(self._lookahead)

    def choose_proposals(
        self, requests: list[Request], limits: list[int], num_other_tokens: int
    ) -> tuple[list[int], float]:
        """Return the recorded lengths.

        The scheduler asks for a token more behind a step whose only token will be in flight.
        """
        lengths = []
        for request, limit in zip(requests, limits, strict=True):
            length = self._lookahead.get(request.seq_id, 0)
            is_longer = self._computes_ahead and request.seq_id not in self._drafts
            lengths.append(length - 1 if is_longer and length > 1 else min(length, limit))
        return lengths, 0.0

    # The rest teaches a drafter; here everything is known.

    def add_request(self, request: Request) -> None: ...

    def add_outputs(self, request: Request, num_new: int) -> None: ...

    def begin_step(self) -> None: ...

    def record_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None: ...

    def learn_step(self, num_rows: int, seconds: float) -> None: ...

    def end_request(self, request: Request) -> None: ...

    def forget_outputs(self) -> None: ...

    def pop_source_counts(self) -> dict[str, tuple[int, int]]:
        return {}

    def note_draft_kv(self, request: Request, num_tokens: int) -> None: ...

    def keep_proposal(
        self,
        request: Request,
        num_asked: int,
        token_ids: list[int],
        acceptance_probs: Sequence[float],
    ) -> None: ...

    def learn_passes(self, rows: Sequence[int], seconds: Sequence[float]) -> None: ...


# The trace of a simulation, in the format of a daemon's trace.
#
# Lines are written by the recorder, on the virtual clock; jobs are those of the replayed trace.


MAX_BYTES: Final = 1 << 36
"""Maximal size of the file."""
MAX_UNWRITTEN: Final = 1 << 30
"""High enough that no line of a simulation is dropped."""


class FileTape:
    """Writes the trace of a simulation to a file; raises ConfigError if it cannot be created.

    job_of: job by seq_id. clock: the simulation's, from 0.
    """

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        job_of: Callable[[int], str],
        clock: Callable[[], float],
    ) -> None:
        self._file = TraceFile(path, MAX_BYTES, MAX_UNWRITTEN)
        self._file.write_line(header)
        self._job_of = job_of
        seats = min(header.scheduler.max_num_seqs, header.scheduler.token_budget)
        recorder = TraceRecorder(self._put, started_at=0.0, num_seats=seats, clock=clock)
        self.recorder = recorder

    def close(self) -> None:
        self._file.close()

    def _put(self, line: msgspec.Struct) -> None:
        if isinstance(line, Arrival):
            line = msgspec.structs.replace(line, job=self._job_of(line.seq_id))
        self._file.write_line(line)


class Both:
    """Two observers of one scheduler."""

    def __init__(self, first: SchedulerObserver, second: SchedulerObserver) -> None:
        self._observers = (first, second)

    def on_request_added(self, request: Request) -> None:
        for each in self._observers:
            each.on_request_added(request)

    def on_step_begin(
        self,
        plan: StepPlan,
        waiting: RequestQueue,
        running: Sequence[Request],
        kv_cache: KVCacheManager,
        connector: SchedulerConnector,
    ) -> None:
        for each in self._observers:
            each.on_step_begin(plan, waiting, running, kv_cache, connector)

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        for each in self._observers:
            each.on_step_scheduled(step, plan)

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None:
        for each in self._observers:
            each.on_external_hit(request, num_tokens, connector, is_async=is_async)

    def on_step_result(self, result: ModelRunnerOutput) -> None:
        for each in self._observers:
            each.on_step_result(result)

    def on_request_finished(self, request: Request) -> None:
        for each in self._observers:
            each.on_request_finished(request)

    def on_turn_ended(self, request_id: int, job: str, tool: str) -> None:
        for each in self._observers:
            each.on_turn_ended(request_id, job, tool)

    def on_prefix_retained(self, pin: RetainedPrefix, ttl: float) -> None:
        for each in self._observers:
            each.on_prefix_retained(pin, ttl)

    def on_prefix_released(self, pin: RetainedPrefix, reason: str) -> None:
        for each in self._observers:
            each.on_prefix_released(pin, reason)

    def on_event(self, what: str, detail: str) -> None:
        for each in self._observers:
            each.on_event(what, detail)
