"""The scheduler: which tokens of which requests the next step computes.

Owns every Request of the engine, from add_request to its final output, and the
order among them. Knows nothing of sockets, text or tensors.

There is no prefill phase and no decode phase. Each request has tokens that exist
and tokens that are computed, and a step lets the second number catch up with the
first, within one token budget.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.retention.retained_prefixes import PinLimits, Pins
from engine_core.retention.sessions import Jobs
from engine_core.retention.ttl_rule import NoPins, pin_rule_of
from engine_core.scheduler.admission import AdmissionPass, Pause, pressure_of, rules_of
from engine_core.scheduler.beam_groups import BeamGroups
from engine_core.scheduler.crash_isolation import Herald, Quarantine, poison_output
from engine_core.scheduler.fairness import Courtesy
from engine_core.scheduler.hooks import (
    NO_CONSTRAINTS,
    NO_OBSERVER,
    Constraints,
    Gate,
    SchedulerObserver,
)
from engine_core.scheduler.kv_transfer import Connect, ExternalKV, no_connector
from engine_core.scheduler.limits import Backlog, ChunkRule, Deadlines, pace_of, queue_limits
from engine_core.scheduler.output import Dictation, OutputBuilder
from engine_core.scheduler.preemption import (
    IdleBlocks,
    Preemption,
    Victims,
    start_over,
    swap_rule_of,
)
from engine_core.scheduler.prefix_sharing import PrefixWait, SiblingForks
from engine_core.scheduler.queues.base import RequestQueue
from engine_core.scheduler.queues.registry import policy_of
from engine_core.scheduler.result import (
    ClientOutputs,
    ImpossibleResultError,
    NoPlaceholders,
    OutputPlaceholders,
    Placeholders,
    ResultPass,
    check_result,
    error_output,
    stop_token,
)
from engine_core.scheduler.running import RunningPass
from engine_core.scheduler.sessions import Sessions
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.tenant_usage import TenantLedger
from proto.config import SchedulerConfig
from proto.engine_io import EngineCoreOutput, FinishReason, PauseMode
from proto.errors import ErrorInfo
from proto.kv_transfer import KVConnectorOutput, LoadFailurePolicy
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from proto.stats import SchedulerStats

LOAD_ERROR: Final = ErrorInfo(
    "internal", "KV that this request relied on could not be loaded (kv_load_failure_policy: fail)"
)


class Scheduler:
    """Requests in, steps out, tokens back in.

    mint_handle: names for new requests, never the same twice. sessions: more input for
    requests that were opened with it. backlog, deadlines: who takes requests in tells them.
    jobs: keep KV between two turns, until `jobs.end_overdue` or a step finds their time over.

    epoch: of the workers, until `start_over` names another.
    max_model_len: usable length, in tokens, of prompt and output together.
    vocab_size: sampled token ids are below it.
    gates: hold requests back for reasons of their own, beside those that are always there.
    constraints: a gate, too, which says who may not have just any token.
    connect: makes the KV connector. load_failure_policy: what becomes of who relied on it in vain.
    observer: told of all that is decided.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        epoch: int,
        max_model_len: int,
        vocab_size: int,
        gates: Sequence[Gate] = (),
        clock: Callable[[], float] = time.monotonic,
        constraints: Constraints = NO_CONSTRAINTS,
        connect: Connect = no_connector,
        load_failure_policy: LoadFailurePolicy = "recompute",
        observer: SchedulerObserver = NO_OBSERVER,
    ) -> None:
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        ledger = self._ledger = TenantLedger(max_model_len)
        policy = policy_of(config.scheduling_policy, ledger)
        self.mint_handle: Callable[[], int] = itertools.count().__next__
        self.waiting: RequestQueue = policy.make_queue()
        self.running: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._choices: dict[int, dict[int, Request]] = {}
        chunks = ChunkRule.from_config(config)
        self._step_budget = chunks.step_budget
        self._max_num_seqs = config.max_num_seqs
        self._pace = pace_of(chunks.step_budget, config.max_step_stretch, chunked=chunks.chunked)
        pressure = pressure_of(config, kv_cache)
        idle_blocks = IdleBlocks(kv_cache)
        victims = Victims(policy)
        self._preemption = Preemption(
            victims, self.waiting, self.running, kv_cache, pressure, idle_blocks
        )
        self._courtesy = Courtesy(
            ledger, policy, victims, self.waiting, self.running, self._preemption, chunks
        )
        self._running_pass = RunningPass(self.running, kv_cache, chunks, self._preemption)
        self._pause = Pause(self._choices)
        dictation = Dictation()
        self._beams = BeamGroups(kv_cache, self._preemption, dictation)
        self.sessions = Sessions(
            self,
            self.waiting,
            kv_cache,
            idle_blocks,
            max_model_len=max_model_len,
            timeout=config.session_timeout,
            clock=clock,
        )
        limits = queue_limits(config, kv_cache.num_usable_blocks, kv_cache.block_size)
        self.backlog = Backlog(limits, clock)
        self.deadlines = Deadlines(clock)
        self._quarantine = Quarantine(
            self.running,
            self.waiting,
            self._pause.stops,
            self._preemption.evict_running,
            config.crashes_until_alone,
        )
        self._swap_rule = swap_rule_of(config.preemption)
        limits_of_pins = PinLimits(
            kv_cache.num_usable_blocks, config.max_pinned_share, config.max_pinned_share_per_tenant
        )
        self._pins = Pins(kv_cache, limits_of_pins, observer)
        keeps = config.scheduling_policy == "continuum" and kv_cache.enable_caching
        pin_rule = pin_rule_of(config.pin_policy, self._swap_rule) if keeps else NoPins()
        self.jobs = Jobs(self._pins, pin_rule, kv_cache, clock, retires=keeps)
        self.external = ExternalKV(
            connect,
            kv_cache,
            self.waiting,
            idle_blocks,
            load_failure_policy,
            observer,
            self._swap_rule,
            clock,
        )
        self._gates: tuple[Gate, ...] = (
            self._pause,
            self._quarantine,
            self._courtesy,
            self.sessions,
            self.jobs,
            self.backlog,
            self.deadlines,
            *gates,
            constraints,
            self._beams,
            SiblingForks(kv_cache, self._choices),
            PrefixWait(kv_cache.block_size, chunks.longest_chunk),
            self.external,
        )
        for gate in self._gates:
            gate.attach(self._wake)
        self._admission_pass = AdmissionPass(
            self.waiting,
            self.running,
            kv_cache,
            chunks,
            config.max_num_seqs,
            rules_of(config, kv_cache, self.running, pressure),
            self._gates,
            idle_blocks,
            self._courtesy,
            self.external,
        )
        self._output_builder = OutputBuilder(kv_cache, dictation, constraints, epoch)
        self._result_pass = ResultPass(
            self._requests,
            kv_cache,
            self._beams,
            max_model_len,
            self._finish,
            self.abort,
            self._withdraw,
            self.external.void_until,
        )
        self._placeholders: Placeholders = (
            OutputPlaceholders() if config.async_scheduling else NoPlaceholders()
        )
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        self._request_preemptions: list[int] = []
        self._observer = observer
        observer.watch(self.waiting, self.running, kv_cache)

    # Requests

    def add_request(self, request: Request) -> None:
        """Take a request in; it waits until a step has room for it."""
        choices = self._choices.setdefault(request.request_id, {})
        assert request.choice not in choices, f"{request!r} is here already"
        choices[request.choice] = request
        self._requests[request.handle] = request
        request.max_tokens = min(
            request.max_tokens, self._max_model_len - request.num_prompt_tokens
        )
        request.queued_at = self._clock()
        self.jobs.enter(request)
        self._beams.add(request)
        self._quarantine.enter(request)
        self.waiting.add(request)
        self._observer.added(request)

    def abort(self, request_id: int, choice: int | None = None, *, stopped: bool = False) -> int:
        """End a request, or one choice of it, in whatever state it is; no output follows.

        The choices of a beam search end together. stopped: its client has all that it wanted,
        so the KV of a job's turn is kept as if it had ended by itself.
        Returns the number of choices that ended; 0 for a request that is over already.
        """
        choices = self._choices.get(request_id, {})
        if self._beams.owns(request_id):
            choice = None
        ended = [each for number, each in choices.items() if choice is None or number == choice]
        self._abort_all(ended, stopped=stopped)
        return len(ended)

    def end_turn(self, request_id: int, job: str, tool: str) -> None:
        """A turn that is over was read: its job waits for this tool, or for none ("").

        Jobs that are over, or unknown, and turns that are not the last one are passed over.
        """
        self._observer.turn_ended(request_id, job, tool)
        self.jobs.end_turn(request_id, job, tool)

    def abort_client(self, client_index: int) -> int:
        """End every request of one front end; returns the number of choices that ended."""
        ended = [each for each in self._requests.values() if each.client_index == client_index]
        self._abort_all(ended)
        return len(ended)

    def abort_everyone(self) -> ClientOutputs:
        """End every request in whatever state it is; returns the last outputs of all choices."""
        requests = list(self._requests.values())
        outputs: ClientOutputs = {}
        for each in {each.request_id: each for each in requests}.values():
            choices = list(self._choices[each.request_id])
            if self._beams.owns(each.request_id):
                choices = list(range(each.sampling_params.beam_width))
            outputs.setdefault(each.client_index, []).extend(
                EngineCoreOutput(each.request_id, choice, 0, [], FinishReason.ABORT)
                for choice in choices
            )
        self._abort_all(requests)
        return outputs

    def knows(self, request_id: int) -> bool:
        """Some choice of this request is not finished."""
        return request_id in self._choices

    @property
    def num_unfinished(self) -> int:
        """Requests waiting and running."""
        return len(self._requests)

    @property
    def requests(self) -> Iterable[Request]:
        """Those, in the order in which they came."""
        return self._requests.values()

    @property
    def has_work(self) -> bool:
        """A step would compute something or tell the workers what they can forget."""
        if self._output_builder.has_finished_handles or self.external.wants_step:
            return True
        return bool(self.running or self.waiting.num_ready) and not self._pause.frozen

    @property
    def step(self) -> int:
        """Number of the last step scheduled."""
        return self._output_builder.step

    def pause(self, mode: PauseMode) -> None:
        """Start no new request, or schedule nothing at all, until `resume`."""
        self._pause.begin_pause(mode)
        self._observer.happened("pause", mode)

    def resume(self) -> None:
        """End a pause; nothing happens without one."""
        self._pause.end_pause()
        self._observer.happened("resume", "")

    @property
    def worker_epoch(self) -> int:
        """Of the workers that the steps are for."""
        return self._output_builder.epoch

    @property
    def pause_mode(self) -> PauseMode | None:
        """None without a pause."""
        return self._pause.mode

    def start_over(self, epoch: int) -> ClientOutputs:
        """Workers of a new epoch, which know nothing, take over: all is computed again.

        To be called between two steps; results of earlier steps are void. Returns the
        final outputs of requests that have crashed the workers too often.
        """
        self._observer.happened("restart", f"workers of epoch {epoch}")
        poisonous = self._quarantine.note_crash()
        self.external.start_over()
        self._pins.drop_all("restart")
        start_over(self._requests.values(), self._preemption, self._kv_cache, self._clock())
        self._output_builder.begin_epoch(epoch)
        outputs: ClientOutputs = {}
        for request in poisonous:
            if request.handle in self._requests:
                self._result_pass.end_with(poison_output(request), request, outputs)
        return outputs

    def tell_begun(self, herald: Herald) -> None:
        """Who tells front ends of requests that an engine may die of, while a step is decided."""
        self._quarantine.tell(herald)

    def crash_progress(self) -> list[tuple[Request, int]]:
        """Running requests that an engine may have died of, and their tokens in complete steps."""
        return self._quarantine.progress()

    def reset_prefix_cache(self, *, preempting: bool = False) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any block is in use.

        preempting: take the blocks of everyone who has some first. Who ran stands in the
        queue again, in the order of admission, and to the workers is a new sequence.
        """
        if preempting:
            self.external.drop_loads()
            victims = self._preemption.evict_all(self._clock())
            for victim in victims:
                self._output_builder.forget(victim.handle)
            self._num_preemptions += len(victims)
        if not self._kv_cache.num_sequences:
            self._pins.drop_all("reset")
        self._observer.happened("reset", "preempting" if preempting else "")
        return self._kv_cache.reset_prefix_cache()

    # A step

    def convene(self) -> None:
        """Before a step that may be the last thing this engine does: see `Quarantine`."""
        self._quarantine.convene()

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Where running requests had to give way, nothing is admitted."""
        plan = StepPlan(self._step_budget, self._clock(), self._step_budget)
        self._pins.sweep(plan.now)
        self._observer.step_begins(plan)
        if not self._pause.frozen:
            self._preemption.relieve(plan)
            late = self._courtesy.line_up()
            plan.prompt_budget = self._prompt_budget()
            self._running_pass.run(plan, late)
            if not plan.preempted:
                self._admission_pass.run(plan)
            self._running_pass.run_late(plan, late)
        num_scheduled = len(plan.continued) + len(plan.admitted)
        assert num_scheduled <= len(self.running), "more is scheduled than runs"
        assert len(self.running) <= self._max_num_seqs, "more runs than may"
        assert plan.budget >= 0, "more tokens are scheduled than a step has"
        num_tokens = sum(plan.continued_tokens) + sum(plan.admitted_tokens)
        assert num_tokens == self._step_budget - plan.budget, "the budget was not kept"
        self.external.describe_rewound(plan)
        output = self.external.complete(self._output_builder.build(plan))
        self._observer.step_decided(output.step, plan)
        self._advance(plan)
        self._placeholders.reserve(plan)
        return output

    def update_from_output(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> ClientOutputs:
        """Append the tokens of a step, finish what is over, and say what to tell whom.

        Results are taken in in the order of their steps. Tokens of a request that was
        aborted or that stopped meanwhile are dropped; those of one that was preempted
        meanwhile are kept. Raises ImpossibleResultError for a result that does not answer
        this step; the workers that follow compute it anew.
        """
        self._observer.step_done(result)
        check_result(output, result, self._vocab_size)
        outputs: ClientOutputs = {}
        num_unfinished = len(self._requests)
        self.external.prove(output.step)
        wrong = self._result_pass.run(output, result, outputs)
        if len(self._requests) < num_unfinished:
            self._clear_running()
            self.sessions.begin_turns(outputs)
        if wrong:
            raise ImpossibleResultError(wrong, outputs)
        self._placeholders.fill(self._requests, result, self.external.void_until)
        num_decoding = output.cached_requests.num_scheduled_tokens.count(1)
        num_prompt_tokens = output.total_num_scheduled_tokens - num_decoding
        self._pace.learn(num_decoding, num_prompt_tokens, result.compute_seconds)
        self._swap_rule.learn_step(num_prompt_tokens, result.compute_seconds)
        return outputs

    def update_from_connector(self, report: KVConnectorOutput) -> ClientOutputs:
        """A rank has finished copies. To be taken in before the result of a step that follows it.

        Returns the final outputs of requests whose KV could not be loaded, if these are to end.
        """
        outputs: ClientOutputs = {}
        if report.invalid_block_ids:
            ended = self.external.invalidate(
                report.invalid_block_ids, self._requests.values(), self.step
            )
            outputs = self.end_with_errors({each.handle: LOAD_ERROR for each in ended})
        self.external.note(report)
        return outputs

    def end_with_errors(self, errors: Mapping[int, ErrorInfo]) -> ClientOutputs:
        """End requests, by handle, that cannot go on; those that are over already are left out."""
        outputs: ClientOutputs = {}
        for handle, error in errors.items():
            request = self._requests.get(handle)
            if request is not None:
                self._result_pass.end_with(error_output(request, error), request, outputs)
        self._clear_running()
        self.sessions.begin_turns(outputs)
        return outputs

    def take_stats(self) -> SchedulerStats:
        """Gauges of now, and deltas since the last call."""
        queries, hits = self._kv_cache.take_prefix_cache_stats()
        external_queries, external_hits = self.external.take_stats()
        job_seconds, tool_seconds = self.jobs.take_seconds()
        num_taken, num_hit, num_expired, num_given_up = self._pins.take_counts()
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self._kv_cache.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
            num_scheduled_tokens=self._num_scheduled_tokens,
            kv_evictions=self._kv_cache.take_evictions(),
            num_deferred=len(self.waiting) - self.waiting.num_ready,
            num_corrupted=self._result_pass.take_num_corrupted(),
            num_queued_reqs=len(self.backlog),
            num_queued_tokens=self.backlog.num_tokens,
            external_prefix_cache_queries=external_queries,
            external_prefix_cache_hits=external_hits,
            kv_media=self.external.connector.take_stats(),
            num_pinned_blocks=self._pins.num_blocks,
            num_pinned_jobs=len(self._pins),
            num_pins_taken=num_taken,
            num_pins_hit=num_hit,
            num_pins_expired=num_expired,
            num_pins_given_up=num_given_up,
            job_seconds=job_seconds,
            tool_seconds=tool_seconds,
            num_discarded_tokens=self._result_pass.take_num_discarded(),
            request_preemptions=self._request_preemptions,
        )
        self._request_preemptions = []
        self._num_preemptions = self._num_scheduled_tokens = 0
        return stats

    # Parts of the above

    def _prompt_budget(self) -> int:
        """Tokens of prompts that the step may have beside those who decode."""
        prefills = self._ledger.prefills
        num_missing = 0
        if num_waiting := len(self.backlog):  # as much of it as has seats
            num_seated = min(num_waiting, self._admission_pass.num_free_seats)
            num_missing = self.backlog.num_tokens * num_seated // num_waiting
        for request in prefills.values():
            num_missing += request.num_tokens - request.num_computed_tokens
        return self._pace.prompt_tokens(len(self.running) - len(prefills), num_missing)

    def _wake(self, request: Request) -> None:
        """A gate lets go of a request."""
        if request.status.is_blocked:
            preempted = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
            self.waiting.bring_back(request)

    def _advance(self, plan: StepPlan) -> None:
        """Count the tokens of the plan as computed: by the time anyone relies on it they are."""
        for request, num_tokens in zip(plan.continued, plan.continued_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        for request, num_tokens in zip(plan.admitted, plan.admitted_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        self._num_preemptions += len(plan.preempted)
        self._num_scheduled_tokens += self._step_budget - plan.budget

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request by itself; the caller clears it from the running list."""
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        if status is RequestStatus.FINISHED_STOPPED:
            request.stop_reason = stop_token(request)
        request.status = status
        self.external.depart(request)
        self.sessions.end_turn(request)
        self.jobs.finish(request, well=status is not RequestStatus.FINISHED_ERROR)
        self._release(request)

    def _abort_all(self, requests: list[Request], *, stopped: bool = False) -> None:
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
            request.status = RequestStatus.FINISHED_ABORTED
            self.external.depart(request)
            self.jobs.finish(request, well=stopped)
            self._release(request)
        self._clear_running()

    def _withdraw(self, request: Request) -> None:
        """What a request computed is wrong: nobody is to find it, or to keep it."""
        self.external.withdraw(request)
        self.jobs.disown(request)

    def _release(self, request: Request) -> None:
        self._kv_cache.free(request)
        self._observer.finished(request)
        if request.scheduled_at is not None:
            self._result_pass.depart(request, self.step)
            self._request_preemptions.append(request.num_preemptions)
        self._output_builder.forget(request.handle)
        for gate in self._gates:
            gate.forget(request)
        del self._requests[request.handle]
        choices = self._choices[request.request_id]
        del choices[request.choice]
        if not choices:
            del self._choices[request.request_id]

    def _clear_running(self) -> None:
        self.running[:] = [each for each in self.running if not each.is_finished]
