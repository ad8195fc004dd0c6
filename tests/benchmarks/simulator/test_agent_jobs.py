"""Simulated agent jobs: drawing, concurrency, a host memory tier, and their live KV."""

from collections import defaultdict
from dataclasses import replace

import pytest

from proto.codec import changed
from proto.messages.sched_trace import Arrival, Content
from tests.benchmarks.agent_jobs.load import AgentLoad, draw_jobs
from tests.benchmarks.simulator.messages import (
    HostTier,
    ReplayFigures,
    ReplayOrder,
    StepModel,
)
from tests.benchmarks.simulator.player import Player, simulate
from tests.benchmarks.simulator.recording import RecordedRequest, Together, recording_of
from tests.benchmarks.simulator.simulation import Course, live_blocks
from tests.fakes.traced_engine import TracedEngine, chat
from tests.fakes.traced_engine import recording_of as trace_of

EVEN = StepModel(base_ms=10.0)
LOAD = AgentLoad(num_jobs=12, seed=5, jobs_per_second=2.0, turns=4, system_tokens=160)
PRESSED = AgentLoad(
    num_jobs=14, seed=2, jobs_per_second=6.0, turns=8, output_tokens=20, longest_tool_s=20.0
)


def play(order: ReplayOrder) -> ReplayFigures:
    figures = Player().play(order).figures
    assert figures is not None
    return figures


def test_a_recording_has_the_drawn_jobs() -> None:
    jobs = draw_jobs(LOAD)
    turns: dict[str, list[RecordedRequest]] = defaultdict(list)
    for sequence in recording_of(LOAD).sequences.values():
        turns[sequence.arrival.job].append(sequence)
    assert len(turns) == len(jobs) == LOAD.num_jobs
    for job, sequences in zip(jobs, turns.values(), strict=True):
        assert [each.tool for each in sequences] == [each.tool for each in job.turns]
        assert [each.arrival.is_last_step for each in sequences] == [False] * (
            len(sequences) - 1
        ) + [True]
        num_tokens = LOAD.system_tokens
        for turn, sequence in zip(job.turns, sequences, strict=True):
            assert sequence.arrival.num_prompt_tokens == num_tokens + turn.new_tokens
            assert sequence.num_outputs == turn.output_tokens
            num_tokens += turn.new_tokens + turn.output_tokens
        for turn, before, after in zip(job.turns, sequences, sequences[1:], strict=False):
            gap = (after.arrival.time_us - before.finish.time_us) / 1e6
            assert gap == pytest.approx(turn.tool_s, abs=1e-6)


def test_a_higher_rate_keeps_the_jobs_and_shortens_gaps() -> None:
    slow, fast = draw_jobs(LOAD), draw_jobs(replace(LOAD, jobs_per_second=8.0))
    assert [each.turns for each in slow] == [each.turns for each in fast]
    assert [each.starts_s for each in slow] == pytest.approx([4 * each.starts_s for each in fast])
    assert draw_jobs(replace(LOAD, seed=6)) != slow


