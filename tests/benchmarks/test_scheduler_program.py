"""The program of the scheduler benchmark: workloads and counted steps."""

import json
import subprocess
import sys

import msgspec
import pytest

from engine_core.kv_cache.integrity import check
from proto.codec import from_json, to_json_line
from tests.benchmarks.messages import RequestRecipe, SchedulerTimings, SchedulerWorkload
from tests.benchmarks.scheduler import MAX_MODEL_LEN, all_workloads, select
from tests.benchmarks.scheduler_program import BenchEngine, Samples, StepPlayer, play, prompt_of


def tiny(**changes):
    settings = {
        "name": "tiny",
        "requests": (RequestRecipe(((1, 20),), 4), RequestRecipe(((2, 40),), 8)),
        "concurrency": 3,
        "warm_up_steps": 5,
        "measured_steps": 20,
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SchedulerWorkload(**(settings | changes))


def test_a_workload_gives_timings_and_bytes() -> None:
    timings = play(tiny())
    assert timings.workload == "tiny"
    assert timings.num_steps == 20
    assert timings.num_preempted == 0
    assert 0 < timings.num_scheduled <= 3
    for each in (timings.schedule, timings.update, timings.encode, timings.decode):
        assert 0 < each.median <= each.p99
    assert timings.wire_bytes.median > 20
    assert timings.hash is None


def test_hashing_runs_no_steps() -> None:
    timings = play(tiny(measure="hashing"))
    assert timings.num_steps == 20
    assert timings.hash.median > 0
    assert timings.schedule is None


def test_measure_preempting_counts_only_steps_that_preempt() -> None:
    crowded = tiny(
        requests=tuple(RequestRecipe(((seed, 8),), 60) for seed in range(4)),
        concurrency=4,
        num_blocks=8,
        measured_steps=200,
        measure="preempting steps",
    )
    timings = play(crowded)
    assert 0 < timings.num_steps < 200
    assert timings.num_preempted >= 1


def test_requests_replace_finished_ones_and_blocks_add_up() -> None:
    player = StepPlayer(tiny())
    samples = Samples()
    for _ in range(200):
        player.step(samples)
    core = player._engine.core
    assert core.scheduler.num_unfinished <= 3
    assert samples.num_scheduled.count(3) > 100
    assert check(core.kv_cache) == []


def test_segments_of_a_seed_share_a_prefix() -> None:
    long, short = prompt_of(RequestRecipe(((7, 50),), 1)), prompt_of(RequestRecipe(((7, 20),), 1))
    assert long[:20] == short
    assert prompt_of(RequestRecipe(((7, 20), (8, 5)), 1))[:20] == short
    assert prompt_of(RequestRecipe(((8, 20),), 1)) != short


def test_the_engine_has_the_daemons_defaults() -> None:
    assert BenchEngine(select(["decode256"])[0]).core.kv_cache.enable_caching


@pytest.mark.parametrize(
    "name", ["decode1024", "mixed", "preempt", "tenants", "waiting100", "blocks10000"]
)
def test_all_workloads_run(name: str) -> None:
    (workload,) = select([name])
    short = msgspec.structs.replace(
        workload, warm_up_steps=0, measured_steps=3, measure="every step"
    )
    timings = play(short)
    assert timings.num_steps == 3
    assert timings.num_scheduled > 0


def test_no_request_is_too_long() -> None:
    for workload in all_workloads():
        for recipe in workload.requests:
            length = sum(number for _, number in recipe.segments)
            assert length + recipe.max_tokens <= MAX_MODEL_LEN


def test_the_program_answers_a_line_with_a_line() -> None:
    lines = to_json_line(tiny()) + to_json_line(tiny(name="hash", measure="hashing"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.scheduler_program"],
        input=lines,
        capture_output=True,
        check=True,
    )
    first, second = (from_json(each, SchedulerTimings) for each in done.stdout.splitlines())
    assert (first.workload, second.workload) == ("tiny", "hash")
    assert json.loads(done.stdout.splitlines()[0])["num_steps"] == 20
