"""Waiting for KV that another request is computing right now.

    PrefixWait      a gate: requests with the same prefix wait for the one that computes it
    SiblingForks    a gate: choices of one request wait for the one that computes their prompt

Blocks can be found from the step that fills them. A prompt that takes several steps fills them one
chunk at a time, so an equal prompt that starts meanwhile would compute the rest a second time.
A step looks at each request that computes a prefix once, and at none of those that wait.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from engine_core.kv_cache.manager import NOTHING_COMPUTED, ComputedBlocks, KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Candidate, Unblock
from engine_core.scheduler.step_plan import StepPlan

PATIENCE: Final = 8
"""Steps that a request loses by waiting, in all; then it computes for itself."""
CROWD: Final = 16
"""A wait has to spare a part of a chunk, which so many who do not wait would make a whole one."""

_Ticket = tuple[int, int]
"""(number of the wait, seq_id of who waits); one that is over is void, not taken out."""


@dataclass(slots=True)
class _Leader:
    """`request` has been given its first `reached` tokens, those of this step included.

    first_block: hash of it. wanted: tokens that it has when this step is over, if nobody who
    comes in it could have got more; num_lost: steps before this one after which it had fewer.
    waiters: heap of (number of tokens to be reached, ticket), some of them void.
    limits: heap of (number of lost steps that is too much, ticket), likewise.
    """

    request: Request
    reached: int
    first_block: bytes
    wanted: int
    num_lost: int = 0
    waiters: list[tuple[int, _Ticket]] = field(default_factory=list)
    limits: list[tuple[int, _Ticket]] = field(default_factory=list)


@dataclass(slots=True)
class _Waiter:
    """`request` has lost as many steps as its leader has by now, less `origin`."""

    request: Request
    number: int
    origin: int


class PrefixWait:
    """Holds a request whose next block is being computed, until all they share is.

        leader    |---computed---|-this step-|-- to come --|
        request   |----------- shared -----------|-- own --|
                                  found so far ↑ ↑ until here it waits

    While the leader gets as many tokens in a step as anybody could that begins, who waits loses
    nothing, however long it takes. A step is lost where the leader gets nothing, or less than is
    left for those behind it: it gives way to others, say. Whether it was is known after it, as a
    leader that makes way for who is admitted gets what is left by those, which may be all. So is
    one in which the leader loses its blocks or is over before its time. With PATIENCE of them the
    wait is over.

    Nor does anybody wait for a leader that has not got as far as the cache has, or
    for less than a CROWD'th of a chunk: a step later for a block or two.

        _leaders         by seq_id, in the order of admission
        _by_first_block  the same, by the hash of the block they begin with
        leader.waiters   those who wait for it, the one that needs the fewest tokens first
        leader.limits    the same, the one whose patience is over first
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_PREFIX

    def __init__(self, block_size: int, longest_chunk: int) -> None:
        """longest_chunk: most tokens of a request in a step."""
        self._block_size = block_size
        self._longest_chunk = longest_chunk
        self._least_spared = longest_chunk // CROWD
        self._num_waits = 0
        self._leaders: dict[int, _Leader] = {}
        self._by_first_block: dict[bytes, dict[int, _Leader]] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._num_lost: dict[int, int] = {}

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        if self._leaders:
            self._follow_leaders(plan)

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self._leaders or request.skip_reading_prefix_cache or request.num_computed_tokens:
            return False  # who holds blocks already looks for none
        hashes = request.block_hashes
        leaders = self._by_first_block.get(hashes[0]) if hashes else None
        if leaders is None or self._num_lost.get(request.seq_id, 0) >= PATIENCE:
            return False
        num_found = candidate.computed.num_tokens
        found = num_found // self._block_size
        most = (request.num_tokens - 1) // self._block_size
        for leader in leaders.values():
            if leader.request.status is not RequestStatus.RUNNING:
                continue  # it has given way in this very pass, perhaps to this request
            if leader.reached < num_found:
                continue  # it has yet to compute what is in the cache
            theirs = leader.request.block_hashes
            if found < min(most, len(theirs)) and theirs[found] == hashes[found]:
                shared = _num_shared(hashes, theirs, found + 1, min(most, len(theirs)))
                num_tokens = shared * self._block_size
                if num_tokens <= leader.reached:
                    continue  # they are lost already, and nothing comes
                if num_tokens - num_found >= self._least_spared:
                    self._hold(request, leader, num_tokens)
                    return True
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        self._num_lost.pop(request.seq_id, None)
        reached = request.num_computed_tokens + num_new_tokens
        if reached < request.num_tokens and (hashes := request.block_hashes):
            leader = _Leader(request, reached, hashes[0], wanted=reached)
            self._leaders[request.seq_id] = leader
            self._by_first_block.setdefault(hashes[0], {})[request.seq_id] = leader

    def on_released(self, request: Request) -> None:
        self._num_lost.pop(request.seq_id, None)
        self._waiters.pop(request.seq_id, None)
        leader = self._leaders.get(request.seq_id)
        if leader is not None:
            self._dismiss(leader)

    def _follow_leaders(self, plan: StepPlan) -> None:
        planned = plan.num_new_tokens(self._leaders)
        least = max(1, min(self._longest_chunk, plan.budget, plan.prompt_budget))
        for seq_id, leader in list(self._leaders.items()):
            request = leader.request
            if request.status is not RequestStatus.RUNNING:
                self._dismiss(leader)
                continue
            num_computed = request.num_computed_tokens
            leader.num_lost += num_computed < leader.wanted
            leader.wanted = min(num_computed + least, request.num_tokens)
            leader.reached = num_computed + planned.get(seq_id, 0)
            while leader.waiters and leader.waiters[0][0] <= leader.reached:
                self._release(heapq.heappop(leader.waiters)[1], leader.num_lost)
            while leader.limits and leader.limits[0][0] <= leader.num_lost:
                self._release(heapq.heappop(leader.limits)[1], leader.num_lost)
            if leader.reached >= request.num_tokens:
                self._dismiss(leader)

    def _hold(self, request: Request, leader: _Leader, num_tokens: int) -> None:
        self._num_waits += 1
        ticket = (self._num_waits, request.seq_id)
        origin = leader.num_lost - self._num_lost.get(request.seq_id, 0)
        self._waiters[request.seq_id] = _Waiter(request, self._num_waits, origin)
        heapq.heappush(leader.waiters, (num_tokens, ticket))
        heapq.heappush(leader.limits, (origin + PATIENCE, ticket))

    def _dismiss(self, leader: _Leader) -> None:
        """It leads nobody any more; who waits for it has lost another step."""
        seq_id, first_block = leader.request.seq_id, leader.first_block
        del self._leaders[seq_id]
        del self._by_first_block[first_block][seq_id]
        if not self._by_first_block[first_block]:
            del self._by_first_block[first_block]
        for _, ticket in leader.waiters:
            self._release(ticket, leader.num_lost + 1)

    def _release(self, ticket: _Ticket, num_lost: int) -> None:
        """Let the holder of a ticket go, unless it is void. num_lost: by its leader."""
        number, seq_id = ticket
        waiter = self._waiters.get(seq_id)
        if waiter is None or waiter.number != number:
            return
        del self._waiters[seq_id]
        self._num_lost[seq_id] = num_lost - waiter.origin
        self._unblock(waiter.request)


