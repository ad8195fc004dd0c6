"""Simulation of traces on a virtual clock."""

import msgspec
import pytest

from proto.messages.sched_trace import Arrival, Finish, Step
from tests.benchmarks.agent_jobs.load import AgentLoad
from tests.benchmarks.simulator.messages import ReplayOrder, StepModel
from tests.benchmarks.simulator.player import Player, simulate
from tests.benchmarks.simulator.recording import UnreadableTraceError, read
from tests.fakes.traced_engine import TracedEngine, chat, random_load, recording_of

EVEN = StepModel(base_ms=10.0)
LOAD = AgentLoad(num_jobs=12, seed=5, jobs_per_second=2.0, turns=4, system_tokens=160)


def test_one_request_takes_its_steps() -> None:
    engine = TracedEngine()
    engine.harness.add_one([1] * 100, 5)
    engine.finish()
    figures = simulate(engine.recording, ReplayOrder(step_model=EVEN))
    assert figures.num_steps == 2 + 4  # a budget of 64 tokens
    assert figures.ttft.mean == pytest.approx(0.020)
    assert figures.completion.p99 == pytest.approx(0.060)
    assert (figures.num_requests, figures.output_tokens, figures.num_left_out) == (1, 5, 0)


def test_overlapped_steps_leave_no_gap_and_compute_one_more() -> None:
    engine = TracedEngine(async_scheduling=True)
    engine.harness.add_one([1] * 20, 5)
    engine.finish()
    figures = simulate(engine.recording, ReplayOrder(step_model=EVEN))
    assert figures.completion.mean == pytest.approx(0.050)


def test_admissions_and_preemptions_equal_the_trace_with_equal_times() -> None:
    """Steps have the recorded length, so the clocks of the trace and the simulation agree."""
    engine = TracedEngine(num_blocks=30)
    for seed in range(12):
        engine.harness.add_one([seed] * 60, 70)
    engine.finish()
    figures = simulate(engine.recording, ReplayOrder(step_model=StepModel(base_ms=3.0)))
    steps = engine.of(Step)
    assert figures.preemptions == sum(len(each.decision.preempted) for each in steps) > 3
    assert figures.num_steps == sum(each.decision.num_tokens > 0 for each in steps)
    recorded = max(each.time_us for each in engine.of(Finish)) / 1e6
    assert figures.completion.p99 == pytest.approx(recorded)


def test_figures_are_deterministic_and_depend_on_the_policy() -> None:
    orders = [
        ReplayOrder(load=LOAD, policy=policy, num_blocks=500, step_model=EVEN, rate=3.0)
        for policy in ("fcfs", "priority", "fcfs")
    ]
    first, other, again = [Player().play(each).figures for each in orders]
    assert first == again
    assert other is not None
    assert other.policy == "priority"
    engine = TracedEngine(num_blocks=24, scheduling_policy="priority")
    random_load(3, engine)
    found = [
        simulate(engine.recording, ReplayOrder(policy=policy, step_model=StepModel(base_ms=9.0)))
        for policy in ("fcfs", "priority")
    ]
    assert found[0].completion != found[1].completion
    assert found[0].output_tokens == found[1].output_tokens


def test_turns_of_a_job_follow_the_end_of_the_turn_before() -> None:
    """Three turns of 1 s with 1 s between; here a turn takes 0.1 s."""
    header = TracedEngine().header
    recording = recording_of(header, chat(3))
    closed = simulate(recording, ReplayOrder(step_model=EVEN))
    assert closed.num_jobs == 1
    assert closed.jobs.mean == pytest.approx(2.3)
    opened = simulate(recording, ReplayOrder(step_model=EVEN, open_loop=True))
    assert opened.jobs.mean == pytest.approx(4.1)


def test_one_tenant_disables_fairness() -> None:
    """A flood of one tenant, then one request of another."""
    engine = TracedEngine(max_num_seqs=1)
    for seed in range(6):
        engine.harness.add_one([seed] * 20, 20, tenant=1)
    engine.harness.add_one([99] * 20, 20, tenant=2)
    engine.finish()
    fair = simulate(engine.recording, ReplayOrder(step_model=EVEN))
    alike = simulate(engine.recording, ReplayOrder(step_model=EVEN, one_tenant=True))
    assert fair.ttft != alike.ttft
    assert fair.seconds == pytest.approx(alike.seconds)


