"""Condensing a trace for the page: states of sequences, steps, and derived values."""

import msgspec
import pytest

from deploy.trace.condense import State, condense
from proto.errors import ProtocolError
from proto.messages.sched_trace import (
    Arrival,
    Decision,
    Dropped,
    Event,
    Finish,
    PinBegin,
    PinEnd,
    PoolUse,
    PrefixHit,
    Result,
    Snapshot,
    Step,
    TraceHeader,
)
from proto.settings.config import SchedulerConfig

HEADER = TraceHeader(
    epoch=1,
    started_at=0.0,
    num_blocks=11,
    block_size=16,
    enable_prefix_caching=True,
    max_model_len=100,
    scheduler=SchedulerConfig(),
)


def arrival(time, seq_id=0, **given):
    fields = {"num_prompt_tokens": 60, "max_tokens": 9, "request_id": seq_id, "arrived_us": time}
    return Arrival(time_us=time, seq_id=seq_id, **{**fields, **given})


def step(time, number, **decision):
    pool = PoolUse(free=4, cached=3, requests=2, held=1)
    snapshot = Snapshot(
        pool=pool, running=1, waiting=2, blocked={"grammar": 3}, token_budget=64, seats=8
    )
    return Step(time_us=time, step=number, snapshot=snapshot, decision=Decision(**decision))


def hit(num_tokens, local=0, external=0):
    return PrefixHit(seq_id=0, num_tokens=num_tokens, local_tokens=local, external_tokens=external)


SEQUENCE = [
    arrival(10),
    step(20, 1, new=[0], new_tokens=[30], hits=[hit(60, 16)], num_tokens=30),
    Result(time_us=30, step=1),
    step(31, 2, running=[0], running_tokens=[14], num_tokens=14),
    Result(time_us=40, step=2, num_tokens=1, first=[0]),
    step(41, 3, running=[0], num_tokens=1),
    Result(time_us=50, step=3, num_tokens=1),
    step(51, 4, preempted=[0], limit="preemption"),
    step(60, 5, resumed=[0], resumed_tokens=[14], hits=[hit(62, 16, 32)], num_tokens=14),
    Result(time_us=70, step=5, num_tokens=1),
    Finish(time_us=80, seq_id=0, reason="stop", num_output_tokens=3, num_cached_tokens=16),
    PinBegin(time_us=80, job="j", seq_id=0, num_blocks=3),
    PinEnd(time_us=95, job="j"),
]


def test_a_sequence_is_divided_into_states() -> None:
    condensed = condense([HEADER, *SEQUENCE])
    assert condensed.segments == [
        (0, State.QUEUED, 10, 20),
        (0, State.PREFILL, 20, 40),
        (0, State.DECODE, 40, 51),
        (0, State.PREEMPTED, 51, 60),
        (0, State.PREFILL, 60, 70),
        (0, State.DECODE, 70, 80),
        (0, State.PINNED, 80, 95),
    ]
    assert condensed.firsts == {0: 40}
    assert condensed.end == 95


def test_steps_are_columns() -> None:
    condensed = condense([HEADER, *SEQUENCE])
    steps = condensed.steps
    assert list(steps["step"]) == [1, 2, 3, 4, 5]
    assert list(steps["prefill"]) == [30, 14, 0, 0, 14]
    assert list(steps["decode"]) == [0, 0, 1, 0, 0]
    assert list(steps["local"]) == [16, 0, 0, 0, 16]
    assert list(steps["external"]) == [0, 0, 0, 0, 32]
    assert list(steps["preempted"]) == [0, 0, 0, 1, 0]
    assert [condensed.limits[number] for number in steps["limit"]] == ["", "", "", "preemption", ""]
    assert {name: steps[name][0] for name in ("running", "waiting", "blocked")} == {
        "running": 1,
        "waiting": 2,
        "blocked": 3,
    }
    assert [steps[name][0] for name in ("free", "cached", "requests", "held", "pinned")] == [
        4, 3, 2, 1, 0,
    ]  # fmt: skip
    condensed = condense([HEADER, *SEQUENCE])
    assert list(condensed.step_ends) == [30, 40, 50, 0, 70]


def test_sequences_that_stay_from_step_to_step_are_counted() -> None:
    """One that has ended is not taken for another that comes before the next step."""
    lines = [
        arrival(10),
        step(20, 1, new=[0], new_tokens=[30]),
        arrival(25, 1),
        Result(time_us=30, step=1),
        Finish(time_us=31, seq_id=0, reason="error", num_output_tokens=0),
        arrival(40, 2),
        step(41, 2, new=[2], new_tokens=[3]),
        Finish(time_us=42, seq_id=1, reason="error", num_output_tokens=0),
        Finish(time_us=43, seq_id=2, reason="error", num_output_tokens=0),
        arrival(50, 3),
        step(51, 3, new=[3], new_tokens=[3]),
    ]
    assert list(condense([HEADER, *lines]).steps["kept"]) == [0, 1, 0]


def test_unfinished_states_last_until_the_end() -> None:
    lines = [
        *SEQUENCE[:2],
        arrival(25, 1),
        SEQUENCE[2],
        Event(time_us=44, what="pause", detail="freeze"),
    ]
    condensed = condense([HEADER, *lines])
    assert condensed.segments == [
        (0, State.QUEUED, 10, 20),
        (0, State.PREFILL, 20, 44),
        (1, State.QUEUED, 25, 44),
    ]
    assert condensed.events == [(44, "pause freeze")]
    assert condensed.finishes == {}


def test_overlapped_results_end_the_prefill_of_their_own_step() -> None:
    lines = [
        arrival(0),
        step(10, 1, new=[0], new_tokens=[30], hits=[hit(60)], num_tokens=30),
        step(11, 2, running=[0], running_tokens=[30], num_tokens=30),
        Result(time_us=20, step=1),
        step(21, 3, running=[0], num_tokens=1),
        Result(time_us=30, step=2, num_tokens=1, first=[0]),
        Finish(time_us=40, seq_id=0, reason="length", num_output_tokens=1),
    ]
    assert condense([HEADER, *lines]).segments[1:] == [
        (0, State.PREFILL, 10, 30),
        (0, State.DECODE, 30, 40),
    ]


def test_lines_about_requests_before_the_trace_are_ignored() -> None:
    lines = [
        step(
            10, 7, running=[5], num_tokens=1, preempted=[6], hits=[hit(9)], new=[0], new_tokens=[1]
        ),
        Dropped(num_lines=4),
        Result(time_us=20, step=6),
        Finish(time_us=30, seq_id=5, reason="stop", num_output_tokens=1),
        PinEnd(time_us=30, job="unknown"),
    ]
    condensed = condense([HEADER, *lines])
    assert condensed.segments == []
    assert condensed.events == [(10, "4 lines are missing")]


def test_a_trace_begins_with_its_header() -> None:
    for lines in ([], SEQUENCE):
        with pytest.raises(ProtocolError):
            condense(lines)
    again = msgspec.structs.replace(HEADER)
    assert condense([HEADER, again]).end == 0
