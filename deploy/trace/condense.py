"""Condenses a trace to columns: steps, sequences and the states of sequences over time.

    arrival     admitted      first token     preempted       admitted            finish
      ├─ queued ──┼── prefill ──┼── decode ─────┼── preempted ──┼─ prefill, decode ──┤ pinned …

Everything is a column of numbers or names, so that 100,000 steps stay small.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from proto.errors import ProtocolError
from proto.messages.sched_trace import (
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
    *("step", "prefill", "decode", "running", "waiting", "blocked", "free", "cached", "requests"),
    *("held", "pinned", "local", "external", "preempted", "limit", "host", "others", "kept"),
)
"""Integers per step. prefill, decode, local, external: tokens. limit: index in `limits`. host,
others: blocks with KV in host memory, and on other media of the connector. kept: sequences that
were there from the end of the step before until this one."""


HOST_MEDIUM: Final = "CPU"


class State(IntEnum):
    """State of a sequence."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    PINNED = 4


@dataclass(slots=True)
class _SequenceState:
    """Present state of a sequence.

    row: on the page. since: in microseconds. missing: tokens to compute before the next output.
    """

    row: int
    state: State
    since: int
    missing: int = 0


@dataclass
class Condensed:
    """A condensed trace. Times in microseconds.

    steps: columns by name, see STEP_COLUMNS. step_times, step_ends: of the same steps; 0 without a
    result. segments: (row, state, from, to), ordered by row. firsts: times of first tokens by
    seq_id. events: (time, text). limits: what made steps shorter than their token budget.
    tiers: media of the connector, with their numbers of blocks.
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
    limits: list[str] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)
    end: int = 0


class Condenser:
    """Condenses the lines of a trace, one after the other."""

    def __init__(self, header: TraceHeader) -> None:
        self.condensed = Condensed(header)
        self._states: dict[int, _SequenceState] = {}
        self._index_of_step: dict[int, int] = {}
        self._complete_after: dict[int, list[int]] = {}
        self._pins: dict[str, tuple[int, int]] = {}
        self._rows: dict[int, int] = {}  # of sequences, in the order of their arrival
        self._num_kept = self._kept_before = 0  # since the last step; rows that count

    def add_line(self, line: TraceLine) -> None:
        condensed = self.condensed
        condensed.end = max(condensed.end, line.time_us)
        match line:
            case Arrival():
                row = self._rows[line.seq_id] = len(condensed.arrivals)
                condensed.arrivals.append(line)
                self._states[line.seq_id] = _SequenceState(row, State.QUEUED, line.time_us)
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
        """Return the condensed trace; states that have not ended last until the last line."""
        end = self.condensed.end
        for seq_id in list(self._states):
            self._end(seq_id, end)
        for job in list(self._pins):
            self._unpin(job, end)
        self.condensed.segments.sort(key=lambda segment: (segment[0], segment[2]))
        return self.condensed

    def _step(self, line: Step) -> None:
        decision, condensed = line.decision, self.condensed
        for seq_id in decision.preempted:
            self._set_state(seq_id, State.PREEMPTED, line.time_us)
        for hit in decision.hits:
            self._set_state(hit.seq_id, State.PREFILL, line.time_us)
            state = self._states.get(hit.seq_id)
            if state is not None:
                state.missing = hit.num_tokens - hit.local_tokens - hit.external_tokens
        num_prefill = self._compute(line.step, decision)
        snapshot, pool = line.snapshot, line.snapshot.pool
        if decision.limit not in condensed.limits:
            condensed.limits.append(decision.limit)
        values = (
            line.step,
            num_prefill,
            decision.num_tokens - num_prefill,
            snapshot.running,
            snapshot.waiting,
            sum(snapshot.blocked.values()),
            pool.free,
            pool.cached,
            pool.requests,
            pool.held,
            pool.pinned,
            sum(hit.local_tokens for hit in decision.hits),
            sum(hit.external_tokens for hit in decision.hits),
            len(decision.preempted),
            condensed.limits.index(decision.limit),
            sum(tier.num_used for tier in snapshot.tiers if tier.medium == HOST_MEDIUM),
            sum(tier.num_used for tier in snapshot.tiers if tier.medium != HOST_MEDIUM),
            self._num_kept,
        )
        self._begin_rest()
        for tier in snapshot.tiers:
            condensed.tiers[tier.medium] = tier.num_blocks
        for name, value in zip(STEP_COLUMNS, values, strict=True):
            condensed.steps[name].append(value)
        self._index_of_step[line.step] = len(condensed.step_times)
        condensed.step_times.append(line.time_us)
        condensed.step_ends.append(0)

    def _compute(self, step: int, decision: Decision) -> int:
        """Count down the missing tokens of sequences; return the prefill tokens of the step."""
        num_prefill = 0
        ones = [1] * len(decision.running)
        for seq_id, number in (
            *zip(decision.new, decision.new_tokens, strict=True),
            *zip(decision.resumed, decision.resumed_tokens, strict=True),
            *zip(decision.running, decision.running_tokens or ones, strict=True),
        ):
            state = self._states.get(seq_id)
            if state is not None and state.missing > 0:
                state.missing -= number
                num_prefill += number
                if state.missing <= 0:
                    self._complete_after.setdefault(step, []).append(seq_id)
        return num_prefill

    def _result(self, line: Result) -> None:
        index = self._index_of_step.pop(line.step, None)
        if index is not None:
            self.condensed.step_ends[index] = line.time_us
        self._begin_rest()
        for seq_id in line.first:
            self.condensed.firsts[seq_id] = line.time_us
        for seq_id in self._complete_after.pop(line.step, ()):
            state = self._states.get(seq_id)
            if state is not None and state.state is State.PREFILL:
                self._set_state(seq_id, State.DECODE, line.time_us)

    def _begin_rest(self) -> None:
        """Count the sequences that stay until the next step, from those that are here now on."""
        self._num_kept, self._kept_before = len(self._states), len(self.condensed.arrivals)

    def _set_state(self, seq_id: int, state: State, time: int) -> None:
        sequence = self._states.get(seq_id)
        if sequence is None:
            return
        self._segment(sequence.row, sequence.state, sequence.since, time)
        sequence.state, sequence.since = state, time

    def _segment(self, row: int, state: State, start: int, end: int) -> None:
        if end > start:
            self.condensed.segments.append((row, int(state), start, end))

    def _end(self, seq_id: int, time: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._num_kept -= state.row < self._kept_before
            self._segment(state.row, state.state, state.since, time)

    def _unpin(self, job: str, time: int) -> None:
        if job in self._pins:
            row, since = self._pins.pop(job)
            self._segment(row, State.PINNED, since, time)


def condense(lines: Iterable[TraceLine]) -> Condensed:
    """Condense a trace; raises ProtocolError if it is empty or has no header."""
    condenser: Condenser | None = None
    for line in lines:
        if condenser is None:
            if not isinstance(line, TraceHeader):
                raise ProtocolError("a trace begins with its header")
            condenser = Condenser(line)
        elif not isinstance(line, TraceHeader):
            condenser.add_line(line)
    if condenser is None:
        raise ProtocolError("the trace is empty")
    return condenser.finish()
