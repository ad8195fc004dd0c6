"""POST /start_profile and /stop_profile of a real daemon."""

import gzip
import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon, eventually
from tests.e2e.test_surroundings import completes
from tests.fakes.lifecycle_messages import profiler_config

pytestmark = pytest.mark.suite("settings")


def test_profiles_of_all_processes(tmp_path: Path) -> None:
    """Of workers, engine and front ends; the death of a worker ends one, and harms nothing."""
    flags = ("--profiler-config", profiler_config(tmp_path / "profiles"))
    with Daemon(*flags, "--api-server-count", "2") as daemon:

        def call(name: str) -> httpx.Response:
            return httpx.post(f"{daemon.url}/{name}", timeout=60)

        assert call("start_profile").json() == {"status": "profiling"}
        assert completes(daemon.url)
        assert call("start_profile").status_code == 409
        files = [Path(each) for each in call("stop_profile").json()["files"]]
        stacks, _, trace = files
        assert "BusyLoop.run_until_shutdown" in stacks.read_text()
        with gzip.open(trace) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert any(name.startswith("step 1: ") for name in names)
        assert any(name.startswith("aten::") for name in names)
        assert any("worker/cpu/attention" in name for name in names)
        own = [f"api-{index}.*.stacks.txt" for index in range(2)]
        assert eventually(lambda: all(any(stacks.parent.glob(name)) for name in own))

        assert call("start_profile").is_success
        worker = daemon.processes()["worker"]
        worker.send_signal(signal.SIGKILL)
        worker.wait(10)
        assert completes(daemon.url)
        lost = call("stop_profile")
        assert lost.status_code == 500
        assert "their traces are lost" in lost.json()["error"]["message"]
        assert call("start_profile").is_success
        assert completes(daemon.url)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_exit() == 0, "also while a profile is running"


def test_a_folder_that_cannot_be_written_prevents_the_start() -> None:
    daemon = Daemon("--profiler-config", profiler_config("/proc/nowhere"))
    assert daemon.wait_exit(60) == 2
    (line,) = [each for each in daemon.output if each.startswith("tokend: ")]
    assert "torch_profiler_dir /proc/nowhere" in line
