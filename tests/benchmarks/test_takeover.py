"""What the benchmark of takeovers reads from a trace."""

import math
from pathlib import Path

import msgspec
import pytest

from proto.messages.sched_trace import (
    Arrival,
    Decision,
    Event,
    PoolUse,
    Snapshot,
    Step,
    TraceHeader,
)
from proto.settings.config import SchedulerConfig
from tests.benchmarks.takeover import Kill, add_engine_times, takeovers


def arrival(seq_id: int, time_us: int, num_output_tokens: int) -> Arrival:
    return Arrival(
        time_us=time_us,
        seq_id=seq_id,
        request_id=seq_id,
        arrived_us=0,
        num_prompt_tokens=4,
        num_output_tokens=num_output_tokens,
        max_tokens=9,
    )


def step(number: int, time_us: int, new: list[int], num_tokens: int = 0) -> Step:
    snapshot = Snapshot(pool=PoolUse(free=9), token_budget=64, seats=4)
    decision = Decision(new=new, num_tokens=num_tokens)
    return Step(time_us=time_us, step=number, snapshot=snapshot, decision=decision)


def header(epoch: int, started_at: float) -> TraceHeader:
    return TraceHeader(
        epoch=epoch,
        started_at=started_at,
        num_blocks=9,
        block_size=16,
        enable_prefix_caching=True,
        max_model_len=64,
        scheduler=SchedulerConfig(),
    )


def write(path: Path, *lines: msgspec.Struct) -> Path:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return path


def test_a_takeover_lasts_from_the_arrival_to_the_first_step(tmp_path: Path) -> None:
    """Requests of the engine's own, which arrive without outputs, are not counted."""
    trace = write(
        tmp_path / "run.jsonl",
        header(2, 100.0),
        arrival(1, 1_000, 0),
        step(1, 2_000, [1]),
        arrival(2, 500_000, 7),
        step(2, 510_000, []),
        step(3, 530_000, [2]),
    )
    assert takeovers(trace) == [(100.5, 100.53)]


def test_times_after_each_kill_come_from_the_engine_that_continues(tmp_path: Path) -> None:
    """After the death of a worker that is the same one, which gets no request again."""
    first = write(
        tmp_path / "run.jsonl",
        header(1, 100.0),
        step(1, 900_000, [1], 4),
        Event(time_us=1_100_000, what="restart"),
        step(2, 1_150_000, []),
        step(3, 1_250_000, [], 5),
        step(4, 1_300_000, [], 1),
    )
    second = write(
        tmp_path / "run.3.jsonl", header(3, 102.0), arrival(1, 200_000, 7), step(1, 250_000, [1], 8)
    )
    kills = [
        Kill("worker", "standby", moment=101.0, token=1.0, prompt=1.0),
        Kill("engine", "new", moment=102.1, token=1.0, prompt=1.0),
    ]
    add_engine_times(kills, [first, second])
    worker, engine = kills
    assert math.isnan(worker.arrival)
    assert worker.step == pytest.approx(250)
    assert engine.arrival == pytest.approx(100)
    assert engine.step == pytest.approx(150)
