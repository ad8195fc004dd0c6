"""From the lines of a trace to what a page shows: columns of steps, sequences and their states.

    arrival     admitted      first token     preempted       admitted            finish
      ├─ queued ──┼── prefill ──┼── decode ─────┼── preempted ──┼─ prefill, decode ──┤ pinned …

Owns no drawing. Everything is a column of numbers or of names, so that 100,000 steps stay small.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from proto.errors import ProtocolError
from proto.sched_trace import (
    Arrival,
    Decision,
    Dropped,
    Event,
    Finish,
    PinBegin,
    PinEnd,
    Result,
    Step,
    TraceHeader,
    TraceLine,
)

STEP_COLUMNS: Final = (
    "step",
    "prefill",
    "decode",
    "running",
    "waiting",
    "blocked",
    "free",
    "cached",
    "requests",
    "held",
    "pinned",
    "local",
    "external",
    "preempted",
)
"""Whole numbers of each step; prefill and decode in tokens, local and external, too."""


class State(IntEnum):
    """Of a sequence, from one moment to another."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    PINNED = 4


@dataclass(slots=True)
class _Life:
    """state, since: now. missing: tokens to compute before the next output."""

    row: int
    state: State
    since: int
    missing: int = 0


@dataclass
class Condensed:
    """Times in microseconds. Columns by name; those of a kind are equally long.

    steps: STEP_COLUMNS, step_times and step_ends beside them (0 where there is no result).
    segments: row, state, from and to, by row.
    """

    header: TraceHeader
    steps: "dict[str, array[int]]" = field(
        default_factory=lambda: {name: array("i") for name in STEP_COLUMNS}
    )
    step_times: "array[float]" = field(default_factory=lambda: array("d"))
    step_ends: "array[float]" = field(default_factory=lambda: array("d"))
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    finishes: dict[int, Finish] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    end: int = 0


class Condenser:
    """Takes the lines one after the other."""

    def __init__(self, header: TraceHeader) -> None:
        self.condensed = Condensed(header)
        self._lives: dict[int, _Life] = {}
        self._index_of_step: dict[int, int] = {}
        self._complete_after: dict[int, list[int]] = {}
        self._pins: dict[str, tuple[int, int]] = {}
        self._rows: dict[int, int] = {}  # of sequences, in the order of their arrival

    def take(self, line: TraceLine) -> None:
        """The next line."""
        condensed = self.condensed
        condensed.end = max(condensed.end, line.time_us)
        match line:
            case Arrival():
                row = self._rows[line.seq_id] = len(condensed.arrivals)
                condensed.arrivals.append(line)
                self._lives[line.seq_id] = _Life(row, State.QUEUED, line.time_us)
            case Step():
                self._step(line)
            case Result():
                self._result(line)
            case Finish():
                self._end(line.seq_id, line.time_us)
                condensed.finishes[line.seq_id] = line
            case PinBegin():
                self._unpin(line.job, line.time_us)
                self._pins[line.job] = (self._rows[line.seq_id], line.time_us)
            case PinEnd():
                self._unpin(line.job, line.time_us)
            case Event():
                condensed.events.append((line.time_us, f"{line.what} {line.detail}".strip()))
            case Dropped():
                condensed.events.append((condensed.end, f"{line.num_lines} lines are missing"))

    def finish(self) -> Condensed:
        """No more lines: what is under way lasts until the end."""
        end = self.condensed.end
        for seq_id in list(self._lives):
            self._end(seq_id, end)
        for job in list(self._pins):
            self._unpin(job, end)
        self.condensed.segments.sort(key=lambda each: (each[0], each[2]))
        return self.condensed

    def _step(self, line: Step) -> None:
        made, condensed = line.decision, self.condensed
        for seq_id in made.preempted:
            self._turn(seq_id, State.PREEMPTED, line.time_us)
        for hit in made.hits:
            self._turn(hit.seq_id, State.PREFILL, line.time_us)
            life = self._lives.get(hit.seq_id)
            if life is not None:
                life.missing = hit.num_tokens - hit.local_tokens - hit.external_tokens
        num_prefill = self._compute(line.step, made)
        snapshot, pool = line.snapshot, line.snapshot.pool
        values = (
            line.step,
            num_prefill,
            made.num_tokens - num_prefill,
            snapshot.running,
            snapshot.waiting,
            sum(snapshot.blocked.values()),
            pool.free,
            pool.cached,
            pool.requests,
            pool.held,
            pool.pinned,
            sum(each.local_tokens for each in made.hits),
            sum(each.external_tokens for each in made.hits),
            len(made.preempted),
        )
        for name, value in zip(STEP_COLUMNS, values, strict=True):
            condensed.steps[name].append(value)
        self._index_of_step[line.step] = len(condensed.step_times)
        condensed.step_times.append(line.time_us)
        condensed.step_ends.append(0)

    def _compute(self, step: int, made: Decision) -> int:
        """Count what sequences still miss; returns the tokens of those that miss something."""
        num_prefill = 0
        ones = [1] * len(made.running)
        for seq_id, number in (
            *zip(made.new, made.new_tokens, strict=True),
            *zip(made.resumed, made.resumed_tokens, strict=True),
            *zip(made.running, made.running_tokens or ones, strict=True),
        ):
            life = self._lives.get(seq_id)
            if life is not None and life.missing > 0:
                life.missing -= number
                num_prefill += number
                if life.missing <= 0:
                    self._complete_after.setdefault(step, []).append(seq_id)
        return num_prefill

    def _result(self, line: Result) -> None:
        index = self._index_of_step.pop(line.step, None)
        if index is not None:
            self.condensed.step_ends[index] = line.time_us
        for seq_id in line.first:
            self.condensed.firsts[seq_id] = line.time_us
        for seq_id in self._complete_after.pop(line.step, ()):
            life = self._lives.get(seq_id)
            if life is not None and life.state is State.PREFILL:
                self._turn(seq_id, State.DECODE, line.time_us)

    def _turn(self, seq_id: int, state: State, time: int) -> None:
        life = self._lives.get(seq_id)
        if life is None:
            return
        self._segment(life.row, life.state, life.since, time)
        life.state, life.since = state, time

    def _segment(self, row: int, state: State, start: int, end: int) -> None:
        if end > start:
            self.condensed.segments.append((row, int(state), start, end))

    def _end(self, seq_id: int, time: int) -> None:
        life = self._lives.pop(seq_id, None)
        if life is not None:
            self._segment(life.row, life.state, life.since, time)

    def _unpin(self, job: str, time: int) -> None:
        if job in self._pins:
            row, since = self._pins.pop(job)
            self._segment(row, State.PINNED, since, time)


def condense(lines: Iterable[TraceLine]) -> Condensed:
    """Raises ProtocolError where the first line is not the header."""
    condenser: Condenser | None = None
    for line in lines:
        if condenser is None:
            if not isinstance(line, TraceHeader):
                raise ProtocolError("a trace begins with its header")
            condenser = Condenser(line)
        elif not isinstance(line, TraceHeader):
            condenser.take(line)
    if condenser is None:
        raise ProtocolError("there is nothing in it")
    return condenser.finish()
