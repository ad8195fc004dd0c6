"""Waiting for a prefix that another request is computing right now.

Blocks can be found from the step that fills them. A prompt that takes several
steps therefore fills them one chunk at a time, and an equal prompt that starts
meanwhile would compute the rest of it a second time.

Owns the leaders (running requests whose tokens are not all scheduled yet) and who waits
for them. A step looks at each leader once, and at no request that goes on waiting.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan

LONGEST_WAIT: Final = 64
"""Steps that a request waits in all; then it computes for itself."""

_Ticket = tuple[int, int]
"""(step in which a wait began, handle of who waits); one that is over is void, not taken out."""


@dataclass(slots=True)
class _Waiter:
    """`request` waits since the step `since`."""

    request: Request
    since: int


@dataclass(slots=True)
class _Leader:
    """`request` has been given its first `reached` tokens, those of this step included.

    waiters: heap of (number of tokens to be reached, ticket), some of them void.
    """

    request: Request
    reached: int
    waiters: list[tuple[int, _Ticket]] = field(default_factory=list)


class PrefixWait:
    """Holds a request whose next block is being computed, until all they share is.

        leader    |---computed---|-this step-|-- to come --|
        request   |----------- shared -----------|-- own --|
                                  found so far ↑ ↑ until here it waits

    The wait ends early when the leader stops running, and after LONGEST_WAIT steps.

        leader.waiters   those who wait for it, the one that needs the fewest tokens first
        _time_is_up      those whose time is up, by the step in which it is
    """

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_PREFIX

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step = 0  # admission passes so far
        self._leaders: dict[int, _Leader] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._time_is_up: defaultdict[int, list[_Ticket]] = defaultdict(list)
        self._num_waited: dict[int, int] = {}

    def attach(self, wake: Wake) -> None:
        self._wake = wake

    def begin(self, plan: StepPlan) -> None:
        self._step += 1
        if self._leaders:
            self._follow_leaders(plan)
        for ticket in self._time_is_up.pop(self._step, ()):
            self._release(ticket)

    def holds(self, candidate: Candidate) -> bool:
        request = candidate.request
        if not self._leaders or request.skip_reading_prefix_cache or request.num_computed_tokens:
            return False  # who holds blocks already looks for none
        found = candidate.computed.num_tokens // self._block_size
        most = (request.num_tokens - 1) // self._block_size
        if found >= most or self._num_waited.get(request.handle, 0) >= LONGEST_WAIT:
            return False
        hashes = request.block_hashes
        for leader in self._leaders.values():
            if leader.request.status is not RequestStatus.RUNNING:
                continue  # it has given way in this very pass, perhaps to this request
            theirs = leader.request.block_hashes
            if found < len(theirs) and theirs[found] == hashes[found]:
                shared = _num_shared(hashes, theirs, found + 1, min(most, len(theirs)))
                num_tokens = shared * self._block_size
                if num_tokens > leader.reached:  # else it is lost already, and nothing comes
                    self._hold(request, leader, num_tokens)
                    return True
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        self._num_waited.pop(request.handle, None)
        reached = request.num_computed_tokens + num_new_tokens
        if reached < request.num_tokens:
            self._leaders[request.handle] = _Leader(request, reached)

    def forget(self, request: Request) -> None:
        self._num_waited.pop(request.handle, None)
        self._waiters.pop(request.handle, None)
        leader = self._leaders.get(request.handle)
        if leader is not None:
            self._dismiss(leader)

    def _follow_leaders(self, plan: StepPlan) -> None:
        planned = plan.num_new_tokens(self._leaders)
        for handle, leader in list(self._leaders.items()):
            request = leader.request
            if request.status is not RequestStatus.RUNNING:
                self._dismiss(leader)
                continue
            leader.reached = request.num_computed_tokens + planned.get(handle, 0)
            while leader.waiters and leader.waiters[0][0] <= leader.reached:
                self._release(heapq.heappop(leader.waiters)[1])
            if leader.reached >= request.num_tokens:
                self._dismiss(leader)

    def _hold(self, request: Request, leader: _Leader, num_tokens: int) -> None:
        ticket = (self._step, request.handle)
        self._waiters[request.handle] = _Waiter(request, self._step)
        heapq.heappush(leader.waiters, (num_tokens, ticket))
        left = LONGEST_WAIT - self._num_waited.get(request.handle, 0)
        self._time_is_up[self._step + left].append(ticket)

    def _dismiss(self, leader: _Leader) -> None:
        """Nobody waits for it any more."""
        del self._leaders[leader.request.handle]
        for _, ticket in leader.waiters:
            self._release(ticket)

    def _release(self, ticket: _Ticket) -> None:
        """Let the holder of a ticket go, unless it is void."""
        since, handle = ticket
        waiter = self._waiters.get(handle)
        if waiter is None or waiter.since != since:
            return
        del self._waiters[handle]
        self._num_waited[handle] = self._num_waited.get(handle, 0) + self._step - since
        self._wake(waiter.request)


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
