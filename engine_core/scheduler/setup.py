"""The parts of a scheduler, and the order in which gates and listeners are called.

Gates decide whether a waiting request that would have room is held back. They are asked in the
order of `SchedulerParts.gates`, and the first one that blocks ends the question:

    pause            first, so that a paused request is held for this reason alone, and no later
                     gate begins anything for it
    crash isolation  next: while a suspect runs alone no other request may start, and front ends
                     must know of a suspect before anything else is done for it
    grammar          the grammar is being compiled, or the next mask of a slow one computed: a look
                     into a dictionary, and until it is ready a lookup of the prefix would be in
                     vain
    beam rows        a row waits until its group has advanced: also without a lookup
    sibling forks    offers the KV of a sibling's prompt, which may be longer than the cached
                     prefix that the next two compare with
    prefix wait      looks up the cached prefix, and waits if a running request is computing more
                     of it: cheaper than a load
    KV transfer      last, because it asks the connector for the tokens behind all of these, and
                     its answer holds only if the request is admitted or loaded for at once

Listeners hold nothing back. They are notified of each admission and of each end, in the order of
`SchedulerParts.listeners`: pause and crash isolation, then the parts that are no gates (tenant
fairness, resumable sessions, agent sessions, queue limits, deadlines, prefill throttle,
speculative decoding), then the other gates. Sibling forks correct `num_cached_tokens` of a fork,
so agent sessions, which need the number of tokens that were found in the cache, are notified
before.
"""

from collections.abc import Callable, Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.retention.agent_sessions import AgentSessions
from engine_core.retention.retained_prefixes import RetainedPrefixes
from engine_core.retention.ttl_rule import NoRetention, make_ttl_rule
from engine_core.scheduler.admission import AdmissionPass, Pause, make_kv_watermarks, rules_of
from engine_core.scheduler.beam_groups import BeamGroups
from engine_core.scheduler.crash_isolation import CrashIsolation
from engine_core.scheduler.fairness import TenantFairness
from engine_core.scheduler.hooks import (
    AdmissionGate,
    DraftProvider,
    RequestListener,
    SchedulerObserver,
    TokenConstraints,
)
from engine_core.scheduler.kv_transfer import Connect, KVTransferManager
from engine_core.scheduler.lifecycle import RequestLifecycle
from engine_core.scheduler.limits import (
    ChunkRule,
    Deadlines,
    QueueLimits,
    make_prefill_throttle,
    queue_capacity,
)
from engine_core.scheduler.output import ForcedTokens, OutputBuilder
from engine_core.scheduler.preemption import (
    NonRunningBlocks,
    Preemption,
    PreemptionOrder,
    make_swap_rule,
)
from engine_core.scheduler.prefix_sharing import PrefixWait, SiblingForks
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.queues.registry import make_policy
from engine_core.scheduler.result import ResultPass
from engine_core.scheduler.resumable_sessions import ResumableSessions
from engine_core.scheduler.running import RunningPass
from engine_core.scheduler.speculative_decoding import SpeculativeDecoding
from engine_core.scheduler.tenant_usage import TenantUsage
from proto.config import SchedulerConfig
from proto.kv_connector import LoadFailurePolicy


