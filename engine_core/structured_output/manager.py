"""Structured output: requests that wait for their grammar, and masks for those that have it.

    InputProcessor   admit_request ─▶ compiler ─▶ event_fd ─▶ pop_compiled_requests ─▶ accept
                                                                                     or refuse
    BusyLoop         request_masks(oldest step) ─▶ threads ─▶ event_fd ─▶ pop_masks ─▶ workers
                     find_violations(result): a token that its mask forbids ends the request

A step is masked when it is the oldest in flight, because only then all tokens before it are
known: with one step in flight as soon as it is sent, with two when the result before it arrives.
The masks are computed in threads while the model computes the step:

    engine   send step N ─▶ request_masks(N) ────▶ event_fd ─▶ send GrammarOutput(N)
    threads                  └ consume, fill ────┘
    worker        step N: inputs, forward ───────────────── wait ─▶ sample

A step waits for MAX_WAIT_SECONDS at most. A row whose mask is late then costs only itself: what
the step computes for it is ignored (`Scheduler.rewind_rows`), and the scheduler leaves it out until
the mask is there. A step never waits for a row of a grammar that was slow
(`matchers.py:GrammarCost`): the row is planned when its mask is ready, in every second step at
most. A request whose mask takes longer than MAX_LATE_SECONDS ends with an error.

    row of a slow grammar   planned ─▶ result ─▶ mask ─▶ planned ─▶ …
    in `awaiting_mask`      |------------------------|   |-----

Only these threads advance matchers, by tokens that the engine has accepted; tokens that it dropped
never reach a matcher, so nothing is ever rolled back. The tokens of a draft are consumed by copies,
one for each mask after the first:

    step      | x | d | e |        x: the last known token, d e: its draft
    masks       m   m   m          of the matcher, of a copy that has read d, of one with d e

A mask after a token that the grammar refuses has no effect, because the worker accepts no draft
that it could not have sampled. To not compute such tokens, a draft is cut before it is planned.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from engine_core.request import Request
from engine_core.scheduler.step_plan import StepPlan, num_sampled_positions
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.compiler import GrammarCache, GrammarCompiler
from engine_core.structured_output.mask_threads import MaskTask, MaskThreads
from engine_core.structured_output.matchers import (
    FREE_SECONDS,
    FreeMatcher,
    GrammarCost,
    MaskRow,
    Matcher,
    ThinkingMatcher,
)
from engine_core.structured_output.sandbox import GrammarSandbox, SandboxSetup
from engine_core.worker_group import WorkerFailedError
from proto.errors import ErrorInfo, RequestError
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.grammar import FREE_TEXT, GrammarSource
from proto.messages.lifecycle import ProcessBoot
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import ThinkingRule
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.runtime.host_resources import usable_cores
from proto.runtime.sockets import EventFd
from proto.settings.turn_ends import with_end_tokens

logger = logging.getLogger("tokend.grammars")

_T = TypeVar("_T")

MAX_THREADS: Final = 8
"""Threads that share the masks of a step."""
MAX_WAIT_SECONDS: Final = 0.1
"""Time from which on a step goes without the rows whose masks are missing."""
MAX_LATE_SECONDS: Final = 5.0
"""Time that a row waits for a mask before its request ends."""
LATE: Final = (
    f"the masks of the grammar take too long: one was not there after {MAX_LATE_SECONDS:g} s"
)
CONTRADICTION: Final = "no token satisfies both the grammar and the other parameters of the request"
_MAX_LEAD_TOKENS: Final = 64
"""Tokens that the matcher of a draft consumes in one step, 3 to 8 µs each."""
_MAX_LOCK_SECONDS: Final = 0.001
_MAX_DRAFT_SECONDS: Final = 0.005
"""Time of a step's plan that may pass with questions about drafts to matchers."""