def test_a_smaller_pool_has_fewer_hits_and_a_too_small_one_is_refused() -> None:
    figures = [
        Player().play(ReplayOrder(load=LOAD, num_blocks=number, step_model=EVEN)).figures
        for number in (None, 600)
    ]
    assert figures[0].hit_rate > figures[1].hit_rate > 0
    assert figures[0].preemptions == 0
    with pytest.raises(ValueError, match="blocks"):
        Player().play(ReplayOrder(load=LOAD, num_blocks=20, step_model=EVEN))


def test_aborted_requests_end_with_their_recorded_tokens() -> None:
    engine = TracedEngine(max_num_seqs=1)
    first = engine.harness.add_one([1] * 20, 40)
    second = engine.harness.add_one([2] * 20, 40)
    for _ in range(10):
        engine.step()
    engine.harness.scheduler.abort_request(first.request_id)
    engine.harness.scheduler.abort_request(second.request_id)
    engine.finish()
    figures = simulate(engine.recording, ReplayOrder(step_model=EVEN))
    assert figures.output_tokens == 10
    assert figures.num_requests == 2
    assert figures.completion.p50 == pytest.approx(0.030)
    assert figures.completion.p99 == pytest.approx(0.100)


def test_the_trace_of_a_simulation_can_be_followed_and_simulated(tmp_path) -> None:
    path = str(tmp_path / "tape.jsonl")
    player = Player()
    order = ReplayOrder(load=LOAD, num_blocks=600, step_model=EVEN, tape_path=path)
    first = player.play(order).figures
    verdict = player.play(ReplayOrder(path=path, verify=True)).verdict
    assert verdict.difference == ""
    assert verdict.num_steps >= first.num_steps
    again = player.play(ReplayOrder(path=path)).figures
    assert again.num_jobs == first.num_jobs
    assert again.jobs.mean == pytest.approx(first.jobs.mean, rel=1e-3)
    assert again.hit_rate == pytest.approx(first.hit_rate, rel=1e-3)
    assert again.step_model.base_ms == pytest.approx(10.0, rel=1e-3)


def test_the_drawn_load_matches_published_figures() -> None:
    load = AgentLoad(num_jobs=400, seed=1, turns=12)
    recording = Player()._read(ReplayOrder(load=load))
    last: dict[str, Finish] = {}
    gaps, growth = [], []
    for sequence in recording.sequences.values():
        arrival, job = sequence.arrival, sequence.arrival.job
        if job in last:
            gaps.append((arrival.time_us - last[job].time_us) / 1e6)
            before = recording.sequences[last[job].seq_id].arrival.num_prompt_tokens
            growth.append(arrival.num_prompt_tokens - before)
        last[job] = sequence.finish
        total = arrival.num_prompt_tokens + sequence.num_outputs
        assert total <= load.longest
        assert len(recording.chains.blocks(sequence.finish.blocks)) == total // 16
    assert sum(gap < 1 for gap in gaps) / len(gaps) == pytest.approx(0.61, abs=0.03)
    long = [gap for gap in gaps if gap > 60]
    assert len(long) / len(gaps) == pytest.approx(0.04, abs=0.015)
    assert sum(long) / sum(gaps) == pytest.approx(0.85, abs=0.07)
    assert sum(growth) / len(growth) == pytest.approx(400, rel=0.15)
    again = Player()._read(ReplayOrder(load=load))
    assert again.lines == recording.lines


def test_invalid_traces_name_the_line(tmp_path) -> None:
    engine = TracedEngine()
    random_load(0, engine, num_requests=5)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(engine.content[:-30])
    assert len(read(str(path)).lines) == len(engine.lines) - 1
    lines = engine.content.split(b"\n")
    for wrong, words in (
        (lines[1:], "line 1: a trace has one header"),
        ([*lines[:3], b'{"kind":"nonsense"}', *lines[3:]], "line 4"),
        ([*lines[:3], *lines], "line 4: a trace has one header"),
        ([], "nothing"),
    ):
        path.write_bytes(b"\n".join(wrong))
        with pytest.raises(UnreadableTraceError, match=words):
            read(str(path))
    with pytest.raises(UnreadableTraceError, match="No such file"):
        read(str(tmp_path / "none"))


def test_a_trace_without_its_beginning_is_refused() -> None:
    engine = TracedEngine()
    engine.harness.add_one([1] * 40, 2)
    engine.finish()
    engine.harness.add_one([1] * 40, 2)
    engine.finish()
    arrival = engine.of(Arrival)[1]
    header = msgspec.structs.replace(engine.header)
    cut = recording_of(header, [arrival, *engine.lines[engine.lines.index(arrival) + 1 :]])
    with pytest.raises(ValueError, match="what comes before"):
        simulate(cut, ReplayOrder(step_model=EVEN))
