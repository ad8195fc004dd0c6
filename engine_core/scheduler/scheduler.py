"""The scheduler: which tokens of which requests the next step computes.

`Scheduler` is the public face and builds its parts: requests are added and aborted, `schedule()`
plans a step (`planner.py`), and `update_from_output()` processes its result (`result.py`).
`request_lifecycle.py` owns the requests. Sockets, text and tensors are unknown here.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.admission_rules import make_kv_watermarks
from engine_core.scheduler.compute_meter import ComputeMeter
from engine_core.scheduler.features.adapters import AdapterGate, AdapterResidency
from engine_core.scheduler.features.base import NO_OBSERVER, SchedulerFeature, SchedulerObserver
from engine_core.scheduler.features.beam_groups import BeamGroups
from engine_core.scheduler.features.crash_isolation import (
    CrashIsolation,
    ReportBegun,
    repeated_crash_error,
)
from engine_core.scheduler.features.encoder_inputs import EncoderInputs
from engine_core.scheduler.features.fairness import TenantFairness
from engine_core.scheduler.features.grammars import GrammarGate, Grammars
from engine_core.scheduler.features.outside import FeatureContext, OutsideFeature
from engine_core.scheduler.features.pause import Pause
from engine_core.scheduler.features.prefix_sharing import PrefixWait, SiblingForks
from engine_core.scheduler.features.resumable_sessions import ResumableSessions
from engine_core.scheduler.features.retention.agent_sessions import AgentSessions
from engine_core.scheduler.features.retention.retained_prefixes import RetainedPrefixes
from engine_core.scheduler.features.retention.ttl_rule import NoRetention, make_ttl_rule
from engine_core.scheduler.features.speculative_decoding import DraftProvider, SpeculativeDecoding
from engine_core.scheduler.features.tenant_usage import TenantUsage
from engine_core.scheduler.kv_transfer import Connect, KVTransferManager, no_connector
from engine_core.scheduler.limits import (
    ChunkRule,
    Deadlines,
    PrefillThrottle,
    QueueLimits,
    queue_capacity,
)
from engine_core.scheduler.output import ForcedTokens, OutputBuilder
from engine_core.scheduler.planner import StepPlanner
from engine_core.scheduler.preemption import (
    Preemption,
    PreemptionOrder,
    SwapRule,
    WaitingBlockHolders,
)
from engine_core.scheduler.queues.policies import FairSchedulingPolicy
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd, RequestLifecycle
from engine_core.scheduler.result import ResultPass
from engine_core.scheduler.step_plan import StepPlan, num_sampled_positions
from proto.errors import ErrorInfo
from proto.messages.engine_io import EngineCoreOutput, FinishReason, PauseMode
from proto.messages.kv_connector import KVConnectorOutput, LoadFailurePolicy
from proto.messages.kv_events import DEVICE_MEDIUM
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.multimodal import EncoderLimits
from proto.messages.scheduler_output import SchedulerOutput
from proto.messages.stats import KVTier, SchedulerStats
from proto.runtime.plugins import load_part
from proto.settings.config import LoRAConfig, SchedulerConfig

LOAD_ERROR: Final = ErrorInfo(
    "internal", "KV that this request relied on could not be loaded (kv_load_failure_policy: fail)"
)


class Scheduler:
    """Requests in, steps out, tokens back in.

    next_seq_id: returns a name for a new sequence, never the same twice.
    step_limit: what made the last step shorter than its token budget (`StepPlanner.step_limit`).
    resumable_sessions, agent_sessions, queue_limits, deadlines, crash_isolation, kv_transfer,
        adapters: parts that the engine's input and loop also use directly; the last is None if no
        adapters are served.

    epoch: of the workers, until `begin_worker_epoch`. max_model_len: maximum tokens of prompt and
    output. vocab_size: sampled token ids are below it. more_features: asked before the last ones.
    grammars: None if no request has one. connect: makes the KV connector.
    load_failure_policy: whether a request whose KV could not be loaded computes it or fails.
    drafting: proposes drafts for running requests; None for none. num_draft_positions: that a step
    may sample beyond one for each of max_num_seqs. report_begun: called while a step is scheduled
    with requests that may crash the engine. lora: None if no adapters are served. encoder: None for
    a model that reads no images.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        epoch: int,
        max_model_len: int,
        vocab_size: int,
        more_features: Sequence[SchedulerFeature] = (),
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        connect: Connect = no_connector,
        load_failure_policy: LoadFailurePolicy = "recompute",
        observer: SchedulerObserver = NO_OBSERVER,
        compute_meter: ComputeMeter | None = None,
        drafting: DraftProvider | None = None,
        num_draft_positions: int = 0,
        report_begun: ReportBegun | None = None,
        lora: LoRAConfig | None = None,
        encoder: EncoderLimits | None = None,
    ) -> None:
        self.next_seq_id: Callable[[], int] = itertools.count().__next__
        self.step_limit = ""
        self._kv_cache = kv_cache
        self._clock = clock
        self._observer = observer
        self._compute_meter = compute_meter
        self._async_scheduling = bool(config.async_scheduling)
        self._row_counts: dict[int, tuple[int, int]] = {}  # by step in flight
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0

        self._usage = TenantUsage(max_model_len)
        policy = FairSchedulingPolicy(config.scheduling_policy, self._usage)
        features: list[SchedulerFeature] = []
        forced_tokens = ForcedTokens()
        self._output_builder = OutputBuilder(kv_cache, forced_tokens, grammars, epoch)
        lifecycle = RequestLifecycle(
            policy.make_queue(),
            kv_cache,
            features,
            self._output_builder,
            observer,
            clock,
            max_model_len,
        )
        self._lifecycle, unblock = lifecycle, lifecycle.unblock
        self.waiting, self.running = lifecycle.waiting, lifecycle.running

        self._chunks = ChunkRule.from_config(config)
        residency = None if lora is None else AdapterResidency(lora.num_resident)
        self._encoder_inputs: EncoderInputs | None = None
        if encoder is not None:
            resident = () if residency is None else residency.resident
            self._encoder_inputs = EncoderInputs(
                encoder, lifecycle, policy, self._chunks, config.max_num_seqs, resident
            )

        # Which request loses its blocks when they run out
        waiting_block_holders = WaitingBlockHolders(kv_cache)
        preemption_order = PreemptionOrder(policy)
        self._preemption = Preemption(
            lifecycle,
            preemption_order,
            kv_cache,
            make_kv_watermarks(config, kv_cache),
            waiting_block_holders,
            self._encoder_inputs,
        )
        self._swap_rule = SwapRule(config.preemption)

        # Features
        self._pause = Pause(lifecycle)
        self.crash_isolation = CrashIsolation(
            lifecycle,
            self._pause,
            self._preemption,
            config.crashes_until_isolated,
            report_begun,
            self._encoder_inputs,
        )
        fairness = TenantFairness(
            lifecycle, self._usage, policy, preemption_order, self._preemption, self._chunks
        )
        self._retained_prefixes = RetainedPrefixes(
            kv_cache, config.max_pinned_share, config.max_pinned_share_per_tenant, observer
        )
        retains = config.scheduling_policy == "continuum" and kv_cache.enable_caching
        self.agent_sessions = AgentSessions(
            self._retained_prefixes,
            make_ttl_rule(config.pin_policy, self._swap_rule) if retains else NoRetention(),
            kv_cache,
            clock,
            evicts_last_turns=retains,
        )
        self.resumable_sessions = ResumableSessions(
            lifecycle,
            self.next_seq_id,
            kv_cache,
            waiting_block_holders,
            max_model_len=max_model_len,
            timeout=config.session_timeout,
            clock=clock,
        )
        self.queue_limits = QueueLimits(
            queue_capacity(config, kv_cache.num_usable_blocks, kv_cache.block_size),
            clock,
            shares_prompts=kv_cache.enable_caching or not kv_cache.has_states,
        )
        self.deadlines = Deadlines(clock)
        self._prefill_throttle = PrefillThrottle(
            self._chunks.token_budget, config.max_prefill_slowdown, chunked=self._chunks.chunked
        )
        awaiting_mask: set[int] = set() if grammars is None else grammars.awaiting_mask
        self._speculation = SpeculativeDecoding(
            drafting,
            lifecycle,
            kv_cache,
            self._chunks,
            config.max_num_seqs,
            num_draft_positions,
            grammars,
            max_usage=min(
                config.stop_admission_above, config.preempt_above, 1.0 - config.watermark
            ),
            computes_ahead=self._async_scheduling,
            awaiting_mask=awaiting_mask,
        )
        self.adapters: AdapterGate | None = None
        if lora is not None and residency is not None:
            self.adapters = AdapterGate(
                lifecycle, lora, residency, self._pause, self.crash_isolation
            )
        beams = BeamGroups(kv_cache, self._preemption, forced_tokens, unblock)
        context = FeatureContext(config, kv_cache, unblock, clock)
        outside: list[SchedulerFeature] = [
            load_part("scheduler_feature", name, "scheduler_features", OutsideFeature)(context)
            for name in config.scheduler_features
        ]
        self.kv_transfer = KVTransferManager(
            connect,
            lifecycle,
            kv_cache,
            waiting_block_holders,
            load_failure_policy,
            observer,
            self._swap_rule,
            clock,
        )

        # The first feature that blocks a request ends the question, so the order is:
        # - A pause blocks a request alone: no later feature begins anything for it.
        # - While a suspect of crashes runs alone no other request may start, and front ends must
        #   know of a suspect before anything else is done for it.
        # - Features that block nothing. Sibling forks correct `num_cached_tokens` of a fork, so
        #   agent sessions, which need the number of tokens that were found in the cache, are
        #   notified before.
        # - Features from outside may hold a request back before anything is prepared for it.
        # - A grammar, or a row of a beam search: a look into a dictionary. Until they are ready a
        #   lookup of the prefix would be in vain.
        # - An adapter may have a slot reserved for a request, which should be able to use it.
        # - Sibling forks offer the KV of a sibling's prompt, which may be longer than the cached
        #   prefix that the next two compare with.
        # - The wait for a prefix looks it up in the cache: cheaper than a load.
        # - Encoder inputs block nothing here: whether an image is missing is known only when the KV
        #   from which a request can start is (`StepPlanner._admit`).
        # - The KV transfer asks the connector for the tokens after all of these, and its answer
        #   holds only if the request is admitted or loaded for at once.
        features += [
            self._pause,
            self.crash_isolation,
            fairness,
            self.agent_sessions,
            self.resumable_sessions,
            self.queue_limits,
            self.deadlines,
            self._prefill_throttle,
            self._speculation,
            *outside,
            *more_features,
            *([] if grammars is None else [GrammarGate(grammars)]),
            beams,
            *([] if self.adapters is None else [self.adapters]),
            SiblingForks(kv_cache, lifecycle.choices, waiting_block_holders, unblock),
            PrefixWait(
                kv_cache,
                self._chunks.longest_chunk,
                unblock,
                frozenset() if self._encoder_inputs is None else self._encoder_inputs.stalled,
            ),
            *([] if self._encoder_inputs is None else [self._encoder_inputs]),
            self.kv_transfer,
        ]

        # A step and its result
        self._planner = StepPlanner(
            lifecycle,
            kv_cache,
            config,
            self._chunks,
            features,
            self._preemption,
            fairness,
            self._prefill_throttle,
            self._speculation,
            self.kv_transfer,
            awaiting_mask,
            self._encoder_inputs,
        )
        self._result_pass = ResultPass(
            lifecycle,
            kv_cache,
            beams,
            self.kv_transfer,
            self.resumable_sessions,
            self.agent_sessions,
            self._usage,
            self._speculation,
            self.adapters,
            self._encoder_inputs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )

    # Requests

    def add_request(self, request: Request) -> None:
        """Put a request into the queue, where it waits until a step has room for it."""
        self._lifecycle.add_request(request)

    def abort_request(
        self, request_id: int, choice: int | None = None, *, stopped: bool = False
    ) -> int:
        """End a request, or one choice of it, in any status; no output follows.

        The choices of a beam search end together. stopped: the client has received all that it
        wanted, so an agent's turn counts as complete and its KV may be retained.
        Returns the number of choices that ended; 0 for a request that has ended already.
        """
        return self._lifecycle.abort_request(request_id, choice, stopped=stopped)

    def abort_front_end_requests(self, front_end_index: int) -> None:
        """End all requests of one front end."""
        self._lifecycle.abort_requests(
            [each for each in self.requests if each.front_end_index == front_end_index]
        )

    def abort_all_requests(self) -> OutputsByFrontEnd:
        """End all requests; return the final outputs of all choices."""
        requests = list(self.requests)
        outputs: OutputsByFrontEnd = {}
        for request in {request.request_id: request for request in requests}.values():
            choices = list(self._lifecycle.choices[request.request_id])
            if request.sampling_params.beam_width:
                choices = list(range(request.sampling_params.beam_width))
            outputs.setdefault(request.front_end_index, []).extend(
                EngineCoreOutput(request.request_id, choice, 0, [], FinishReason.ABORT)
                for choice in choices
            )
        self._lifecycle.abort_requests(requests)
        return outputs

    def report_tool(self, request_id: int, agent_session: str, tool: str) -> None:
        """Note which tool an agent's session waits for after a turn; "" for none.

        Ignores sessions that have ended or are unknown, and turns that are not the last one.
        """
        self._observer.on_turn_ended(request_id, agent_session, tool)
        self.agent_sessions.report_tool(request_id, agent_session, tool)

    def unblock(self, request: Request) -> None:
        """Make a parked request ready again, in its old place in the queue; ignores any other."""
        self._lifecycle.unblock(request)

    def has_request(self, request_id: int) -> bool:
        """Return whether any choice of this request is unfinished."""
        return request_id in self._lifecycle.choices

    @property
    def num_unfinished(self) -> int:
        return len(self._lifecycle.requests)

    @property
    def requests(self) -> Iterable[Request]:
        """Waiting and running requests, in the order in which they were added."""
        return self._lifecycle.requests.values()

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something, or tell workers what they must forget."""
        if self._output_builder.has_finished_seq_ids or self.kv_transfer.wants_step:
            return True
        encodes = False
        if self._encoder_inputs is not None:
            if self._encoder_inputs.cache.has_freed:
                return True
            encodes = self._encoder_inputs.has_work
        return bool(encodes or self.running or self.waiting.num_ready) and not self._pause.frozen

    @property
    def step(self) -> int:
        """Number of the last scheduled step."""
        return self._output_builder.step

    def pause(self, mode: PauseMode) -> None:
        """Start no new request, or schedule nothing at all, until `resume`."""
        self._pause.begin_pause(mode)
        self._observer.on_event("pause", mode)

    def resume(self) -> None:
        """End a pause; nothing happens without one."""
        self._pause.end_pause()
        self._observer.on_event("resume", "")

    @property
    def worker_epoch(self) -> int:
        return self._output_builder.epoch

    @property
    def pause_mode(self) -> PauseMode | None:
        return self._pause.mode

    def begin_worker_epoch(self, epoch: int) -> OutputsByFrontEnd:
        """Prepare for workers of a new epoch: all requests are computed again.

        Called between two steps; results of earlier steps must not be passed any more. Returns the
        final outputs of requests that have crashed the workers too often.
        """
        self._observer.on_event("restart", f"workers of epoch {epoch}")
        crashing = self.crash_isolation.note_crash()
        self.kv_transfer.forget_transfers()
        self._retained_prefixes.release_all("restart")
        self._preemption.requeue_all(self._clock())
        if self.adapters is not None:
            self.adapters.begin_worker_epoch()
        if self._encoder_inputs is not None:
            self._encoder_inputs.begin_worker_epoch()
        self._row_counts.clear()
        self._speculation.begin_worker_epoch()
        if self._compute_meter is not None:
            self._compute_meter.drop_steps()
        self._output_builder.begin_epoch(epoch)
        outputs: OutputsByFrontEnd = {}
        for request in crashing:
            if request.seq_id in self._lifecycle.requests:
                error = repeated_crash_error(request.crash_count)
                self._result_pass.fail_request(request, error, outputs)
        return outputs

    def reset_prefix_cache(self, *, preempting: bool = False) -> bool:
        """Forget all cached prefixes; False, with the cache unchanged, while any block is in use.

        preempting: first preempt all requests that hold blocks. They return to the queue in the
        order of admission, and are new sequences to the workers. In any case earlier outputs give
        no drafts any more, and without requests that hold blocks no prefix stays retained.
        """
        if preempting:
            self.kv_transfer.drop_loads()
            preempted = self._preemption.preempt_all(self._clock())
            for request in preempted:
                self._output_builder.finish_sequence(request.seq_id)
            self._num_preemptions += len(preempted)
        if not self._kv_cache.num_sequences:
            self._retained_prefixes.release_all("reset")
        self._speculation.forget_outputs()
        self._observer.on_event("reset", "preempting" if preempting else "")
        return self._kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Forget all encoder outputs of images; False, with none forgotten, while any is needed."""
        self._observer.on_event("encoder reset", "")
        return self._encoder_inputs is None or self._encoder_inputs.cache.reset()

    # A step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and return the message for the workers."""
        plan = StepPlan(self._chunks.token_budget, self._clock())
        self._kv_cache.begin_step()
        self._update_retained_prefixes(plan)
        connector = self.kv_transfer.connector
        self._observer.on_step_begin(plan, self.waiting, self.running, self._kv_cache, connector)
        if self._pause.frozen:
            plan.limit = "pause"
        else:
            self._planner.plan_requests(plan)
            if self.adapters is not None:
                self.adapters.end_admission(self.waiting.num_ready)
            if self._encoder_inputs is not None:
                self._encoder_inputs.end_admission()
        if self._encoder_inputs is not None:
            self._encoder_inputs.end_planning(plan, self._output_builder.step + 1)
        self._planner.check_plan(plan)
        self.kv_transfer.resend_rewound(plan)
        output = self._output_builder.build_output(plan)
        output = self.kv_transfer.add_connector_metadata(output)
        self._observer.on_step_scheduled(output.step, plan)
        self._advance_counters(output.step, plan)
        self.step_limit = plan.limit
        return output

    def update_from_output(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> OutputsByFrontEnd:
        """Append the tokens of a step, end requests that are complete, and return the outputs.

        Results are processed in the order of their steps. Tokens of a request that has ended
        meanwhile are dropped; those of one that was preempted meanwhile are kept. Raises
        ImpossibleResultError for a result that does not answer this step; workers of a new epoch
        compute the step again.
        """
        self._observer.on_step_result(result)
        outputs = self._result_pass.apply_result(output, result, self._output_builder.step)
        if output.total_num_scheduled_tokens:
            self._learn_step_time(output.step, result.compute_seconds)
        if self._encoder_inputs is not None:
            self._charge_encoding(self._encoder_inputs)
        return outputs

    def update_from_connector(self, report: KVConnectorOutput) -> OutputsByFrontEnd:
        """Process copies that the workers have finished, before the result of a later step.

        Returns the final outputs of requests that fail because their KV could not be loaded.
        """
        outputs: OutputsByFrontEnd = {}
        if report.invalid_block_ids or report.invalid_state_slots:
            failed = self.kv_transfer.discard_invalid_blocks(
                report.invalid_block_ids, report.invalid_state_slots, self.requests, self.step
            )
            outputs = self.fail_requests({request.seq_id: LOAD_ERROR for request in failed})
        self.kv_transfer.apply_report(report)
        return outputs

    def fail_requests(self, errors: Mapping[int, ErrorInfo]) -> OutputsByFrontEnd:
        """End requests, by seq_id, with an error; ignores requests that have ended already."""
        return self._result_pass.fail_requests(errors)

    def rewind_rows(self, output: SchedulerOutput, seq_ids: Sequence[int]) -> None:
        """Take rows out of the oldest step in flight, because their masks are late.

        Their requests are as they were before the step, and what it and a later one in flight
        compute for them does not count. A recurrent state cannot be taken back, nor the blocks of a
        window that a later step has freed, so such a request computes all of its tokens again.
        """
        cached = output.cached_requests
        starts = dict(zip(cached.seq_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.seq_id: new.num_computed_tokens for new in output.new_requests}
        kv_cache = self._kv_cache
        keeps_blocks = kv_cache.caches_all_prefixes or (
            not kv_cache.has_states and self.step == output.step
        )
        for seq_id in seq_ids:
            request = self._lifecycle.requests.get(seq_id)
            if request is None:
                continue
            is_running = request.status is RequestStatus.RUNNING
            num_valid = starts[seq_id] if is_running and keeps_blocks else 0
            self.kv_transfer.rewind_request(request, num_valid, self.step)

    @property
    def kv_tiers(self) -> list[KVTier]:
        """How full the KV pool is, and the media of the connector."""
        num_blocks = self._kv_cache.num_usable_blocks
        pool = KVTier(DEVICE_MEDIUM, num_blocks, num_blocks - self._kv_cache.pool.num_free)
        return [pool, *self.kv_transfer.connector.tiers()]

    def pop_stats(self) -> SchedulerStats:
        """Return gauges of now, and counts since the last call."""
        queries, hits = self._kv_cache.pop_prefix_cache_stats()
        external_queries, external_hits = self.kv_transfer.pop_stats()
        agent_session_seconds, tool_seconds = self.agent_sessions.pop_durations()
        num_taken, num_hit, num_expired, num_evicted = self._retained_prefixes.pop_counts()
        num_drafts, num_drafted, num_accepted, per_pos, num_invalid = self._speculation.pop_stats()
        sources = self._speculation.pop_source_counts()
        num_waiting = len(self.waiting)
        num_ready = 0 if self.pause_mode == "freeze" else self.waiting.num_ready
        meter = self._compute_meter
        flops, read_bytes, write_bytes = (0, 0, 0) if meter is None else meter.pop_totals()
        shares: tuple[list[float], list[float]] = ([], []) if meter is None else meter.pop_shares()
        lora = None if self.adapters is None else self.adapters.pop_stats()
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=num_waiting,
            kv_cache_usage=self._kv_cache.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
            num_scheduled_tokens=self._num_scheduled_tokens,
            kv_evictions=self._kv_cache.pop_evictions(),
            num_deferred=num_waiting - num_ready,
            num_corrupted=self._result_pass.pop_num_corrupted(),
            num_queued_reqs=len(self.queue_limits),
            num_queued_tokens=self.queue_limits.num_tokens,
            external_prefix_cache_queries=external_queries,
            external_prefix_cache_hits=external_hits,
            kv_media=self.kv_transfer.connector.drain_stats(),
            kv_tiers=self.kv_tiers,
            num_pinned_blocks=self._retained_prefixes.num_blocks,
            num_pinned_agent_sessions=len(self._retained_prefixes),
            num_pins_taken=num_taken,
            num_pins_hit=num_hit,
            num_pins_expired=num_expired,
            num_pins_given_up=num_evicted,
            agent_session_seconds=agent_session_seconds,
            tool_seconds=tool_seconds,
            num_discarded_tokens=self._result_pass.pop_num_discarded(),
            estimated_flops=flops,
            estimated_read_bytes=read_bytes,
            estimated_write_bytes=write_bytes,
            flops_shares=shares[0],
            bandwidth_shares=shares[1],
            num_drafts=num_drafts,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            accepted_per_pos=per_pos,
            num_invalid_draft_tokens=num_invalid,
            draft_tokens_by_source={name: counts[0] for name, counts in sources.items()},
            accepted_by_source={name: counts[1] for name, counts in sources.items()},
            lora=lora,
            encoder=None if self._encoder_inputs is None else self._encoder_inputs.pop_stats(),
        )
        self._num_preemptions = self._num_scheduled_tokens = 0
        return stats

    # Parts of a step

    def _update_retained_prefixes(self, plan: StepPlan) -> None:
        """Release expired prefixes, and reorder waiting turns that gained or lost theirs."""
        self._retained_prefixes.release_expired(plan.now)
        for request in self.agent_sessions.update_leads():
            self.waiting.reorder_request(request)

    def _advance_counters(self, step: int, plan: StepPlan) -> None:
        """Count the planned tokens as computed, and a placeholder for each sampled position.

        Asynchronous scheduling plans a step before the result of the one before it has arrived.
        The ids of sampled tokens are not known then, but the worker has them by the time it
        computes the next step:

            all_token_ids     |--- prompt ---|-- outputs --|
            placeholders                                   | ? |
            next step computes                             |-1-|   and samples another

        What needs the ids waits for the result, which takes back what was counted for rejected
        drafts.
        """
        if self._compute_meter is not None:
            self._compute_meter.record_step(step, plan)
        for request, num_tokens in zip(plan.continued, plan.continued_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        for request, num_tokens in zip(plan.admitted, plan.admitted_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        if self._async_scheduling:
            for request in chain(plan.continued, plan.admitted):
                request.num_output_placeholders += num_sampled_positions(
                    len(request.all_token_ids) + request.num_output_placeholders,
                    request.num_computed_tokens,
                )
        num_scheduled = self._chunks.token_budget - plan.budget
        if num_scheduled:  # only then there will be a result
            num_decoding = len(plan.continued) + len(plan.admitted) - plan.num_prefilling
            num_rows = num_decoding + plan.num_draft_tokens
            self._row_counts[step] = num_rows, plan.num_prompt_tokens
        self._num_preemptions += len(plan.preempted)
        self._num_scheduled_tokens += num_scheduled

    def _charge_encoding(self, encoder_inputs: EncoderInputs) -> None:
        """Charge encoder time to tenants as the prompt tokens that it would have been enough for.

        A row counts as a token while the time of either is unknown.
        """
        token_seconds = self._swap_rule.token_seconds
        for share in encoder_inputs.pop_shares():
            is_known = token_seconds and share.seconds
            num_tokens = share.seconds / token_seconds if is_known else share.num_rows
            self._usage.charge_tenant(share.tenant, num_tokens)

    def _learn_step_time(self, step: int, seconds: float) -> None:
        num_decoding, num_prompt_tokens = self._row_counts.pop(step, (0, 0))
        self._prefill_throttle.learn_step(num_decoding, num_prompt_tokens, seconds)
        self._speculation.learn_step(num_decoding + num_prompt_tokens, seconds)
        self._swap_rule.learn_step(num_prompt_tokens, seconds)
        if self._compute_meter is not None:
            self._compute_meter.record_time(step, seconds)