@dataclass(slots=True)
class _ConstrainedRow:
    """One choice and its matcher.

    field: path of the request field that its grammar comes from.
    compiled, rule: what its matchers are made of.
    num_free: number of output tokens before which its masks forbid nothing.
    num_consumed: number of output tokens that its matcher has consumed.
    num_in_flight: steps that sample it and whose results have not arrived.
    task: its masks that a thread computes. masks: those after `num_consumed` output tokens, once
        they are computed. late_since: when the row began to wait for them.
    lead: a second matcher, for drafts, which the engine's thread advances when it is asked for
        forced tokens; the first one belongs to the threads that compute masks.
    num_lead: number of output tokens that `lead` has consumed.
    """

    request: Request
    matcher: Matcher
    field: str
    compiled: Matcher
    rule: ThinkingRule | None = None
    num_free: int = 0
    num_consumed: int = 0
    num_in_flight: int = 0
    task: MaskTask | None = None
    masks: Sequence[tuple[MaskRow, str]] = ()
    late_since: float = 0.0
    lead: Matcher | None = None
    num_lead: int = 0

    @property
    def cost(self) -> GrammarCost:
        return self.matcher.cost

    @property
    def has_mask(self) -> bool:
        """Whether the mask of its next token is there."""
        return bool(self.masks) and self.num_consumed == self.request.num_output_tokens

    def begin_task(self, draft: list[int]) -> MaskTask:
        """Return what a thread has to compute for the next token, and for those of a draft."""
        request = self.request
        token_ids = request.all_token_ids[request.num_prompt_tokens + self.num_consumed :]
        self.num_consumed = request.num_output_tokens
        self.masks = ()
        self.task = MaskTask(
            request.seq_id, request.tenant, self.matcher, self.cost, token_ids, draft
        )
        return self.task

    def needs_mask(self, num_outputs: int) -> bool:
        """Return whether a token may be forbidden after this many outputs."""
        if isinstance(self.matcher, ThinkingMatcher) and self.matcher.is_always_free:
            return False
        return num_outputs >= self.num_free


