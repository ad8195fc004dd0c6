"""Requests that wait for KV which another request is computing.

    PrefixWait      requests with the same prefix wait for the one that computes it
    SiblingForks    choices of one request wait for the one that computes their prompt

Blocks can be found from the step that fills them. A prompt that takes several steps fills them one
chunk at a time, so an equal prompt that starts meanwhile would compute the rest a second time. A
step checks each request that computes a prefix once, and none of those that wait.
"""

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Final

from engine_core.kv_cache.manager import NO_PREFIX, CachedPrefix, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature, Unblock
from engine_core.scheduler.preemption import WaitingBlockHolders
from engine_core.scheduler.step_plan import StepPlan

MAX_LOST_STEPS: Final = 8
"""Steps that a request may lose by waiting, in all; then it computes the prefix itself."""
MIN_SHARED_FRACTION: Final = 16
"""A request waits only for a shared prefix of at least this fraction (1/n) of a chunk."""

_Ticket = tuple[int, int]
"""(number of the wait, seq_id); tickets of waits that have ended stay in the heaps."""


@dataclass(slots=True)
class _Leader:
    """A running request whose prefix others wait for.

    reached: its computed tokens, including this step. findable: those that others can find in this
    step. target: tokens that it has to compute. first_block: hash of its first block.
    expected: tokens that it has after this step if it gets as many as a newly admitted request
    could. num_lost: earlier steps after which it had fewer than expected.
    waiters: heap of (number of tokens to be reached, ticket). limits: heap of (number of lost steps
    at which the wait ends, ticket).
    """

    request: Request
    reached: int
    findable: int
    target: int
    first_block: bytes
    expected: int
    num_lost: int = 0
    waiters: list[tuple[int, _Ticket]] = field(default_factory=list)
    limits: list[tuple[int, _Ticket]] = field(default_factory=list)


@dataclass(slots=True)
class _Waiter:
    """A request that waits; it has lost `leader.num_lost - origin` steps."""

    request: Request
    number: int
    origin: int


