"""Profiles of a worker's steps."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.messages.profiler import ProfileAction, ProfileCall, ProfileReply
from proto.messages.scheduler_output import CachedRequestData, SchedulerOutput
from proto.settings.profiler_config import ProfilerConfig
from tests.fakes.devices import CPU
from worker.profiler import StepProfiler


class Rank:
    """Rank 2, which runs steps of one matrix product."""

    def __init__(self, folder: Path, **config: Any) -> None:
        config = {"profiler": "torch", "torch_profiler_dir": str(folder), **config}
        self.profiler = StepProfiler(ProfilerConfig(**config), 2, 6, CPU.profiler_activities())
        self.number = self.num_steps = 0

    def call(self, action: ProfileAction) -> ProfileReply:
        self.number += 1
        reply = self.profiler.answer(ProfileCall(7, self.number, action))
        assert (reply.epoch, reply.rank, reply.number) == (7, 2, self.number)
        return reply

    def run(self, num_steps: int, num_tokens: int = 5) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            step = SchedulerOutput(
                epoch=7,
                step=self.num_steps,
                new_requests=[],
                cached_requests=CachedRequestData(seq_ids=[1, 2]),
                total_num_scheduled_tokens=num_tokens,
                finished_seq_ids=[],
                preempted_seq_ids=[],
            )
            with self.profiler.step(step):
                torch.ones(3, 4) @ torch.ones(4, 3)


def names(reply: ProfileReply) -> list[str]:
    assert not reply.error
    with gzip.open(reply.path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def steps(reply: ProfileReply) -> list[str]:
    return [name.split(":")[0] for name in names(reply) if name.startswith("step ")]


def test_a_trace_has_the_steps_and_their_operations(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "new")
    rank.run(1)
    assert rank.call("start") == ProfileReply(7, 2, 1)
    rank.run(1)
    rank.run(1, num_tokens=0)
    reply = rank.call("stop")
    found = names(reply)
    assert found.count("aten::mm") == 2, "also that of the step without tokens"
    assert "step 2: 5 tokens of 2 sequences" in found
    assert any(name.endswith(": run") for name in found), "Python functions are there, too"
    assert Path(reply.path).name.startswith("worker-6.")
    assert [each.name for each in (tmp_path / "new").iterdir()] == [Path(reply.path).name]
    rank.run(1)
    assert rank.call("start").error == ""
    assert rank.call("stop") == ProfileReply(7, 2, 4), "no step, no trace"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_iterations": 2}, ["step 1", "step 2"]),
        ({"delay_iterations": 3}, ["step 4", "step 5"]),
        ({"delay_iterations": 3, "max_iterations": 1}, ["step 4"]),
    ],
)
def test_the_recorded_steps_are_limited(
    tmp_path: Path, config: dict[str, int], expected: list[str]
) -> None:
    rank = Rank(tmp_path, torch_profiler_with_stack=False, **config)
    rank.call("start")
    rank.run(5)
    assert steps(rank.call("stop")) == expected


def test_the_recorded_time_is_limited(tmp_path: Path) -> None:
    rank = Rank(tmp_path, max_seconds=-1.0)
    rank.call("start")
    rank.run(2)
    assert rank.call("stop") == ProfileReply(7, 2, 2)


def test_a_profile_can_be_discarded_or_begun_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path, torch_profiler_with_stack=False)
    rank.call("start")
    rank.run(1)
    assert rank.call("discard").error == ""
    assert rank.call("stop").error == "no profile is running"
    rank.call("start")
    rank.run(1)
    rank.call("start")
    rank.run(1)
    assert steps(rank.call("stop")) == ["step 3"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_is_reported_and_harms_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    rank = Rank(tmp_path / "file" / "profiles")
    assert "Not a directory" in rank.call("start").error
    rank.run(1)
    rank = Rank(tmp_path, delay_iterations=1)
    rank.call("start")

    def start(self: object) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    rank.run(3)
    assert rank.call("stop").error == "no counters"
    rank = Rank(tmp_path)
    assert rank.call("start").error == "no counters"


def test_a_profile_that_cannot_be_ended_can_be_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker discards profiles when its engine dies: an exception would end it."""
    rank = Rank(tmp_path, torch_profiler_with_stack=False)
    rank.call("start")
    rank.run(1)
    stop = torch.profiler.profile.stop

    def stop_and_fail(profile: torch.profiler.profile) -> None:
        stop(profile)
        raise RuntimeError("no trace")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "stop", stop_and_fail)
        rank.profiler.discard()
    assert "no trace" in caplog.text
    rank.call("start")
    rank.run(1)
    assert steps(rank.call("stop")) == ["step 2"]