@dataclass(slots=True)
class StepMasks:
    """The masks of a step, from the request for them to the result of the step.

    deadline: monotonic seconds. awaited: by seq_id, rows whose masks the step waits for. rows: by
    seq_id, of each sampled position the mask, and a message for the client if the text cannot
    continue there. late: sequences whose result is ignored.
    """

    epoch: int
    step: int
    deadline: float
    awaited: dict[int, "_ConstrainedRow"] = field(default_factory=dict)
    rows: dict[int, Sequence[tuple[MaskRow, str]]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def message(self) -> GrammarOutput:
        """Return the message for the workers."""
        seq_ids = [seq_id for seq_id, masks in self.rows.items() for _ in masks]
        masks = b"".join(mask.tobytes() for masks in self.rows.values() for mask, _ in masks)
        return GrammarOutput(self.epoch, self.step, seq_ids, masks)


@dataclass(frozen=True, slots=True)
class Violations:
    """Sequences of a step that cannot continue, by seq_id, with the errors for their clients.

    before: none of their tokens of the step counts, so they end before the result is processed.
    after: some drafts before the violation were accepted, so they end when those are known.
    """

    before: dict[int, ErrorInfo]
    after: dict[int, ErrorInfo]


NO_VIOLATIONS: Final = Violations({}, {})


class StructuredOutputManager:
    """Owns the grammars of all requests, from admission to their end.

    The scheduler asks it which requests wait (`scheduler/features/grammars.py`). Matchers outlive
    preemptions and workers. descriptor: readable when `pop_compiled_requests` or `pop_masks` has
    something to return. awaiting_mask: sequences that wait for a mask, and those of slow grammars
    from the plan of a step on. num_threads: that share the masks of a step.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        event_fd: EventFd,
        num_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.awaiting_mask: set[int] = set()
        self._clock = clock
        self._compiler = compiler
        self._event_fd = event_fd
        self.descriptor = event_fd.descriptor
        self._blocked: dict[int, GrammarSource] = {}  # by seq_id
        self._blocked_by_source: dict[
            GrammarSource, dict[int, tuple[Request, ThinkingRule | None]]
        ] = {}  # the same choices, by source and seq_id
        self._rows: dict[int, _ConstrainedRow] = {}  # by seq_id
        self._unblocked: list[Request] = []
        self._late: dict[int, _ConstrainedRow] = {}  # by seq_id, the first to be late comes first
        self._draft_seconds = 0.0  # of the present plan
        self._last_masked_step = 0
        self._collected: StepMasks | None = None  # of the oldest step, until they are sent
        self._masks: dict[int, StepMasks] = {}  # by step, of steps in flight
        self._threads = MaskThreads(lambda: compiler.backend, event_fd, num_threads)

    def clear_descriptor(self) -> None:
        """Make the descriptor unreadable; call it before the pop methods."""
        self._event_fd.clear()

    def warm_up(self) -> None:
        """Start what the first grammar would wait for; later calls do nothing."""
        self._compiler.warm_up()

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._threads.close()
        self._event_fd.close()

    # Requests that come in.

    def admit_request(self, message: EngineCoreRequest) -> bool:
        """Return whether a request can be accepted now; else `pop_compiled_requests` returns it.

        Raises GrammarError if its grammar is known to be unusable.
        """
        source = grammar_source_of(message)
        if source is None:
            return True
        compiled = self._compiler.request_grammar(source, message.tenant)
        if isinstance(compiled, RequestError):
            raise compiled
        return compiled is not None

    def add_choice(self, request: Request, message: EngineCoreRequest) -> None:
        """Register a choice that was queued; blocks it until its grammar is compiled."""
        source = grammar_source_of(message)
        if source is None:
            return
        compiled = self._compiler.request_grammar(source, message.tenant)
        if compiled is None:
            self._blocked[request.seq_id] = source
            choices = self._blocked_by_source.setdefault(source, {})
            choices[request.seq_id] = request, message.thinking
        elif not isinstance(compiled, RequestError):
            row = self._constrained_row(request, compiled, message.thinking, source.field)
            self._rows[request.seq_id] = row

    def pop_compiled_requests(self) -> list[tuple[int, int, RequestError | None]]:
        """Return requests whose grammar was compiled since the last call.

        A request is (front end, request id, error); the error is None for a valid grammar.
        """
        requests: dict[tuple[int, int], RequestError | None] = {}
        for source, compiled in self._compiler.pop_compiled():
            error = compiled if isinstance(compiled, RequestError) else None
            for seq_id, (request, rule) in self._blocked_by_source.pop(source, {}).items():
                requests[request.front_end_index, request.request_id] = error
                if not isinstance(compiled, RequestError):
                    del self._blocked[seq_id]
                    self._rows[seq_id] = self._constrained_row(
                        request, compiled, rule, source.field
                    )
                    self._unblocked.append(request)
        return [(*request, error) for request, error in requests.items()]

    def _constrained_row(
        self, request: Request, compiled: Matcher, rule: ThinkingRule | None, field_path: str
    ) -> _ConstrainedRow:
        """Give a choice a matcher of its own.

        If only a reasoning budget applies, no mask is needed before it can be used up.
        """
        matcher = self._new_matcher(request, compiled, rule)
        num_free = rule.budget or 0 if rule and isinstance(compiled, FreeMatcher) else 0
        return _ConstrainedRow(request, matcher, field_path, compiled, rule, num_free)

    def _new_matcher(
        self, request: Request, compiled: Matcher, rule: ThinkingRule | None
    ) -> Matcher:
        matcher = compiled.copy()
        if rule is None:
            return matcher
        eos_token_ids = request.sampling_params.eos_token_ids
        return ThinkingMatcher(matcher, rule, self._compiler.backend, eos_token_ids)

    # Questions of the scheduler (Grammars in engine_core/scheduler/features/grammars.py).

    def is_blocked(self, request: Request) -> bool:
        """Return whether a request waits for its grammar, or for a mask of a slow one.

        A slow mask that has not been begun is begun, and the request waits for it. If it waits,
        `pop_unblocked` returns it later, unless it ends before.
        """
        seq_id = request.seq_id
        row = self._rows.get(seq_id)
        needs_task = row is not None and not (row.task or row.has_mask or row.num_in_flight)
        if row is not None and needs_task and row.cost.is_slow:
            self._threads.submit([], [self._begin_late(row)])
        return seq_id in self._blocked or seq_id in self.awaiting_mask

    def pop_unblocked(self) -> list[Request]:
        """Return requests that wait no longer since the last call; some may have ended.

        To be called after each method that can end a wait: `pop_compiled_requests`, `pop_masks`,
        `end_step` and `begin_worker_epoch`.
        """
        unblocked, self._unblocked = self._unblocked, []
        return unblocked

    def forget_request(self, request: Request) -> None:
        row = self._rows.pop(request.seq_id, None)
        self.awaiting_mask.discard(request.seq_id)
        self._late.pop(request.seq_id, None)
        if row is not None and row.task is not None:
            self._threads.discard(row.task)
        source = self._blocked.pop(request.seq_id, None)
        if source is None:
            return
        choices = self._blocked_by_source.get(source, {})
        choices.pop(request.seq_id, None)
        if not choices:
            self._blocked_by_source.pop(source, None)
            self._compiler.withdraw_grammar(source)

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        """Return the constrained sequences that sample in a step and may need a mask.

        A sequence samples if the step computes all of its known tokens:

            all_token_ids, placeholders   |-------------|
            computed and planned          |-------------|  samples
                                          |--------|       is a chunk of a prompt
        """
        self._draft_seconds = 0.0
        if not self._rows:
            return []
        seq_ids = [
            *self._sampling(plan.continued, plan.continued_tokens),
            *self._sampling(plan.admitted, plan.admitted_tokens),
        ]
        for seq_id in seq_ids:
            row = self._rows[seq_id]
            row.num_in_flight += 1
            if row.cost.is_slow:
                self.awaiting_mask.add(seq_id)
        return seq_ids

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        row = self._rows.get(request.seq_id)
        if row is None or request.num_output_placeholders:
            return len(token_ids)
        if not row.needs_mask(request.num_output_tokens + len(token_ids)):
            return len(token_ids)
        if row.task is not None or row.has_mask:
            return 0  # the row was late: its next mask stands alone
        known = request.all_token_ids[request.num_prompt_tokens + row.num_consumed :]
        number = self._ask(row, lambda: row.matcher.num_allowed([*known, *token_ids]))
        return max(0, (number or 0) - len(known))

    def _ask(self, row: _ConstrainedRow, question: Callable[[], _T]) -> _T | None:
        """Return the answer of a matcher in the engine's thread.

        None if the answer would hold up the step: the grammar is slow, a thread uses it, or such
        questions have taken too long in this plan.
        """
        cost = row.cost
        if cost.is_slow or self._draft_seconds > _MAX_DRAFT_SECONDS:
            return None
        started = time.monotonic()
        is_locked = cost.lock.acquire(timeout=_MAX_LOCK_SECONDS)
        try:
            return question() if is_locked else None
        finally:
            seconds = time.monotonic() - started
            self._draft_seconds += seconds
            if is_locked:
                cost.lock.release()
                cost.add(max(0.0, seconds - FREE_SECONDS))

    def _sampling(self, requests: list[Request], num_tokens: list[int]) -> Iterable[int]:
        for request, number in zip(requests, num_tokens, strict=True):
            row = self._rows.get(request.seq_id)
            if row is not None:
                known = len(request.all_token_ids) + request.num_output_placeholders
                end = request.num_computed_tokens + number
                num_positions = num_sampled_positions(known, end)
                if num_positions and row.needs_mask(
                    known - request.num_prompt_tokens + num_positions - 1
                ):
                    yield request.seq_id

    # Drafts (ForcedTokenSource in engine_core/speculation/grammar.py).

    def has_grammar(self, request: Request) -> bool:
        """Return whether a request has a matcher, which may force tokens."""
        return request.seq_id in self._rows

    def forced_tokens(self, request: Request) -> list[int]:
        """Return the only tokens that can follow the verified ones; empty at a choice.

        A matcher that is far behind, because nothing was asked for long, catches up over several
        calls, which return nothing.
        """
        row = self._rows.get(request.seq_id)
        if row is None:
            return []
        return self._ask(row, lambda: self._forced_tokens(row)) or []

    def _forced_tokens(self, row: _ConstrainedRow) -> list[int]:
        request = row.request
        if row.lead is None:
            row.lead = self._new_matcher(request, row.compiled, row.rule)
        first = request.num_prompt_tokens + row.num_lead
        token_ids = request.all_token_ids[first : first + _MAX_LEAD_TOKENS]
        row.lead.consume(token_ids)
        row.num_lead += len(token_ids)
        if row.num_lead < request.num_output_tokens:
            return []
        return self._compiler.backend.forced_tokens(row.lead)

    # The masks of steps.

    def request_masks(self, output: SchedulerOutput, rewound_until_step: Mapping[int, int]) -> None:
        """Compute the masks of the oldest step in flight in the threads; once per step.

        rewound_until_step: by seq_id, the last step whose result is ignored for the sequence.
        """
        if not output.constrained_seq_ids or output.step <= self._last_masked_step:
            return
        self._last_masked_step = output.step
        self._masks.clear()  # those left belong to steps that were lost with their workers
        masks = StepMasks(output.epoch, output.step, self._clock() + MAX_WAIT_SECONDS)
        quick, slow = [], []
        drafts = output.drafts
        for seq_id in output.constrained_seq_ids:
            row = self._rows.get(seq_id)
            if row is None or rewound_until_step.get(seq_id, 0) >= output.step:
                continue  # ended, or late in the step before, since the step was sent
            assert row.task is None, "a row was planned whose mask is late"
            draft = drafts.get(seq_id, [])
            if row.has_mask and not draft:
                masks.rows[seq_id] = row.masks[:1]
            elif row.cost.is_slow:
                slow.append(self._begin_late(row))
                masks.late.append(seq_id)
            else:
                quick.append(row.begin_task(draft))
                masks.awaited[seq_id] = row
                row.cost.step_seconds = 0.0
        self._collected = masks
        self._threads.submit(quick, slow)

    def pop_masks(self) -> StepMasks | None:
        """Return the masks of the oldest step, once: when they are computed, or late."""
        collected, is_quick_done = self._collected, self._threads.is_quick_done
        for task in self._threads.pop_done():
            self._take_masks(task)
        if collected is None:
            return None
        if collected.awaited:
            if not is_quick_done and self._clock() < collected.deadline:
                return None
            self._leave_out_late(collected)
        self._collected = None
        self._masks[collected.step] = collected
        return collected

    def begin_worker_epoch(self) -> None:
        """Note that the steps in flight were lost with their workers."""
        self._collected = None
        for seq_id, row in self._rows.items():
            if row.task is not None and seq_id not in self._late:
                self._hold(row)
            row.num_in_flight = 0
        self._begin_next_masks(list(self.awaiting_mask))

    def end_step(self, seq_ids: Sequence[int]) -> None:
        """Have the next masks of sequences that await one computed, after the result of a step.

        seq_ids: the constrained sequences of the step.
        """
        for seq_id in seq_ids:
            if (row := self._rows.get(seq_id)) is not None:
                row.num_in_flight -= 1
        if self.awaiting_mask:
            self._begin_next_masks(seq_ids)

    def _begin_next_masks(self, seq_ids: Sequence[int]) -> None:
        tasks = []
        for seq_id in seq_ids:
            row = self._rows.get(seq_id)
            if (
                row is None
                or row.task is not None
                or row.num_in_flight
                or seq_id not in self.awaiting_mask
            ):
                continue
            if row.has_mask:  # the result was ignored
                self._release(row)
            else:
                tasks.append(self._begin_late(row))
        self._threads.submit([], tasks)

    def pop_overdue(self) -> dict[int, ErrorInfo]:
        """Return requests whose masks take too long, by seq_id, with the errors for their clients.

        The caller ends them.
        """
        overdue: dict[int, ErrorInfo] = {}
        for seq_id, row in self._late.items():
            if self._clock() < row.late_since + MAX_LATE_SECONDS:
                break
            overdue[seq_id] = ErrorInfo("invalid_request", f"{row.field}: {LATE}", row.field)
        return overdue

    @property
    def seconds_to_next_end(self) -> float | None:
        """Seconds until a step goes without its late rows, or a request ends; None for never."""
        ends = [] if self._collected is None else [self._collected.deadline]
        ends += [row.late_since + MAX_LATE_SECONDS for row in self._late.values()][:1]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _begin_late(self, row: _ConstrainedRow) -> MaskTask:
        """Leave a row out of steps until a thread has computed its masks; return the task."""
        self._hold(row)
        return row.begin_task([])

    def _hold(self, row: _ConstrainedRow) -> None:
        self.awaiting_mask.add(row.request.seq_id)
        row.late_since = self._clock()
        self._late[row.request.seq_id] = row

    def _release(self, row: _ConstrainedRow) -> None:
        """Let the scheduler plan a row whose mask is there."""
        self._late.pop(row.request.seq_id, None)
        self.awaiting_mask.discard(row.request.seq_id)
        self._unblocked.append(row.request)

    def _take_masks(self, task: MaskTask) -> None:
        """Keep what a thread has computed, for the step that waits for it or for a later one."""
        row = self._rows.get(task.seq_id)
        if row is None or row.task is not task:
            return  # ended
        row.task = None
        row.masks = task.masks
        if self._collected is not None and task.seq_id in self._collected.awaited:
            del self._collected.awaited[task.seq_id]
            self._collected.rows[task.seq_id] = task.masks
        else:
            self._release(row)

    def _leave_out_late(self, masks: StepMasks) -> None:
        """Let a step go without the rows that it still waits for."""
        self._threads.stop_waiting()
        for seq_id, row in masks.awaited.items():
            masks.late.append(seq_id)
            self._hold(row)
        for cost in {row.cost for row in masks.awaited.values()}:
            cost.add(cost.step_seconds)  # its rows are late because of each other
        masks.awaited.clear()

    def find_violations(self, output: SchedulerOutput, result: ModelRunnerOutput) -> Violations:
        """Return the sequences of a step that cannot continue.

        Cuts the tokens of those that go on for a part of their draft, in the result.

        Raises WorkerFailedError if the result arrived before its masks were computed.
        """
        if not output.constrained_seq_ids:
            return NO_VIOLATIONS
        masks = self._masks.pop(output.step, None)
        if masks is None:
            raise WorkerFailedError(
                0, f"step {output.step} was answered before its masks were computed"
            )
        found = Violations({}, {})
        constrained = set(output.constrained_seq_ids)
        for seq_id, token_ids in zip(result.seq_ids, result.sampled_token_ids, strict=False):
            row = self._rows.get(seq_id)
            if row is None or seq_id not in constrained:
                continue
            error, num_allowed = _find_violation(masks.rows.get(seq_id, []), token_ids)
            if error:
                info = ErrorInfo("invalid_request", f"{row.field}: {error}", row.field)
                if num_allowed:
                    found.after[seq_id] = info
                    del token_ids[num_allowed:]
                else:
                    found.before[seq_id] = info
        return found


def start_structured_output(boot: ProcessBoot) -> StructuredOutputManager:
    """Create the manager of an engine process."""
    config = boot.config
    model = with_end_tokens(boot.model, config.model)
    tokenizer_json = Path(config.model.tokenizer or model.folder, "tokenizer.json")
    vocab_size, eos_token_ids = model.vocab_size, model.eos_token_ids
    num_threads = min(MAX_THREADS, max(1, usable_cores() // 2))

    def make_backend() -> LLGuidanceBackend:
        return LLGuidanceBackend(tokenizer_json, vocab_size, eos_token_ids)

    event_fd = EventFd()
    sandbox = GrammarSandbox(SandboxSetup(str(tokenizer_json), vocab_size, eos_token_ids))
    cache = GrammarCache(config.grammars.grammar_cache_entries, config.grammars.grammar_cache_bytes)
    compiler = GrammarCompiler(make_backend, sandbox, cache, event_fd, eager=boot.incarnation == 0)
    return StructuredOutputManager(compiler, event_fd, num_threads)


def grammar_source_of(message: EngineCoreRequest) -> GrammarSource | None:
    """Return the grammar of a request; FREE_TEXT if only a rule for reasoning applies."""
    return FREE_TEXT if message.grammar is None and message.thinking else message.grammar


def _find_violation(
    rows: Sequence[tuple[MaskRow, str]], token_ids: Sequence[int]
) -> tuple[str, int]:
    """Return why the text of a sequence cannot continue, and how many of its tokens are allowed.

    rows: of its sampled positions, in order. Empty if there is no reason.
    """
    for index, (mask, error) in enumerate(rows[: max(1, len(token_ids))]):
        if error:
            return error, index
        if token_ids and not _allows(mask, token_ids[index]):
            return CONTRADICTION, index
    return "", len(token_ids)


def _allows(mask: MaskRow, token_id: int) -> bool:
    """Return whether a mask allows a token; invalid token ids are detected elsewhere."""
    if not 0 <= token_id < 32 * len(mask):
        return True
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)
