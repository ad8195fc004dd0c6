"""Leftovers after a disturbance (gauges, descriptors, files), and usage figures of processes."""

import os
from pathlib import Path

import pytest

from deploy.bench.processes import SUPERVISOR, IdleState, pids_by_title, run_directory
from proto.runtime.run_directory import RunDirectory
from tests.benchmarks.usage import usage_by_title

BEFORE = IdleState({"running": 0.0}, {"api": 20, "engine": 10}, 6)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (BEFORE, []),
        (IdleState({"running": 0.0}, {"api": 19, "engine": 10}, 6), []),
        (IdleState({"running": 1.0}, {"api": 20, "engine": 10}, 6), ["running was 0 and is 1"]),
        (IdleState({"running": 0.0}, {"api": 21, "engine": 10}, 6), ["api: 21 open descriptors"]),
        (IdleState({"running": 0.0}, {"api": 20}, 6), ["engine: gone"]),
        (IdleState({"running": 0.0}, BEFORE.descriptors | {"worker": 1}, 6), ["worker: new"]),
        (IdleState({"running": 0.0}, BEFORE.descriptors, 7), ["7 files in the run directory"]),
    ],
)
def test_leftovers_are_reported(after: IdleState, found: list[str]) -> None:
    left = BEFORE.find_leftovers(after)
    assert len(left) == len(found)
    assert all(part in line for part, line in zip(found, left, strict=True))


def test_memory_and_open_descriptors_of_a_process() -> None:
    (usage,) = usage_by_title(os.getpid()).values()
    assert usage.pid == pids_by_title(os.getpid())[SUPERVISOR] == os.getpid()
    assert usage.resident_mib > 1
    read, write = os.pipe()
    try:
        assert usage_by_title(os.getpid())[SUPERVISOR].descriptors == usage.descriptors + 2
    finally:
        os.close(read)
        os.close(write)


def test_the_run_directory_of_a_process_is_found_by_its_lock(tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path))
    try:
        assert str(run_directory(os.getpid())) == directory.path
    finally:
        directory.leave()