def test_every_tool_has_its_durations() -> None:
    jobs = draw_jobs(AgentLoad(num_jobs=600, seed=1, turns=20, longest=1 << 20))
    calls: dict[str, list[float]] = defaultdict(list)
    for turn in (turn for job in jobs for turn in job.turns if turn.tool):
        calls[turn.tool].append(turn.tool_s)
    num_calls = sum(map(len, calls.values()))
    for tool in LOAD.tools:
        seconds = sorted(calls[tool.name])
        assert len(seconds) / num_calls == pytest.approx(tool.share, abs=0.02)
        assert seconds[len(seconds) // 2] == pytest.approx(tool.median_s, rel=0.25)
        assert seconds[-1] <= LOAD.longest_tool_s


def test_a_job_ends_before_its_context_is_too_long() -> None:
    load = replace(LOAD, turns=200.0, longest=2000)
    for job in draw_jobs(load):
        tokens = sum(each.new_tokens + each.output_tokens for each in job.turns)
        assert load.system_tokens + tokens <= load.longest
        assert job.turns[-1].tool == ""


def test_one_job_at_a_time_takes_the_sum_of_all_steps() -> None:
    """Steps take 10 ms; a prompt fits into one step, which also returns the first token."""
    load = replace(LOAD, num_jobs=6)
    figures = play(ReplayOrder(load=load, together=1, step_model=EVEN, max_num_batched_tokens=8192))
    num_outputs = sum(turn.output_tokens for job in draw_jobs(load) for turn in job.turns)
    assert figures.num_steps == num_outputs
    assert figures.seconds == pytest.approx(num_outputs * 0.010)
    assert figures.num_jobs == 6


def test_together_starts_a_job_when_another_ends() -> None:
    sequences = [RecordedRequest(Arrival(**named(each))) for each in ("a0", "a1", "b0", "c0", "-0")]
    offers = Together(sequences, 2)
    assert [offers.take(0.0).arrival.seq_id for _ in range(2)] == [0, 2]
    assert offers.take(0.0) is None
    assert not offers
    offers.ended(0, 1.0)
    assert offers.next_time == 1.0
    assert offers.take(1.0).arrival.seq_id == 1
    offers.ended(2, 2.0)
    assert offers.take(2.0).arrival.seq_id == 3
    offers.ended(1, 3.0)
    assert offers.take(3.0).arrival.seq_id == 4
    for seq_id in (3, 4):
        offers.ended(seq_id, 4.0)
    assert not offers


def named(name: str) -> dict[str, object]:
    """Return fields of an arrival; its job is the letter, or none."""
    names = ["a0", "a1", "b0", "c0", "-0"]
    return {
        "seq_id": names.index(name),
        "request_id": names.index(name),
        "arrived_us": 0,
        "job": name[0].strip("-"),
        "num_prompt_tokens": 4,
        "max_tokens": 1,
    }


def test_kv_of_live_jobs_is_counted_from_arrival_to_last_token() -> None:
    """Jobs of one system prompt of 10 blocks.

    0       4          10        14        20       24
    ├ first, asked     ┤ over
            ├ second, asked               ┤ over
                                  ├ third ┤ …
    """
    load = AgentLoad(num_jobs=3, num_systems=1, system_tokens=160, turns=1, seed=1)
    recording = recording_of(load)
    sequences = list(recording.sequences.values())
    asked = [len(recording.chains.blocks(each.arrival.blocks)) for each in sequences]
    times = ((0.0, 10.0), (4.0, 20.0), (14.0, 24.0))
    courses = [
        Course(each, start, end=end) for each, (start, end) in zip(sequences, times, strict=True)
    ]
    mean, peak = live_blocks(recording, courses)
    both = asked[0] + asked[1] - 10
    assert peak == both > asked[1] > asked[0] > 10
    assert mean == pytest.approx((4 * asked[0] + 6 * both + 4 * asked[1]) / 14)


def test_kv_of_live_jobs_has_the_answers_of_turns_before() -> None:
    """One job of two turns, then another one that ends the measured interval."""
    load = AgentLoad(num_jobs=2, num_systems=1, system_tokens=160, turns=3, seed=3)
    recording = recording_of(load)
    sequences = list(recording.sequences.values())
    jobs = [[each for each in sequences if each.arrival.job == f"agent-{n}"] for n in (0, 1)]
    first, second = jobs[0][:2]
    courses = [
        Course(first, 0.0, end=1.0),
        Course(second, 5.0, end=7.0),
        Course(jobs[1][0], 6.0, end=8.0),
    ]
    asked, said = (len(recording.chains.blocks(each)) for each in contents(first))
    asked_again, _ = (len(recording.chains.blocks(each)) for each in contents(second))
    mean, peak = live_blocks(recording, courses)
    assert peak == asked_again >= said > asked
    assert mean == pytest.approx((asked + 4 * said + asked_again) / 6)


def contents(sequence: RecordedRequest) -> tuple[Content, Content]:
    """Return the contents of the prompt and of the whole sequence."""
    return sequence.arrival.blocks, sequence.content


def test_live_kv_is_zero_without_jobs() -> None:
    engine = TracedEngine()
    engine.harness.add_one([1] * 100, 5)
    engine.finish()
    figures = simulate(engine.recording, ReplayOrder(step_model=EVEN))
    assert (figures.live_blocks_mean, figures.live_blocks_peak) == (0.0, 0)
    recording = trace_of(TracedEngine().header, chat(3))
    assert simulate(recording, ReplayOrder(step_model=EVEN)).num_prompt_tokens == 20 + 40 + 60


def test_host_memory_has_blocks_evicted_from_the_pool() -> None:
    orders = {
        name: ReplayOrder(load=PRESSED, num_blocks=blocks, tier=tier, step_model=EVEN)
        for name, blocks, tier in (
            ("full", None, None),
            ("pressed", 540, None),
            ("tier", 540, HostTier(num_blocks=20_000, block_ms=0.001)),
            ("slow", 540, HostTier(num_blocks=20_000, block_ms=5.0)),
            ("small", 540, HostTier(num_blocks=400, block_ms=0.001)),
        )
    }
    found = {name: play(order) for name, order in orders.items()}
    tokens = {name: each.num_found_tokens for name, each in found.items()}
    assert tokens["pressed"] < tokens["small"] < tokens["tier"] <= tokens["full"]
    assert tokens["tier"] > 0.98 * tokens["full"]
    assert found["slow"].ttft.mean > found["tier"].ttft.mean
    assert {each.num_prompt_tokens for each in found.values()} == {found["full"].num_prompt_tokens}
    assert {each.output_tokens for each in found.values()} == {found["full"].output_tokens}
    assert play(orders["tier"]) == found["tier"]


def test_turns_of_jobs_end_and_pin_their_prefixes() -> None:
    """Every turn but a job's last one pins its prefix until the next turn or its expiry."""
    order = ReplayOrder(load=PRESSED, step_model=EVEN, policy="continuum", num_blocks=2000)
    found = {name: play(changed(order, pin_policy=name)) for name in ("none", "fixed", "rule")}
    for name in ("fixed", "rule"):
        each = found[name]
        assert each.pins_taken == each.num_requests - each.num_jobs
        assert 0 < each.pins_hit < each.pins_taken
        assert each.pins_hit + each.pins_expired + each.pins_unpinned <= each.pins_taken
    assert found["none"].pins_taken == 0
    assert found["rule"] != found["fixed"]
    assert play(changed(order, pin_policy="rule")) == found["rule"]
    assert play(changed(order, policy="fcfs")).pins_taken == 0


def test_step_times_of_a_drawn_load_come_from_the_given_trace(tmp_path) -> None:
    path = str(tmp_path / "tape.jsonl")
    play(ReplayOrder(load=LOAD, step_model=StepModel(base_ms=7.0), tape_path=path))
    figures = play(ReplayOrder(load=replace(LOAD, seed=9), path=path))
    assert figures.step_model.base_ms == pytest.approx(7.0, rel=1e-3)
    assert figures.num_jobs == LOAD.num_jobs


def test_other_requests_do_not_change_the_jobs() -> None:
    load = replace(LOAD, others_per_job=3.0, other_tokens=50, other_output_tokens=5)
    assert draw_jobs(load) == draw_jobs(LOAD)
    found = list(recording_of(load).sequences.values())
    jobs, others = found[:-36], found[-36:]
    alone = list(recording_of(LOAD).sequences.values())
    assert [each.arrival.num_prompt_tokens for each in jobs] == [
        each.arrival.num_prompt_tokens for each in alone
    ]
    assert {each.arrival.job for each in others} == {""}
    assert all(each.arrival.blocks.num_known == 0 for each in others)
    starts = [each.arrival.time_us / 1e6 for each in others]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(LOAD.num_jobs / LOAD.jobs_per_second, rel=0.7)
    figures = play(ReplayOrder(load=load, step_model=EVEN, policy="continuum"))
    assert figures.num_jobs == LOAD.num_jobs + 36
    assert figures.agents.mean > figures.others.mean > 0
    assert figures.jobs.mean * 48 == pytest.approx(
        figures.agents.mean * 12 + figures.others.mean * 36
    )
    assert figures.other_prompt_tokens == sum(each.arrival.num_prompt_tokens for each in others)
