"""Structured output: requests that wait for their grammar, and masks for those that have it.

    InputProcessor   admit_request ─▶ compiler ─▶ event_fd ─▶ pop_compiled_requests ─▶ accept
                                                                                     or refuse
    BusyLoop         request_masks(oldest step) ─▶ thread ─▶ event_fd ─▶ pop_masks ─▶ workers
                     find_violations(result): a token that its mask forbids ends the request

A step is masked when it is the oldest in flight, because only then all tokens before it are
known: with one step in flight as soon as it is sent, with two when the result before it arrives.
The masks are computed in a thread while the model computes the step:

    engine   send step N ─▶ request_masks(N) ────▶ event_fd ─▶ send GrammarOutput(N)
    thread                   └ consume, fill ────┘
    worker        step N: inputs, forward ───────────────── wait ─▶ sample

Only that thread advances matchers, by tokens that the engine has accepted; tokens that it dropped
never reach a matcher, so nothing is ever rolled back. The tokens of a draft are consumed by copies,
one for each mask behind the first:

    step      | x | d | e |        x: the last known token, d e: its draft
    masks       m   m   m          of the matcher, of a copy that has read d, of one with d e

A mask behind a token that the grammar refuses has no effect, because the worker accepts no draft
that it could not have sampled. To not compute such tokens, a draft is cut before it is planned.
"""

import logging
import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Candidate, Unblock
from engine_core.scheduler.step_plan import StepPlan, num_sampled_positions
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.compiler import GrammarCache, GrammarCompiler, start_thread
from engine_core.structured_output.matchers import (
    FreeMatcher,
    MaskRow,
    Matcher,
    ThinkingMatcher,
    mask_words,
)
from engine_core.structured_output.sandbox import GrammarSandbox, SandboxSetup
from engine_core.worker_group import WorkerFailedError
from proto.engine_io import EngineCoreRequest
from proto.errors import ErrorInfo, RequestError
from proto.grammar import FREE_TEXT, GrammarSource
from proto.host_resources import usable_cores
from proto.lifecycle import ProcessBoot
from proto.model_runner_output import ModelRunnerOutput
from proto.sampling_params import ThinkingRule
from proto.scheduler_output import GrammarOutput, SchedulerOutput
from proto.sockets import EventFd
from proto.turn_ends import with_end_tokens

logger = logging.getLogger("tokend.grammars")

MAX_THREADS: Final = 8
"""Threads of llguidance that share the masks of a step."""
CONTRADICTION: Final = "no token satisfies both the grammar and the other parameters of the request"
UNUSABLE: Final = "the grammar cannot be used"
_MAX_LEAD_TOKENS: Final = 64
"""Tokens that the matcher of a draft consumes in one step, 3 to 8 µs each."""


@dataclass(slots=True)
class _ConstrainedRow:
    """One choice and its matcher.

    field: path of the request field that its grammar comes from.
    compiled, rule: what its matchers are made of.
    num_free: number of output tokens before which its masks forbid nothing.
    num_consumed: number of output tokens that its matcher has consumed.
    lead: a second matcher, for drafts, which the engine's thread advances when it is asked for
        forced tokens; the first one belongs to the thread that computes masks.
    num_lead: number of output tokens that `lead` has consumed.
    """

    request: Request
    matcher: Matcher
    field: str
    compiled: Matcher
    rule: ThinkingRule | None = None
    num_free: int = 0
    num_consumed: int = 0
    lead: Matcher | None = None
    num_lead: int = 0

    def needs_mask(self, num_outputs: int) -> bool:
        """Return whether a token may be forbidden after this many outputs."""
        if isinstance(self.matcher, ThinkingMatcher) and self.matcher.is_always_free:
            return False
        return num_outputs >= self.num_free


