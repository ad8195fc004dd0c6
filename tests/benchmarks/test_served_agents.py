"""The benchmark `served_agents`: the grid, its table and its data; sessions against a daemon."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.bench.servers import MeasuredDaemon
from proto.errors import TokendError
from tests.benchmarks.agent_jobs.grid import AgentGrid, GridCell, SeedBaseline, SeedGrid
from tests.benchmarks.agent_jobs.load import AgentJob, AgentLoad, JobTurn
from tests.benchmarks.agent_jobs.sessions import AgentPace, run_agents
from tests.benchmarks.null_daemon import NULL_DAEMON
from tests.benchmarks.served_agents import main, table, verdicts


def cell(
    variant: str, pool: int, rate: int, seconds: float, ratio: float, seed: int = 0
) -> GridCell:
    return GridCell(
        seed=seed,
        variant=variant,
        pool_percent=pool,
        rate_percent=rate,
        num_blocks=100,
        jobs_per_s=1.0,
        job_s_mean=seconds,
        job_s_p50=seconds,
        job_s_p99=seconds,
        ttft_s_mean=0.1,
        found_percent=50.0,
        preemptions=0,
        pins_taken=1,
        pins_hit=1,
        pins_expired=0,
        pins_unpinned=0,
        ratio_mean=ratio,
        ratio_p99=ratio,
    )


def test_verdicts_use_the_worst_seed() -> None:
    cells = [
        cell("fcfs", 50, 90, 30.0, 1.0),
        cell("rule", 50, 90, 15.0, 2.0),
        cell("rule", 50, 90, 21.0, 1.43, seed=1),
        cell("rule", 100, 70, 9.9, 1.01),
        cell("rule", 100, 90, 10.4, 1 / 1.04),
        cell("rule", 25, 90, 10.0, 3.0),
    ]
    assert list(verdicts(cells)) == [
        "50 % pool, 90 % arrivals: 1.43 times as fast as fcfs or better; 1.5 times: MISSED",
        "100 % pool, 70 % arrivals: -1.0 % at worst relative to fcfs; at most +2 %: met",
        "100 % pool, 90 % arrivals: +4.0 % at worst relative to fcfs; at most +2 %: MISSED",
    ]
    assert table(cells).row_count == 5


def test_runs_with_failed_jobs_are_not_compared() -> None:
    cells = [cell("fcfs", 50, 90, 30.0, 1.0), cell("rule", 50, 90, 15.0, 2.0)]
    assert list(verdicts([cells[0], replace(cells[1], num_failed=20)])) == [
        "50 % pool, 90 % arrivals: 20 jobs failed, not compared"
    ]


def test_the_pool_holds_the_longest_job() -> None:
    grid = AgentGrid(
        num_jobs=3,
        seeds=[0],
        variants=["fcfs"],
        pools=[100, 10],
        rates=[90],
        turns=2.0,
        tool_scale=0.01,
        serve_flags=[],
    )
    measured = SeedBaseline(
        seed=0,
        capacity_jobs_per_s=1.0,
        working_set_blocks=300,
        working_set_mean_blocks=200.0,
        unpressed_job_s_mean=1.0,
        num_requests=6,
        prompt_tokens=6000,
        output_tokens=100,
    )
    with pytest.raises(TokendError, match="--pools: 10 % of the working set is 31 blocks"):
        next(SeedGrid(grid, 0).measure_cells(measured))


def test_a_daemon_gets_the_drawn_jobs() -> None:
    turns = [JobTurn(20, 5, "shell", 0.5), JobTurn(30, 4, "shell", 0.2), JobTurn(8, 3)]
    jobs = [AgentJob(0.1 * each, each % 2, turns) for each in range(5)]
    shape = AgentLoad(num_jobs=5, system_tokens=64)
    with MeasuredDaemon([], NULL_DAEMON) as daemon:
        pace = AgentPace(rate=2.0, concurrency=5, tool_scale=0.1)
        done = asyncio.run(run_agents(daemon.url, jobs, shape, pace))
        prompt_tokens = daemon.metric("vllm:prompt_tokens_total")
        output_tokens = daemon.metric("vllm:generation_tokens_total")
    assert (done.num_requests, done.num_failed, len(done.job_seconds)) == (15, 0, 5)
    assert done.prompt_tokens == prompt_tokens == 5 * (84 + 119 + 131)
    assert done.output_tokens == output_tokens == 5 * 12
    assert done.cached_tokens > 0
    assert all(each >= 0.07 for each in done.job_seconds)
    assert done.seconds >= 0.2 + 0.07
    most = 2 * (64 // 16) + 5 * (134 // 16 - 64 // 16)
    assert 64 // 16 < done.live_blocks_mean < done.live_blocks_peak <= most


def test_concurrent_jobs_are_limited() -> None:
    turns = [JobTurn(20, 5, "shell", 9.0), JobTurn(30, 4)]
    jobs = [AgentJob(1000.0 * each, 0, turns) for each in range(4)]
    shape = AgentLoad(num_jobs=4, system_tokens=64)
    with MeasuredDaemon([], NULL_DAEMON) as daemon:
        pace = AgentPace(rate=float("inf"), concurrency=1, tool_scale=0.0)
        done = asyncio.run(run_agents(daemon.url, jobs, shape, pace))
    assert len(done.job_seconds) == 4
    assert done.live_blocks_peak == (64 + 20 + 5 + 30 + 4) // 16
    assert done.seconds == pytest.approx(sum(done.job_seconds), abs=0.5)


@pytest.mark.suite("settings")
def test_a_grid_with_a_model(tmp_path: Path, capsys) -> None:
    words = ["--jobs", "3", "--turns", "2", "--tool-scale", "0.01"]
    file = tmp_path / "found.json"
    words += ["--policies", "fcfs,rule+host", "--pools", "300", "--json", str(file)]
    main(words)
    found = json.loads(file.read_text())
    (measured,) = found["measured"]
    assert measured["capacity_jobs_per_s"] > 0
    for each, name in zip(found["cells"], ("fcfs", "rule+host"), strict=True):
        assert (each["variant"], each["num_failed"]) == (name, 0)
        assert each["num_blocks"] == measured["working_set_blocks"] * 3 + 1
        assert each["jobs_per_s"] == pytest.approx(0.9 * measured["capacity_jobs_per_s"])
        assert each["ttft_s_mean"] > 0
        assert each["job_s_p99"] >= each["job_s_mean"] > 0
    plain, rule = found["cells"]
    assert plain["pins_taken"] == 0
    assert rule["pins_taken"] == measured["num_requests"] - 3
    shown, said = capsys.readouterr()
    assert "300 %" in shown
    assert "capacity, jobs/s" in shown
    lines = said.splitlines()
    assert f"seed 0: capacity {measured['capacity_jobs_per_s']:.3f} jobs/s" in lines[0]
    for line, each in zip(lines[1:3], found["cells"], strict=True):
        start = f"seed 0, pool 300 %, arrivals 90 %, {each['variant']}: mean "
        assert line.startswith(f"{start}{each['job_s_mean']:.1f} s, p99 ")
