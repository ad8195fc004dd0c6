"""Requests that have a grammar: those that wait for it, and where the others stand in theirs.

Owns the matchers of the choices, from the moment the grammar is there until the choice is over,
so that they outlive a preemption and the workers. In a step they are the mask thread's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Candidate, Unblock
from engine_core.scheduler.step_plan import StepPlan
from engine_core.structured_output.base import GrammarBackend, Matcher
from engine_core.structured_output.dormant import Texts
from engine_core.structured_output.masker import MaskJob
from engine_core.structured_output.thinking import FreeMatcher, ThinkingMatcher
from proto.sampling_params import ThinkingRule
from proto.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class _Row:
    """A choice.

    num_free: output tokens before which nothing can be forbidden.
    num_seen: output tokens that its matcher has been given.
    """

    request: Request
    matcher: Matcher
    num_free: int = 0
    num_seen: int = 0

    def may_forbid(self, num_outputs: int) -> bool:
        """Whether a mask is needed for the output that follows so many."""
        if isinstance(self.matcher, ThinkingMatcher) and self.matcher.is_over:
            return False
        return num_outputs >= self.num_free


class GrammarGate:
    """Holds who waits for a grammar; says of the others what is to be masked."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Request, ThinkingRule | None]] = {}
        self._rows: dict[int, _Row] = {}

    def __len__(self) -> int:
        """Choices with a grammar, waiting or not."""
        return len(self._waiting) + len(self._rows)

    def enter(self, request: Request, thinking: ThinkingRule | None) -> None:
        """A choice is in the queue and its grammar is not there."""
        self._waiting[request.seq_id] = request, thinking

    def open(self, request_id: int, matcher: Matcher, texts: Texts) -> None:
        """The grammar of a request is there; each choice has it from now on."""
        for request, thinking in list(self._waiting.values()):
            if request.request_id != request_id:
                continue
            del self._waiting[request.seq_id]
            self._rows[request.seq_id] = _row(request, matcher.copy(), thinking, texts)
            self._unblock(request)

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        """Nothing changes by a step."""

    def is_blocked(self, candidate: Candidate) -> bool:
        return candidate.request.seq_id in self._waiting

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """Its matcher goes on where it stood."""

    def on_released(self, request: Request) -> None:
        self._waiting.pop(request.seq_id, None)
        self._rows.pop(request.seq_id, None)

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        """Those of the plan that sample, in a step that ends where nothing is known behind:

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

    def _sampling(self, requests: list[Request], num_tokens: list[int]) -> Iterable[int]:
        for request, number in zip(requests, num_tokens, strict=True):
            row = self._rows.get(request.seq_id)
            if row is not None:
                known = len(request.all_token_ids) + request.num_output_placeholders
                if request.num_computed_tokens + number >= known and row.may_forbid(
                    known - request.num_prompt_tokens
                ):
                    yield request.seq_id

    def job(self, output: SchedulerOutput, backend: GrammarBackend) -> MaskJob:
        """The masks of a step, all before which have been taken in."""
        job = MaskJob(output.epoch, output.step, backend)
        for seq_id in output.constrained_seq_ids:
            row = self._rows.get(seq_id)
            if row is None:
                continue  # over since the step was sent
            request = row.request
            job.seq_ids.append(seq_id)
            job.matchers.append(row.matcher)
            job.token_ids.append(request.all_token_ids[request.num_prompt_tokens + row.num_seen :])
            row.num_seen = request.num_output_tokens
        return job


def _row(request: Request, matcher: Matcher, rule: ThinkingRule | None, texts: Texts) -> _Row:
    """Where a budget is all there is, no mask is needed before it can be used up."""
    if rule is None:
        return _Row(request, matcher)
    free = isinstance(matcher, FreeMatcher)
    thinking = ThinkingMatcher(matcher, rule, texts, request.sampling_params.eos_token_ids)
    return _Row(request, thinking, rule.budget or 0 if free else 0)