class PrefixWait(SchedulerFeature):
    """Holds a request while another one, the leader, computes the next blocks of its prefix.

        leader    |---computed---|-this step-|-- to come --|
        request   |----------- shared -----------|-- own --|
                                  found so far ↑ ↑ until here it waits

    Waiting costs nothing while the leader gets as many tokens as a newly admitted request could. A
    step is lost if the leader gets nothing, or less than the requests after it could use, for
    example because it defers to another tenant; also if it loses its blocks or ends early. Whether
    a step was lost is known after it. After MAX_LOST_STEPS of them the wait ends.

    A request does not wait for a leader with fewer tokens than the cache, nor for a small part of a
    chunk (MIN_SHARED_FRACTION), because the wait costs it a step. In a model with recurrent states
    the leader holds its state at the end of the shared tokens for requests that wait, which find it
    one step later. No request waits for a state that the leader has passed without holding it.

        _leaders         by seq_id, in the order of admission
        _by_first_block  the same, by the hash of their first block
        leader.waiters   requests that wait for it, the one that needs the fewest tokens first
        leader.limits    the same, the one whose wait ends first
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_PREFIX

    def __init__(
        self,
        kv_cache: KVCacheManager,
        longest_chunk: int,
        unblock: Unblock,
        stalled: Set[int] = frozenset(),
    ) -> None:
        """longest_chunk: maximum tokens of a request in a step. stalled: see `EncoderInputs`."""
        self._stalled = stalled
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size
        self._longest_chunk = longest_chunk
        self._min_shared = longest_chunk // MIN_SHARED_FRACTION
        self._unblock = unblock
        self._num_waits = 0
        self._leaders: dict[int, _Leader] = {}
        self._by_first_block: dict[bytes, dict[int, _Leader]] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._num_lost: dict[int, int] = {}

    def begin_admission(self, plan: StepPlan) -> None:
        if self._leaders:
            self._follow_leaders(plan)

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self._leaders or request.skip_reading_prefix_cache or request.num_computed_tokens:
            return False  # it holds blocks already
        hashes = request.block_hashes
        leaders = self._by_first_block.get(hashes[0]) if hashes else None
        if leaders is None or self._num_lost.get(request.seq_id, 0) >= MAX_LOST_STEPS:
            return False
        num_found = candidate.computed.num_tokens
        found = num_found // self._block_size
        most = (request.num_tokens - 1) // self._block_size
        for leader in leaders.values():
            if leader.request.status is not RequestStatus.RUNNING:
                continue  # preempted in this pass, perhaps for this request
            if leader.reached < num_found:
                continue  # the cache has more
            theirs = leader.request.block_hashes
            if found < min(most, len(theirs)) and theirs[found] == hashes[found]:
                shared = _num_shared(hashes, theirs, found + 1, min(most, len(theirs)))
                num_tokens = shared * self._block_size
                if num_tokens <= leader.findable:
                    continue  # computed already, and evicted
                if num_tokens - num_found < self._min_shared:
                    continue
                if self._kv_cache.want_state(leader.request, num_tokens):
                    self._hold_request(request, leader, num_tokens)
                    return True
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._num_lost.pop(request.seq_id, None)
        reached = request.num_computed_tokens + num_new_tokens
        findable = self._findable(request, reached)
        if findable < request.num_tokens and (hashes := request.block_hashes):
            leader = _Leader(
                request,
                reached,
                findable,
                request.num_tokens,
                hashes[0],
                expected=reached,
            )
            self._leaders[request.seq_id] = leader
            self._by_first_block.setdefault(hashes[0], {})[request.seq_id] = leader

    def on_released(self, request: Request) -> None:
        self._num_lost.pop(request.seq_id, None)
        self._waiters.pop(request.seq_id, None)
        leader = self._leaders.get(request.seq_id)
        if leader is not None:
            self._remove_leader(leader)

    def _follow_leaders(self, plan: StepPlan) -> None:
        planned, stalled = plan.num_new_tokens(self._leaders), self._stalled
        least = max(1, min(self._longest_chunk, plan.budget, plan.prompt_budget))
        for seq_id, leader in list(self._leaders.items()):
            request = leader.request
            if request.status is not RequestStatus.RUNNING:
                self._remove_leader(leader)
                continue
            num_computed = request.num_computed_tokens
            leader.num_lost += num_computed < leader.expected
            leader.expected = num_computed
            if seq_id not in stalled:
                leader.expected = min(num_computed + least, request.num_tokens)
            leader.reached = num_computed + planned.get(seq_id, 0)
            leader.findable = self._findable(request, leader.reached)
            while leader.waiters and leader.waiters[0][0] <= leader.findable:
                self._end_wait(heapq.heappop(leader.waiters)[1], leader.num_lost)
            while leader.limits and leader.limits[0][0] <= leader.num_lost:
                self._end_wait(heapq.heappop(leader.limits)[1], leader.num_lost)
            if leader.findable >= leader.target:
                self._remove_leader(leader)

    def _hold_request(self, request: Request, leader: _Leader, num_tokens: int) -> None:
        self._num_waits += 1
        ticket = (self._num_waits, request.seq_id)
        origin = leader.num_lost - self._num_lost.get(request.seq_id, 0)
        self._waiters[request.seq_id] = _Waiter(request, self._num_waits, origin)
        heapq.heappush(leader.waiters, (num_tokens, ticket))
        heapq.heappush(leader.limits, (origin + MAX_LOST_STEPS, ticket))

    def _findable(self, request: Request, reached: int) -> int:
        """Return how many of a leader's tokens others find in this step."""
        return request.num_computed_tokens if self._kv_cache.has_states else reached

    def _remove_leader(self, leader: _Leader) -> None:
        """Remove a leader; requests that wait for it have lost another step."""
        seq_id, first_block = leader.request.seq_id, leader.first_block
        del self._leaders[seq_id]
        del self._by_first_block[first_block][seq_id]
        if not self._by_first_block[first_block]:
            del self._by_first_block[first_block]
        for _, ticket in leader.waiters:
            self._end_wait(ticket, leader.num_lost + 1)

    def _end_wait(self, ticket: _Ticket, num_lost: int) -> None:
        """Unblock the request of a ticket, if it still waits. num_lost: steps its leader lost."""
        number, seq_id = ticket
        waiter = self._waiters.get(seq_id)
        if waiter is None or waiter.number != number:
            return
        del self._waiters[seq_id]
        self._num_lost[seq_id] = num_lost - waiter.origin
        self._unblock(waiter.request)