@dataclass(slots=True)
class MaskJob:
    """The masks of a step to compute; parallel lists of its constrained sequences.

    token_ids: per sequence, the tokens that its matcher has not consumed.
    drafts: per sequence, the tokens behind them whose positions are sampled too.
    """

    epoch: int
    step: int
    backend: LLGuidanceBackend
    seq_ids: list[int] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step. output: the message for the workers.

    rows: by seq_id, of each sampled position the same mask, and a message for the client if the
    text cannot continue there. error: of all sequences, if the masks could not be computed.
    """

    output: GrammarOutput
    rows: dict[int, list[tuple[MaskRow, str]]]
    error: bool = False


def compute_masks(job: MaskJob) -> StepMasks:
    """Advance the matchers of a step, then fill their masks."""
    seq_ids, matchers = [], []
    for seq_id, matcher, token_ids, draft in zip(
        job.seq_ids, job.matchers, job.token_ids, job.drafts, strict=True
    ):
        matcher.consume(token_ids)
        seq_ids += [seq_id] * (1 + len(draft))
        matchers.append(matcher)
        for token_id in draft:
            matchers.append(matchers[-1].copy())
            matchers[-1].consume([token_id])
    masks = np.empty((len(seq_ids), mask_words(job.backend.vocab_size)), dtype=np.int32)
    job.backend.fill_masks(matchers, masks)
    rows: dict[int, list[tuple[MaskRow, str]]] = {seq_id: [] for seq_id in job.seq_ids}
    for seq_id, mask, matcher in zip(seq_ids, masks, matchers, strict=True):
        rows[seq_id].append((mask, matcher.error))
    return StepMasks(GrammarOutput(job.epoch, job.step, seq_ids, masks.tobytes()), rows)


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

    For the scheduler it is the gate that blocks requests whose grammar is being compiled. Matchers
    outlive preemptions and workers. descriptor: readable when `pop_compiled_requests` or
    `pop_masks` has something to return.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self, compiler: GrammarCompiler, event_fd: EventFd) -> None:
        self._compiler = compiler
        self._event_fd = event_fd
        self.descriptor = event_fd.descriptor
        self._blocked: dict[int, GrammarSource] = {}  # by seq_id
        self._blocked_by_source: dict[
            GrammarSource, dict[int, tuple[Request, ThinkingRule | None]]
        ] = {}  # the same choices, by source and seq_id
        self._rows: dict[int, _ConstrainedRow] = {}  # by seq_id
        self._last_masked_step = 0
        self._masks: dict[int, StepMasks] = {}  # by step, of steps in flight
        self._mask_jobs: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._computed_masks: queue.SimpleQueue[StepMasks] = queue.SimpleQueue()
        self._mask_thread = start_thread("grammar masks", self._run_mask_thread)

    def clear_descriptor(self) -> None:
        """Make the descriptor unreadable; call it before the pop methods."""
        self._event_fd.clear()

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._mask_jobs.put(None)
        self._mask_thread.join()
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
        """Return requests whose grammar was compiled since the last call, and unblock them.

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
                    self._unblock(request)
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

    # The scheduler's gate (TokenConstraints in engine_core/scheduler/hooks.py).

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None: ...

    def is_blocked(self, candidate: Candidate) -> bool:
        return candidate.request.seq_id in self._blocked

    def on_admitted(self, request: Request, num_new_tokens: int) -> None: ...

    def on_released(self, request: Request) -> None:
        self._rows.pop(request.seq_id, None)
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
        if not self._rows:
            return []
        return [
            *self._sampling(plan.continued, plan.continued_tokens),
            *self._sampling(plan.admitted, plan.admitted_tokens),
        ]

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        row = self._rows.get(request.seq_id)
        if row is None or request.num_output_placeholders:
            return len(token_ids)
        if not row.needs_mask(request.num_output_tokens + len(token_ids)):
            return len(token_ids)
        # No masks of the request are being computed: none of its steps is in flight.
        known = request.all_token_ids[request.num_prompt_tokens + row.num_consumed :]
        return max(0, row.matcher.num_allowed([*known, *token_ids]) - len(known))

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

    def request_masks(self, output: SchedulerOutput) -> None:
        """Compute the masks of the oldest step in flight in the thread; once per step."""
        if output.constrained_seq_ids and output.step > self._last_masked_step:
            self._last_masked_step = output.step
            self._masks.clear()  # those left belong to steps that were lost with their workers
            self._mask_jobs.put(self._mask_job(output))

    def pop_masks(self) -> list[GrammarOutput]:
        """Return the masks that were computed since the last call, for the workers."""
        outputs = []
        while not self._computed_masks.empty():
            masks = self._computed_masks.get()
            self._masks[masks.output.step] = masks
            outputs.append(masks.output)
        return outputs

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
            if masks.error:
                error, num_allowed = UNUSABLE, 0
            else:
                error, num_allowed = _find_violation(masks.rows.get(seq_id, []), token_ids)
            if error:
                info = ErrorInfo("invalid_request", f"{row.field}: {error}", row.field)
                if num_allowed:
                    found.after[seq_id] = info
                    del token_ids[num_allowed:]
                else:
                    found.before[seq_id] = info
        return found

    def _mask_job(self, output: SchedulerOutput) -> MaskJob:
        job = MaskJob(output.epoch, output.step, self._compiler.backend)
        drafts = output.drafts
        for seq_id in output.constrained_seq_ids:
            row = self._rows.get(seq_id)
            if row is None:
                continue  # ended since the step was sent
            request = row.request
            job.seq_ids.append(seq_id)
            job.matchers.append(row.matcher)
            first = request.num_prompt_tokens + row.num_consumed
            job.token_ids.append(request.all_token_ids[first:])
            job.drafts.append(drafts.get(seq_id, []))
            row.num_consumed = request.num_output_tokens
        return job

    def _run_mask_thread(self) -> None:
        while (job := self._mask_jobs.get()) is not None:
            try:
                masks = compute_masks(job)
            except Exception:  # the workers wait for the masks of the step
                logger.exception("the masks of step %d could not be computed", job.step)
                masks = StepMasks(GrammarOutput(job.epoch, job.step, [], b""), {}, error=True)
            self._computed_masks.put(masks)
            self._event_fd.notify()


def start_structured_output(boot: ProcessBoot) -> StructuredOutputManager:
    """Create the manager of an engine process."""
    config = boot.config
    model = with_end_tokens(boot.model, config.model)
    tokenizer_json = Path(config.model.tokenizer or model.folder, "tokenizer.json")
    vocab_size, eos_token_ids = model.vocab_size, model.eos_token_ids
    num_threads = min(MAX_THREADS, max(1, usable_cores() // 2))

    def make_backend() -> LLGuidanceBackend:
        return LLGuidanceBackend(tokenizer_json, vocab_size, eos_token_ids, num_threads)

    event_fd = EventFd()
    sandbox = GrammarSandbox(SandboxSetup(str(tokenizer_json), vocab_size, eos_token_ids))
    cache = GrammarCache(config.grammars.grammar_cache_entries, config.grammars.grammar_cache_bytes)
    compiler = GrammarCompiler(make_backend, sandbox, cache, event_fd, eager=boot.incarnation == 0)
    return StructuredOutputManager(compiler, event_fd)


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
