"""Choices of one request share the KV of their prompt.

One choice computes the prompt. The others wait for it and begin as its forks; only
the last token of the prompt is computed by each, for its logits. One that comes back
after a preemption, or the row of a beam, may share outputs as well.

    first choice    |------------- prompt ------------|-- its outputs --
    another one     |- shared, the end copied -|-last-|-- its outputs --

Owns the choices that wait. Nobody is appointed: a running choice without the prompt
is waited for, one with the prompt is forked, and where there is neither (the first
was preempted, or aborted) the next in line computes the prompt itself. Where the first
is over with its first token, what it left in the prefix cache has to do for all the
others, and none of them waits again: else each would end before the next begins.

A step looks at the choices that are waited for, which run, and at nobody who waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from engine_core.kv_cache.manager import NOTHING_COMPUTED, ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class _Wait:
    """waiters: until `source` has the prompt, or does not run any more."""

    source: Request
    waiters: list[Request] = field(default_factory=list)


class SiblingForks:
    """Holds a choice while another one computes their prompt, then offers it the fork.

    choices: unfinished choices by number, by request id; read only.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_FORK

    def __init__(
        self, kv_cache: KVCacheManager, choices: Mapping[int, Mapping[int, Request]]
    ) -> None:
        self._kv_cache = kv_cache
        self._choices = choices
        self._waits: dict[int, _Wait] = {}
        self._just_admitted: set[Request] = set()
        self._over: set[int] = set()  # ids of requests with a choice that has come to its end

    def attach(self, wake: Wake) -> None:
        self._wake = wake

    def begin(self, plan: StepPlan) -> None:
        self._just_admitted.clear()
        for request_id, wait in list(self._waits.items()):
            if not self._is_computing(wait.source):
                self._release(request_id)

    def holds(self, candidate: Candidate) -> bool:
        request = candidate.request
        if len(self._choices[request.request_id]) == 1 or request.num_computed_tokens:
            return False  # also where it has blocks already, into which its prompt was loaded
        fork = self._fork(request)
        if fork.num_tokens:
            candidate.offer(fork)
            return False
        source = self._coming(request)
        if source is None:
            return False  # also where the source has given way in this very pass
        wait = self._waits.setdefault(request.request_id, _Wait(source))
        wait.source = source
        wait.waiters.append(request)
        return True

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        siblings = self._choices[request.request_id]
        if len(siblings) == 1:
            return
        self._just_admitted.add(request)
        # What one of them computed is shared, but it was not cached.
        request.num_cached_tokens = min(
            each.num_cached_tokens for each in siblings.values() if each.scheduled_at is not None
        )

    def forget(self, request: Request) -> None:
        if len(self._choices[request.request_id]) == 1:
            self._over.discard(request.request_id)
        elif request.status is not RequestStatus.FINISHED_ABORTED:
            self._over.add(request.request_id)
        wait = self._waits.get(request.request_id)
        if wait is None:
            return
        if request in wait.waiters:
            wait.waiters.remove(request)
        self._release(request.request_id)

    def _fork(self, request: Request) -> ComputedBlocks:
        """What the request can have of the running choice that shares most with it."""
        longest = NOTHING_COMPUTED
        for source in self._choices[request.request_id].values():
            if self._has_prompt(source):
                num_shared = _num_shared(request, source)
                if num_shared > longest.num_tokens:
                    fork = self._kv_cache.fork(source, num_shared)
                    longest = fork if fork.num_tokens else longest
        return longest

    def _coming(self, request: Request) -> Request | None:
        """A running choice that has not computed the prompt yet, so that it can be waited for."""
        if request.num_prompt_tokens == 1 or request.request_id in self._over:
            return None
        siblings = self._choices[request.request_id].values()
        return next((each for each in siblings if self._is_computing(each)), None)

    def _is_computing(self, source: Request) -> bool:
        """It runs, and what is copied of the prompt is not there yet."""
        return source.status is RequestStatus.RUNNING and not self._has_prompt(source)

    def _has_prompt(self, source: Request) -> bool:
        """It was computed in earlier steps, so that whatever is copied is there."""
        return (
            source.status is RequestStatus.RUNNING
            and source.num_computed_tokens >= source.num_prompt_tokens - 1
            and source not in self._just_admitted
        )

    def _release(self, request_id: int) -> None:
        for request in self._waits.pop(request_id).waiters:
            self._wake(request)


def _num_shared(request: Request, source: Request) -> int:
    """Tokens in which both begin, computed by the source; one is left for the request."""
    ours, theirs = request.all_token_ids, source.all_token_ids
    most = min(len(ours) - 1, len(theirs), source.num_computed_tokens)
    shared = min(most, request.num_prompt_tokens)
    while shared < most and ours[shared] == theirs[shared]:
        shared += 1
    return shared
