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
from engine_core.scheduler.crash_isolation import CrashProgressSink, repeated_crash_output
from engine_core.scheduler.hooks import (
    NO_OBSERVER,
    AdmissionGate,
    SchedulerObserver,
    TokenConstraints,
)
from engine_core.scheduler.kv_transfer import Connect, no_connector
from engine_core.scheduler.preemption import start_over
from engine_core.scheduler.result import (
    ClientOutputs,
    ImpossibleResultError,
    ResultPass,
    check_result,
    error_output,
    reserve_placeholders,
    stop_token,
)
from engine_core.scheduler.setup import SchedulerParts
from engine_core.scheduler.step_plan import StepPlan
from proto.config import SchedulerConfig
from proto.engine_io import EngineCoreOutput, FinishReason, PauseMode
from proto.errors import ErrorInfo
from proto.kv_connector import KVConnectorOutput, LoadFailurePolicy
from proto.model_runner_output import ModelRunnerOutput
from proto.scheduler_output import SchedulerOutput
from proto.stats import SchedulerStats

LOAD_ERROR: Final = ErrorInfo(
    "internal", "KV that this request relied on could not be loaded (kv_load_failure_policy: fail)"
)


class Scheduler:
    """Requests in, steps out, tokens back in.

    next_seq_id: names for new requests, never the same twice. sessions: more input for
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
        gates: Sequence[AdmissionGate] = (),
        clock: Callable[[], float] = time.monotonic,
        constraints: TokenConstraints | None = None,
        connect: Connect = no_connector,
        load_failure_policy: LoadFailurePolicy = "recompute",
        observer: SchedulerObserver = NO_OBSERVER,
    ) -> None:
        parts = SchedulerParts(
            self,
            config,
            kv_cache,
            epoch=epoch,
            max_model_len=max_model_len,
            gates=gates,
            clock=clock,
            constraints=constraints,
            connect=connect,
            load_failure_policy=load_failure_policy,
            observer=observer,
        )
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        self._max_num_seqs = config.max_num_seqs
        self._step_budget = parts.chunks.step_budget
        self.next_seq_id: Callable[[], int] = itertools.count().__next__
        self._requests: dict[int, Request] = {}
        self._choices = parts.choices
        self.waiting = parts.waiting
        self.running = parts.running
        self.sessions = parts.sessions
        self.agent_sessions = parts.agent_sessions
        self.queue_limits = parts.queue_limits
        self.deadlines = parts.deadlines
        self.kv_transfer = parts.kv_transfer
        self._usage = parts.usage
        self._prefill_throttle = parts.prefill_throttle
        self._preemption = parts.preemption
        self._swap_rule = parts.swap_rule
        self._fairness = parts.fairness
        self._retained_prefixes = parts.retained_prefixes
        self._pause = parts.pause
        self._crash_isolation = parts.crash_isolation
        self._beams = parts.beams
        self._listeners = parts.listeners
        self._running_pass = parts.running_pass
        self._admission_pass = parts.admission_pass
        self._output_builder = parts.output_builder
        self._result_pass = ResultPass(
            self,
            self._requests,
            kv_cache,
            self._beams,
            max_model_len,
            self.kv_transfer.discard_until_step,
        )
        self._async_scheduling = config.async_scheduling
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
        self._requests[request.seq_id] = request
        request.max_tokens = min(
            request.max_tokens, self._max_model_len - request.num_prompt_tokens
        )
        request.queued_at = self._clock()
        self.agent_sessions.enter(request)
        self._beams.add(request)
        self._crash_isolation.enter(request)
        self.waiting.add(request)
        self._observer.added(request)

    def abort(self, request_id: int, choice: int | None = None, *, stopped: bool = False) -> int:
        """End a request, or one choice of it, in whatever state it is; no output follows.

        The choices of a beam search end together. stopped: its client has all that it wanted,
        so the KV of a job's turn is kept as if it had ended by itself.
        Returns the number of choices that ended; 0 for a request that has ended already.
        """
        choices = self._choices.get(request_id, {})
        if self._beams.owns(request_id):
            choice = None
        ended = [each for number, each in choices.items() if choice is None or number == choice]
        self._abort_all(ended, stopped=stopped)
        return len(ended)

    def end_turn(self, request_id: int, job: str, tool: str) -> None:
        """A turn that is over was read: its job waits for this tool, or for none ("").

        Ignores sessions that have ended or are unknown, and turns that are not the last one.
        """
        self._observer.turn_ended(request_id, job, tool)
        self.agent_sessions.end_turn(request_id, job, tool)

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
        if self._output_builder.has_finished_seq_ids or self.kv_transfer.wants_step:
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
        poisonous = self._crash_isolation.note_crash()
        self.kv_transfer.start_over()
        self._retained_prefixes.drop_all("restart")
        start_over(self._requests.values(), self._preemption, self._kv_cache, self._clock())
        self._output_builder.begin_epoch(epoch)
        outputs: ClientOutputs = {}
        for request in poisonous:
            if request.seq_id in self._requests:
                self._result_pass.end_with(repeated_crash_output(request), request, outputs)
        return outputs

    def report_crash_progress_to(self, herald: CrashProgressSink) -> None:
        """Who tells front ends of requests that an engine may die of, while a step is decided."""
        self._crash_isolation.tell(herald)

    def crash_progress(self) -> list[tuple[Request, int]]:
        """Running requests that an engine may have died of, and their tokens in complete steps."""
        return self._crash_isolation.progress()

    def reset_prefix_cache(self, *, preempting: bool = False) -> bool:
        """Forget all cached prefixes; False, changing nothing, while any block is in use.

        preempting: take the blocks of everyone who has some first. Who ran stands in the
        queue again, in the order of admission, and to the workers is a new sequence.
        """
        if preempting:
            self.kv_transfer.drop_loads()
            preemption_order = self._preemption.preempt_all(self._clock())
            for victim in preemption_order:
                self._output_builder.forget(victim.seq_id)
            self._num_preemptions += len(preemption_order)
        if not self._kv_cache.num_sequences:
            self._retained_prefixes.drop_all("reset")
        self._observer.happened("reset", "preempting" if preempting else "")
        return self._kv_cache.reset_prefix_cache()

    # A step

    def isolate_suspect(self) -> None:
        """Before a step that may be the last thing this engine does: see `CrashIsolation`."""
        self._crash_isolation.isolate_suspect()

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Where running requests had to give way, nothing is admitted."""
        plan = StepPlan(self._step_budget, self._clock(), self._step_budget)
        self._retained_prefixes.sweep(plan.now)
        for request in self.agent_sessions.update_leads():
            self.waiting.reorder(request)
        self._observer.step_begins(plan)
        if not self._pause.frozen:
            self._preemption.preempt_above_watermark(plan)
            late = self._fairness.line_up()
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
        self.kv_transfer.describe_rewound(plan)
        output = self.kv_transfer.complete(self._output_builder.build(plan))
        self._observer.step_decided(output.step, plan)
        self._advance(plan)
        if self._async_scheduling:
            reserve_placeholders(plan)
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
        self.kv_transfer.confirm_loads(output.step)
        wrong = self._result_pass.run(output, result, outputs)
        if len(self._requests) < num_unfinished:
            self._clear_running()
            self.sessions.begin_turns(outputs)
        if wrong:
            raise ImpossibleResultError(wrong, outputs)
        if self._async_scheduling:
            self._result_pass.fill_placeholders(result)
        num_decoding = output.cached_requests.num_scheduled_tokens.count(1)
        num_prompt_tokens = output.total_num_scheduled_tokens - num_decoding
        self._prefill_throttle.learn(num_decoding, num_prompt_tokens, result.compute_seconds)
        self._swap_rule.learn_step(num_prompt_tokens, result.compute_seconds)
        return outputs

    def update_from_connector(self, report: KVConnectorOutput) -> ClientOutputs:
        """A rank has finished copies. To be taken in before the result of a step that follows it.

        Returns the final outputs of requests whose KV could not be loaded, if these are to end.
        """
        outputs: ClientOutputs = {}
        if report.invalid_block_ids:
            ended = self.kv_transfer.invalidate(
                report.invalid_block_ids, self._requests.values(), self.step
            )
            outputs = self.end_with_errors({each.seq_id: LOAD_ERROR for each in ended})
        self.kv_transfer.note(report)
        return outputs

    def end_with_errors(self, errors: Mapping[int, ErrorInfo]) -> ClientOutputs:
        """End requests by seq_id with an error; requests that have ended already are skipped."""
        outputs: ClientOutputs = {}
        for seq_id, error in errors.items():
            request = self._requests.get(seq_id)
            if request is not None:
                self._result_pass.end_with(error_output(request, error), request, outputs)
        self._clear_running()
        self.sessions.begin_turns(outputs)
        return outputs

    def take_stats(self) -> SchedulerStats:
        """Gauges of now, and deltas since the last call."""
        queries, hits = self._kv_cache.pop_prefix_cache_stats()
        external_queries, external_hits = self.kv_transfer.take_stats()
        job_seconds, tool_seconds = self.agent_sessions.take_seconds()
        num_taken, num_hit, num_expired, num_given_up = self._retained_prefixes.take_counts()
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self._kv_cache.usage,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
            num_scheduled_tokens=self._num_scheduled_tokens,
            kv_evictions=self._kv_cache.pop_evictions(),
            num_deferred=len(self.waiting) - self.waiting.num_ready,
            num_corrupted=self._result_pass.take_num_corrupted(),
            num_queued_reqs=len(self.queue_limits),
            num_queued_tokens=self.queue_limits.num_tokens,
            external_prefix_cache_queries=external_queries,
            external_prefix_cache_hits=external_hits,
            kv_media=self.kv_transfer.connector.drain_stats(),
            num_pinned_blocks=self._retained_prefixes.num_blocks,
            num_pinned_jobs=len(self._retained_prefixes),
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
        """Return how many prompt tokens the step may have beside decoding requests."""
        prefills = self._usage.prefills
        num_missing = 0
        if num_waiting := len(self.queue_limits):  # as much of it as has seats
            num_seated = min(num_waiting, self._admission_pass.num_free_seats)
            num_missing = self.queue_limits.num_tokens * num_seated // num_waiting
        for request in prefills.values():
            num_missing += request.num_tokens - request.num_computed_tokens
        return self._prefill_throttle.prompt_tokens(len(self.running) - len(prefills), num_missing)

    def _advance(self, plan: StepPlan) -> None:
        """Count the tokens of the plan as computed: by the time anyone relies on it they are."""
        for request, num_tokens in zip(plan.continued, plan.continued_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        for request, num_tokens in zip(plan.admitted, plan.admitted_tokens, strict=True):
            request.num_computed_tokens += num_tokens
        self._num_preemptions += len(plan.preempted)
        self._num_scheduled_tokens += self._step_budget - plan.budget

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request by itself; the caller clears it from the running list."""
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        if status is RequestStatus.FINISHED_STOPPED:
            request.stop_reason = stop_token(request)
        request.status = status
        self.kv_transfer.on_finish(request)
        self.sessions.end_turn(request)
        self.agent_sessions.finish(request, well=status is not RequestStatus.FINISHED_ERROR)
        self._release(request)

    def _abort_all(self, requests: list[Request], *, stopped: bool = False) -> None:
        for request in requests:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
            request.status = RequestStatus.FINISHED_ABORTED
            self.kv_transfer.on_finish(request)
            self.agent_sessions.finish(request, well=stopped)
            self._release(request)
        self._clear_running()

    def withdraw(self, request: Request) -> None:
        """Make the KV of a request unfindable and discard its copies: its content is wrong."""
        self.kv_transfer.invalidate_cache(request)
        self.agent_sessions.disown(request)

    def _release(self, request: Request) -> None:
        self._kv_cache.free(request)
        self._observer.finished(request)
        if request.scheduled_at is not None:
            self._result_pass.depart(request, self.step)
            self._request_preemptions.append(request.num_preemptions)
        self._output_builder.forget(request.seq_id)
        for listener in self._listeners:
            listener.on_released(request)
        del self._requests[request.seq_id]
        choices = self._choices[request.request_id]
        del choices[request.choice]
        if not choices:
            del self._choices[request.request_id]

    def _clear_running(self) -> None:
        self.running[:] = [each for each in self.running if not each.is_finished]
