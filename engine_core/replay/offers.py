"""When which request comes, where what comes depends on what has ended.

Requests without a job come when they came. The turns of a job follow each other: the first comes
when it came, each other one so long after the end of the one before as it did, because the agent
behind it waits for the answer and then for its tool.

    recorded    turn 1 ├─────┤ gap ├── turn 2 ──┤
    simulated   turn 1 ├──────────┤ gap ├─ turn 2 ─┤

A turn that came before the end of the one before (jobs may ask for two things at once) comes as
long after the arrival of that one as it did.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Protocol

from engine_core.replay.recording import Sequence


class Offers(Protocol):
    """Sequences that are still to come, by the time of their arrival, in seconds."""

    def __bool__(self) -> bool:
        """Somebody's time is known."""
        ...

    @property
    def next_time(self) -> float:
        """Of the first that is to come; there must be one."""
        ...

    def take(self, now: float) -> Sequence | None:
        """The next one that has come; None where there is none."""
        ...

    def ended(self, handle: int, now: float) -> None:
        """Who waited for its end comes later."""
        ...


class InTime:
    """Sequences by the time of their arrival, in seconds.

    rate: first turns, and requests without a job, come so many times as fast.
    open_loop: everything does, and nothing waits for anything.
    """

    def __init__(
        self, sequences: Iterable[Sequence], rate: float = 1.0, open_loop: bool = False
    ) -> None:
        self._heap: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}
        self._after_end: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._after_start: dict[int, list[tuple[float, int]]] = defaultdict(list)
        last: dict[str, Sequence] = {}
        for each in sequences:
            handle, job = each.arrival.handle, each.arrival.job
            self._sequences[handle] = each
            before = last.get(job) if job and not open_loop else None
            if before is None:
                self._push(each.arrival.time_us / 1e6 / rate, handle)
            else:
                self._chain(before, each)
            if job:
                last[job] = each

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_time(self) -> float:
        """Of the first that is to come; there must be one."""
        return self._heap[0][0]

    def take(self, now: float) -> Sequence | None:
        """The next one that has come; None where there is none."""
        if not self._heap or self._heap[0][0] > now:
            return None
        time, handle = heapq.heappop(self._heap)
        for gap, follower in self._after_start.pop(handle, ()):
            self._push(time + gap, follower)
        return self._sequences[handle]

    def ended(self, handle: int, now: float) -> None:
        """Who waited for its end comes after its gap."""
        for gap, follower in self._after_end.pop(handle, ()):
            self._push(now + gap, follower)

    def _chain(self, before: Sequence, follower: Sequence) -> None:
        arrived, handle = follower.arrival.time_us, follower.arrival.handle
        ended = before.finish.time_us if before.finish else None
        if ended is not None and arrived >= ended:
            self._after_end[before.arrival.handle].append(((arrived - ended) / 1e6, handle))
        else:
            gap = (arrived - before.arrival.time_us) / 1e6
            self._after_start[before.arrival.handle].append((gap, handle))

    def _push(self, time: float, handle: int) -> None:
        heapq.heappush(self._heap, (time, handle))


class Together:
    """So many jobs at once, in their order, for as long as there are enough.

    Each turn comes at the end of the one before, as if tools took no time, and a job at the end of
    another one: what is measured is the server alone. A request without a job is a job of its own.
    """

    def __init__(self, sequences: Iterable[Sequence], number: int) -> None:
        jobs: dict[str, deque[Sequence]] = defaultdict(deque)
        for each in sequences:
            jobs[each.arrival.job or f"request {each.arrival.request_id}"].append(each)
        self._unstarted = deque(jobs.values())
        self._rest: dict[int, deque[Sequence]] = {}
        self._ready: deque[Sequence] = deque()
        self._now = 0.0
        for _ in range(number):
            self._start()

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def next_time(self) -> float:
        return self._now

    def take(self, now: float) -> Sequence | None:
        return self._ready.popleft() if self._ready else None

    def ended(self, handle: int, now: float) -> None:
        self._now = now
        turns = self._rest.pop(handle)
        if turns:
            self._next(turns)
        else:
            self._start()

    def _start(self) -> None:
        if self._unstarted:
            self._next(self._unstarted.popleft())

    def _next(self, turns: deque[Sequence]) -> None:
        turn = turns.popleft()
        self._rest[turn.arrival.handle] = turns
        self._ready.append(turn)
