"""How much KV the jobs of a simulation had that were under way: the working set.

Owns the count. A job's KV is that of all its tokens so far, from its first arrival to its last
token, whether the pool held it then or not; what several jobs begin with counts once.

    job A     ├ turn ┤  tool  ├ turn ┤  tool  ├ turn ┤
    blocks    ▁▁▂▂▂▂▂▂▂▂▂▂▂▂▂▃▃▃▄▄▄▄▄▄▄▄▄▄▄▄▄▄▅▅▅▆▆▆ then none
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import pairwise

from engine_core.replay.recording import Recording
from engine_core.replay.simulation import Course

_WARM: float = 0.1
"""Part of the jobs that have to have arrived before anything counts."""


def live_blocks(recording: Recording, courses: Collection[Course]) -> tuple[float, int]:
    """Mean over time, and peak, in blocks that are full; zeros where there are no jobs."""
    changes = _changes(recording, courses)
    starts = sorted(_starts(courses))
    if not starts:
        return 0.0, 0
    begin, end = starts[int(_WARM * len(starts))], starts[-1]
    level, peak, area = 0, 0, 0.0
    for (time, change), (until, _) in pairwise([*changes, (end, 0)]):
        level += change
        spanned = min(until, end) - max(time, begin)
        if spanned > 0:
            area += level * spanned
            peak = max(peak, level)
    return (area / (end - begin) if end > begin else float(level)), peak


def _starts(courses: Collection[Course]) -> list[float]:
    first: dict[str, float] = {}
    for each in courses:
        job = each.sequence.arrival.job
        if job:
            first[job] = min(each.arrived, first.get(job, each.arrived))
    return list(first.values())


def _changes(recording: Recording, courses: Collection[Course]) -> list[tuple[float, int]]:
    """(time, blocks more or less), by time."""
    jobs: dict[str, list[Course]] = defaultdict(list)
    for each in courses:
        if each.sequence.arrival.job:
            jobs[each.sequence.arrival.job].append(each)
    events: list[tuple[float, bool, list[int]]] = []
    for turns in jobs.values():
        held: dict[int, None] = {}
        for turn in sorted(turns, key=lambda each: each.arrived):
            asked = recording.chains.blocks(turn.sequence.arrival.blocks)
            said = recording.chains.blocks(turn.sequence.content)
            for time, blocks in ((turn.arrived, asked), (_end(turn), said)):
                events.append((time, True, [each for each in blocks if each not in held]))
                held.update(dict.fromkeys(blocks))
        events.append((max(map(_end, turns)), False, list(held)))
    events.sort(key=lambda each: each[0])
    users: Counter[int] = Counter()
    found = []
    for time, begins, blocks in events:
        if begins:
            found.append((time, sum(not users[each] for each in blocks)))
            users.update(blocks)
        else:
            users.subtract(blocks)
            found.append((time, -sum(not users[each] for each in blocks)))
    return found


def _end(course: Course) -> float:
    assert course.end is not None, "a simulation runs until everybody is over"
    return course.end
