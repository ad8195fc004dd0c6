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
from collections import defaultdict
from collections.abc import Iterable

from engine_core.replay.recording import Sequence


class Offers:
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