class SchedulerParts:
    """All parts of a scheduler, built from one configuration.

    gates, listeners: in the order that the module explains.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        next_seq_id: Callable[[], int],
        *,
        epoch: int,
        max_model_len: int,
        gates: Sequence[AdmissionGate],
        clock: Callable[[], float],
        constraints: TokenConstraints | None,
        connect: Connect,
        load_failure_policy: LoadFailurePolicy,
        observer: SchedulerObserver,
        drafting: DraftProvider | None,
        num_draft_positions: int,
    ) -> None:
        self.usage = TenantUsage(max_model_len)
        policy = make_policy(config.scheduling_policy, self.usage)
        self.waiting: RequestQueue = policy.make_queue()
        self.running: list[Request] = []
        self.lifecycle = RequestLifecycle(
            self.waiting, self.running, kv_cache, observer, clock, max_model_len
        )

        # What a step may compute
        self.chunks = ChunkRule.from_config(config)
        self.prefill_throttle = make_prefill_throttle(
            self.chunks.step_budget, config.max_prefill_slowdown, chunked=self.chunks.chunked
        )

        held: set[int] = set() if constraints is None else constraints.held
        self.speculation = SpeculativeDecoding(
            drafting=drafting,
            running=self.running,
            waiting=self.waiting,
            kv_cache=kv_cache,
            chunks=self.chunks,
            max_num_seqs=config.max_num_seqs,
            num_draft_positions=num_draft_positions,
            constraints=constraints,
            max_usage=min(
                config.stop_admission_above, config.preempt_above, 1.0 - config.watermark
            ),
            computes_ahead=bool(config.async_scheduling),
            held=held,
        )

        # Which request loses its blocks when they run out
        watermarks = make_kv_watermarks(config, kv_cache)
        non_running_blocks = NonRunningBlocks(kv_cache)
        order = PreemptionOrder(policy)
        self.preemption = Preemption(
            order, self.waiting, self.running, kv_cache, watermarks, non_running_blocks
        )
        self.swap_rule = make_swap_rule(config.preemption)
        self.fairness = TenantFairness(
            usage=self.usage,
            policy=policy,
            preemption_order=order,
            waiting=self.waiting,
            running=self.running,
            preemption=self.preemption,
            chunks=self.chunks,
        )

        # Listeners that hold nothing back
        self.resumable_sessions = ResumableSessions(
            self.lifecycle,
            next_seq_id,
            self.waiting,
            kv_cache,
            non_running_blocks,
            max_model_len=max_model_len,
            timeout=config.session_timeout,
            clock=clock,
        )
        self.retained_prefixes = RetainedPrefixes(
            kv_cache, config.max_pinned_share, config.max_pinned_share_per_tenant, observer
        )
        retains = config.scheduling_policy == "continuum" and kv_cache.enable_caching
        ttl_rule = make_ttl_rule(config.pin_policy, self.swap_rule) if retains else NoRetention()
        self.agent_sessions = AgentSessions(
            self.retained_prefixes, ttl_rule, kv_cache, clock, evicts_last_turns=retains
        )
        capacity = queue_capacity(config, kv_cache.num_usable_blocks, kv_cache.block_size)
        shares_prompts = kv_cache.enable_caching or not kv_cache.has_states
        self.queue_limits = QueueLimits(capacity, clock, shares_prompts=shares_prompts)
        self.deadlines = Deadlines(clock)

        # Gates
        self.pause = Pause(self.lifecycle.choices)
        self.crash_isolation = CrashIsolation(
            self.running, self.waiting, self.pause, self.preemption, config.crashes_until_isolated
        )
        forced_tokens = ForcedTokens()
        self.beams = BeamGroups(kv_cache, self.preemption, forced_tokens)
        self.kv_transfer = KVTransferManager(
            connect=connect,
            kv_cache=kv_cache,
            waiting=self.waiting,
            non_running_blocks=non_running_blocks,
            policy=load_failure_policy,
            observer=observer,
            swap_rule=self.swap_rule,
            clock=clock,
        )
        sibling_forks = SiblingForks(kv_cache, self.lifecycle.choices, non_running_blocks)
        later_gates: list[AdmissionGate] = [
            *gates,
            *([] if constraints is None else [constraints]),
            self.beams,
            sibling_forks,
            PrefixWait(kv_cache, self.chunks.longest_chunk),
            self.kv_transfer,
        ]
        self.gates: tuple[AdmissionGate, ...] = (self.pause, self.crash_isolation, *later_gates)
        self.listeners: tuple[RequestListener, ...] = (
            self.pause,
            self.crash_isolation,
            self.fairness,
            self.resumable_sessions,
            self.agent_sessions,
            self.queue_limits,
            self.deadlines,
            self.prefill_throttle,
            self.speculation,
            *later_gates,
        )
        for gate in self.gates:
            gate.attach(self._unblock)
        self.resumable_sessions.attach(self._unblock)

        # The passes of a step, and of its result
        self.running_pass = RunningPass(self.running, kv_cache, self.chunks, self.preemption, held)
        self.admission_pass = AdmissionPass(
            waiting=self.waiting,
            running=self.running,
            kv_cache=kv_cache,
            chunks=self.chunks,
            max_num_seqs=config.max_num_seqs,
            max_positions=config.max_num_seqs + num_draft_positions,
            rules=rules_of(config, kv_cache, self.running, watermarks),
            gates=self.gates,
            listeners=self.listeners,
            non_running_blocks=non_running_blocks,
            fairness=self.fairness,
            kv_transfer=self.kv_transfer,
        )
        self.output_builder = OutputBuilder(kv_cache, forced_tokens, constraints, epoch)
        self.result_pass = ResultPass(
            lifecycle=self.lifecycle,
            kv_cache=kv_cache,
            beams=self.beams,
            kv_transfer=self.kv_transfer,
            agent_sessions=self.agent_sessions,
            usage=self.usage,
            speculation=self.speculation,
            max_model_len=max_model_len,
        )
        self.lifecycle.attach(
            resumable_sessions=self.resumable_sessions,
            agent_sessions=self.agent_sessions,
            beams=self.beams,
            crash_isolation=self.crash_isolation,
            kv_transfer=self.kv_transfer,
            output_builder=self.output_builder,
            sibling_forks=sibling_forks,
            listeners=self.listeners,
        )

    def _unblock(self, request: Request) -> None:
        """Make a parked request ready again, in its old place in the queue."""
        if request.status.is_blocked:
            preempted = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
            self.waiting.unpark_request(request)
