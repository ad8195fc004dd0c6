"""Waiting for a prefix that another request is computing right now.

Blocks can be found from the step that fills them. A prompt that takes several
steps therefore fills them one chunk at a time, and an equal prompt that starts
meanwhile would compute the rest of it a second time.

Owns the list of leaders (running requests whose tokens are not all scheduled yet)
and of those that wait for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.gates import Candidate, Wake
from engine_core.scheduler.step_plan import StepPlan

LONGEST_WAIT: Final = 64
"""Steps that a request waits in all; then it computes for itself."""


@dataclass(slots=True)
class _Waiter:
    """`request` waits until `leader` has been given its first `num_tokens` tokens."""

    request: Request
    leader: Request
    num_tokens: int


class PrefixWait:
    """Holds a request whose next block is being computed, until all they share is.

        leader    |---computed---|-this step-|-- to come --|
        request   |----------- shared -----------|-- own --|
                                  found so far ↑ ↑ until here it waits

    The wait ends early when the leader stops running, and after LONGEST_WAIT steps.
    """

    status = RequestStatus.WAITING_FOR_PREFIX

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[int, Request] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._num_waited: dict[int, int] = {}

    def attach(self, wake: Wake) -> None:
        self._wake = wake

    def begin(self, plan: StepPlan) -> None:
        if self._waiters:
            self._count_steps(plan)
        for leader in list(self._leaders.values()):
            if leader.status is not RequestStatus.RUNNING or _is_complete(leader):
                del self._leaders[leader.handle]

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
            theirs = leader.block_hashes
            if found < len(theirs) and theirs[found] == hashes[found]:
                shared = _num_shared(hashes, theirs, found + 1, min(most, len(theirs)))
                waiter = _Waiter(request, leader, shared * self._block_size)
                self._waiters[request.handle] = waiter
                return True
        return False

    def admitted(self, request: Request, num_new_tokens: int) -> None:
        self._num_waited.pop(request.handle, None)
        if request.num_computed_tokens + num_new_tokens < request.num_tokens:
            self._leaders[request.handle] = request

    def forget(self, request: Request) -> None:
        self._num_waited.pop(request.handle, None)
        self._waiters.pop(request.handle, None)
        if self._leaders.pop(request.handle, None) is None:
            return
        for waiter in list(self._waiters.values()):
            if waiter.leader is request:
                self._release(waiter)

    def _count_steps(self, plan: StepPlan) -> None:
        for handle, waiter in list(self._waiters.items()):
            waited = self._num_waited.get(handle, 0) + 1
            self._num_waited[handle] = waited
            leader = waiter.leader
            reached = leader.num_computed_tokens + plan.num_new_tokens(leader)
            if (
                reached >= waiter.num_tokens
                or waited >= LONGEST_WAIT
                or leader.status is not RequestStatus.RUNNING
            ):
                self._release(waiter)

    def _release(self, waiter: _Waiter) -> None:
        del self._waiters[waiter.request.handle]
        self._wake(waiter.request)


def _is_complete(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens


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