def _num_shared(ours: Sequence[bytes], theirs: Sequence[bytes], known: int, limit: int) -> int:
    """Return how many leading hashes are equal, in [known, limit], by bisection."""
    low, high = known, limit
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class _Wait:
    """Choices that wait until `source` has computed the prompt, or does not run any more."""

    source: Request
    waiters: list[Request] = field(default_factory=list)


class SiblingForks(SchedulerFeature):
    """Holds a choice while another one computes their prompt, then offers a fork of that one.

        first choice    |------------- prompt ------------|-- its outputs --
        another one     |- shared, the end copied -|-last-|-- its outputs --

    Each choice computes the last token of the prompt itself, for its logits. A choice that returns
    after a preemption, or a row of a beam search, may share outputs as well. Choices wait for any
    running choice without the prompt, and fork any running choice with it. If there is neither,
    because the first one was preempted or aborted, the next one in the queue computes the prompt.
    If a choice has ended already, the others use the prefix cache and none waits again: otherwise
    each might end before the next begins. Without a prefix cache the next one in the queue inherits
    the KV of the prompt.

    choices: unfinished choices by request id and number; not changed here.
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_FORK

    def __init__(
        self,
        kv_cache: KVCacheManager,
        choices: Mapping[int, Mapping[int, Request]],
        waiting_block_holders: WaitingBlockHolders,
        unblock: Unblock,
    ) -> None:
        self._kv_cache = kv_cache
        self._choices = choices
        self._waiting_block_holders = waiting_block_holders
        self._unblock = unblock
        self._num_cached_of_heir: dict[int, int] = {}  # by seq_id: tokens its source had cached
        self._waits: dict[int, _Wait] = {}
        self._just_admitted: set[Request] = set()
        self._with_ended_choice: set[int] = set()  # ids of requests with a choice that has ended

    def begin_admission(self, plan: StepPlan) -> None:
        self._just_admitted.clear()
        for request_id, wait in list(self._waits.items()):
            if not self._is_computing(wait.source):
                self._release_waiters(request_id)

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        if len(self._choices[request.request_id]) == 1 or request.num_computed_tokens:
            return False  # also if its prompt was loaded into its blocks
        fork = self._longest_fork(request)
        if fork.num_tokens:
            candidate.offer_fork(fork)
            return False
        source = self._computing_sibling(request)
        if source is None:
            return False  # also if the source was preempted in this pass
        wait = self._waits.setdefault(request.request_id, _Wait(source))
        wait.source = source
        wait.waiters.append(request)
        return True

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        siblings = self._choices[request.request_id]
        num_cached = self._num_cached_of_heir.pop(request.seq_id, None)
        if num_cached is not None:
            request.num_cached_tokens = num_cached
        elif len(siblings) > 1:
            self._just_admitted.add(request)
        # What one of them computed is shared, but it was not cached.
        request.num_cached_tokens = min(
            sibling.num_cached_tokens
            for sibling in siblings.values()
            if sibling.scheduled_at is not None
        )

    def on_ending(self, request: Request, *, succeeded: bool) -> None:
        """Give the prompt's KV of a choice that ends to the next one in the queue.

        Only without a prefix cache, where the others could not find it.
        """
        siblings = self._choices[request.request_id]
        kv_cache = self._kv_cache
        if len(siblings) == 1 or kv_cache.enable_caching or not kv_cache.caches_all_prefixes:
            return  # a window may free what the next one needs while it waits
        if not request.num_output_tokens and request.seq_id not in self._num_cached_of_heir:
            return  # the prompt may not be complete
        if request.status is RequestStatus.FINISHED_ERROR or request.sampling_params.beam_width:
            return
        others = [each for each in siblings.values() if each is not request]
        heir = next((each for each in others if _has_begun_nothing(each)), None)
        if heir is None or any(map(self._has_prompt, others)):
            return
        shared = _num_common_tokens(heir, request)
        heir.num_computed_tokens = self._kv_cache.fork_blocks(heir, request, shared)
        if heir.num_computed_tokens:
            self._num_cached_of_heir[heir.seq_id] = request.num_cached_tokens
            self._waiting_block_holders.add_pending(heir)

    def on_released(self, request: Request) -> None:
        self._num_cached_of_heir.pop(request.seq_id, None)
        if len(self._choices[request.request_id]) == 1:
            self._with_ended_choice.discard(request.request_id)
        elif self._kv_cache.enable_caching and request.status is not RequestStatus.FINISHED_ABORTED:
            self._with_ended_choice.add(request.request_id)
        wait = self._waits.get(request.request_id)
        if wait is None:
            return
        if request in wait.waiters:
            wait.waiters.remove(request)
        self._release_waiters(request.request_id)

    def _longest_fork(self, request: Request) -> CachedPrefix:
        """Return the fork of the running choice that shares most with the request."""
        longest = NO_PREFIX
        for source in self._choices[request.request_id].values():
            if self._has_prompt(source):
                num_shared = _num_common_tokens(request, source)
                if num_shared > longest.num_tokens:
                    fork = self._kv_cache.find_fork(source, num_shared)
                    longest = fork if fork.num_tokens else longest
        return longest

    def _computing_sibling(self, request: Request) -> Request | None:
        """Return a running choice that has not computed the prompt yet; None if there is none."""
        if request.num_prompt_tokens == 1 or request.request_id in self._with_ended_choice:
            return None
        siblings = self._choices[request.request_id].values()
        return next((sibling for sibling in siblings if self._is_computing(sibling)), None)

    def _is_computing(self, source: Request) -> bool:
        """Return whether a running choice still computes the prompt.

        With recurrent states nothing can be forked, and a prompt that must be computed counts until
        its result has arrived, because only then may siblings read the cache.
        """
        if source.status is not RequestStatus.RUNNING:
            return False
        awaits_result = self._kv_cache.has_states and source.skip_reading_prefix_cache
        return awaits_result or not self._has_prompt(source)

    def _has_prompt(self, source: Request) -> bool:
        """Return whether a running choice has computed the prompt in earlier steps."""
        return (
            source.status is RequestStatus.RUNNING
            and source.num_computed_tokens >= source.num_prompt_tokens - 1
            and source not in self._just_admitted
        )

    def _release_waiters(self, request_id: int) -> None:
        for request in self._waits.pop(request_id).waiters:
            self._unblock(request)


def _has_begun_nothing(request: Request) -> bool:
    return not request.num_computed_tokens and request.status in (
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_FORK,
    )


def _num_common_tokens(request: Request, source: Request) -> int:
    """Return the computed tokens with which both begin; one is left for the request."""
    ours, theirs = request.all_token_ids, source.all_token_ids
    most = min(len(ours) - 1, len(theirs), source.num_computed_tokens)
    shared = min(most, request.num_prompt_tokens)
    while shared < most and ours[shared] == theirs[shared]:
        shared += 1
    return shared
