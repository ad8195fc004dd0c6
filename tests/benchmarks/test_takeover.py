"""What the benchmark of takeovers reads from a trace."""

from pathlib import Path

import msgspec

from proto.messages.sched_trace import Arrival, Decision, PoolUse, Snapshot, Step, TraceHeader
from proto.settings.config import SchedulerConfig
from tests.benchmarks.takeover import takeovers


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


def step(number: int, time_us: int, new: list[int]) -> Step:
    snapshot = Snapshot(pool=PoolUse(free=9), token_budget=64, seats=4)
    return Step(time_us=time_us, step=number, snapshot=snapshot, decision=Decision(new=new))


def test_a_takeover_lasts_from_the_arrival_to_the_first_step(tmp_path: Path) -> None:
    """Requests of the engine's own, which arrive without outputs, are not counted."""
    header = TraceHeader(
        epoch=2,
        started_at=100.0,
        num_blocks=9,
        block_size=16,
        enable_prefix_caching=True,
        max_model_len=64,
        scheduler=SchedulerConfig(),
    )
    lines = [
        header,
        arrival(1, 1_000, 0),
        step(1, 2_000, [1]),
        arrival(2, 500_000, 7),
        step(2, 510_000, []),
        step(3, 530_000, [2]),
    ]
    trace = tmp_path / "run.jsonl"
    trace.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    assert takeovers(trace) == [(100.5, 100.53)]