def _num_shared(ours: Sequence[bytes], theirs: Sequence[bytes], known: int, most: int) -> int:
    """How many leading hashes are equal, in [known, most]; equal ones come first."""
    low, high = known, most
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


# Choices of one request share the KV of their prompt.
#
# One choice computes the prompt. The others wait for it and begin as its forks; only
# the last token of the prompt is computed by each, for its logits. One that comes back
# after a preemption, or the row of a beam, may share outputs as well.
#
#     first choice    |------------- prompt ------------|-- its outputs --
#     another one     |- shared, the end copied -|-last-|-- its outputs --
#
# Owns the choices that wait. Nobody is appointed: a running choice without the prompt
# is waited for, one with the prompt is forked, and where there is neither (the first
# was preempted, or aborted) the next in line computes the prompt itself. Where the first
# is over with its first token, what it left in the prefix cache has to do for all the
# others, and none of them waits again: else each would end before the next begins.
#
# A step looks at the choices that are waited for, which run, and at nobody who waits.


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

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        self._just_admitted.clear()
        for request_id, wait in list(self._waits.items()):
            if not self._is_computing(wait.source):
                self._release(request_id)

    def is_blocked(self, candidate: Candidate) -> bool:
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

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        siblings = self._choices[request.request_id]
        if len(siblings) == 1:
            return
        self._just_admitted.add(request)
        # What one of them computed is shared, but it was not cached.
        request.num_cached_tokens = min(
            each.num_cached_tokens for each in siblings.values() if each.scheduled_at is not None
        )

    def on_released(self, request: Request) -> None:
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
                num_shared = _num_common_tokens(request, source)
                if num_shared > longest.num_tokens:
                    fork = self._kv_cache.find_fork(source, num_shared)
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
            self._unblock(request)


def _num_common_tokens(request: Request, source: Request) -> int:
    """Tokens in which both begin, computed by the source; one is left for the request."""
    ours, theirs = request.all_token_ids, source.all_token_ids
    most = min(len(ours) - 1, len(theirs), source.num_computed_tokens)
    shared = min(most, request.num_prompt_tokens)
    while shared < most and ours[shared] == theirs[shared]:
        shared += 1
    return shared
