"""The supervisor over the fake processes of two engines, which die and come back by themselves."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.fakes.supervised import FakeDaemon, Start, eventually

TITLES = ("worker 0", "worker 1", "engine 0", "engine 1", "api 0")


def test_a_daemon_is_ready_when_all_engines_are(start: Start) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    assert "  engines   2; of each:\n" in daemon.text
    ready = daemon.text.index("tokend is ready")
    for engine in ("engine 0", "engine 1"):
        assert daemon.text.index(f"{engine}: the pool is small") < ready
    daemon.titled(*TITLES)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text


@pytest.mark.parametrize(
    ("killed", "notified", "not_notified"),
    [
        (
            "engine 1",
            [
                "worker 1: received NewEngine(epoch=3, worker_epoch=3, died=True, engine=1)",
                "api 0: received NewEngine(epoch=3, worker_epoch=3, died=True, engine=1)",
                "api 0: received Restarted(role='engine_core', hung=False, engine=1)",
                "NotReady(what='engine 1 is being restarted', since=",
                "engine 1: incarnation 1, epochs 3 and 3, front ends (0,)",
            ],
            "worker 0: received",
        ),
        (
            "worker 1",
            [
                "engine 1: received NewWorkers(worker_epoch=3)",
                "api 0: received Restarted(role='worker', hung=False, engine=1)",
                "worker 1: incarnation 1, epochs 2 and 3",
            ],
            "engine 0: received",
        ),
    ],
)
def test_a_death_concerns_one_engine(
    start: Start, killed: str, notified: list[str], not_notified: str
) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    before[killed].kill()
    daemon.wait_for(f"{killed} is back after", *notified)
    daemon.wait_for("api 0: received HealthStatus(reasons=(), ")
    assert not_notified not in daemon.text
    after = daemon.titled(*TITLES)
    assert changed(before, after) == {killed}


def weights_inode(process: psutil.Process) -> int:
    """Return what identifies the file for packed weights that a process has inherited."""
    (found,) = (
        os.stat(link).st_ino
        for link in Path(f"/proc/{process.pid}/fd").iterdir()
        if os.readlink(link).startswith("/memfd:tokend-weights")
    )
    return found


def test_workers_of_all_engines_have_one_file_for_packed_weights(start: Start) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    workers = ("worker 0", "worker 1")
    before = daemon.titled(*TITLES)
    (inode,) = {weights_inode(before[title]) for title in workers}
    for title in workers:
        before[title].kill()
    daemon.wait_for("worker 0 is back after", "worker 1 is back after")
    after = daemon.titled(*TITLES)
    assert changed(before, after) == set(workers)
    assert {weights_inode(after[title]) for title in workers} == {inode}


def test_a_front_end_knows_the_epoch_of_each_engine(start: Start) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    before["engine 0"].kill()
    daemon.wait_for("engine 0 is back after")
    before["api 0"].kill()
    daemon.wait_for(
        "engine 0: received NewFrontEnd(index=0, incarnation=1)",
        "engine 1: received NewFrontEnd(index=0, incarnation=1)",
        "api 0: incarnation 1, epochs 3 and 3",
        "api 0: engines (3, 2)",
    )


def test_a_hung_worker_is_found_by_the_report_of_its_engine(start: Start) -> None:
    daemon = start("data_parallel_size=2", "step_timeout=0.5")
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    before["worker 1"].suspend()
    before["engine 1"].send_signal(signal.SIGHUP)
    daemon.wait_for("worker 1 is back after", "worker 1: incarnation 1, epochs 2 and 3")
    pid = before["worker 1"].pid
    assert f"worker 1 (pid {pid}) hangs, no completed step for" in daemon.text
    reasons = re.findall(r"NotReady\(what='worker 1 [^)]*engine=(\d)", daemon.text)
    assert set(reasons) == {"1"}
    assert changed(before, daemon.titled(*TITLES)) == {"worker 1"}


def test_an_invalid_message_restarts_the_workers_of_one_engine(start: Start) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    before["engine 1"].send_signal(signal.SIGALRM)
    daemon.wait_for(
        "worker 1 sent an invalid message and is killed: it sends garbage",
        "worker 1 is back after",
    )
    assert changed(before, daemon.titled(*TITLES)) == {"worker 1"}


def test_an_engine_that_cannot_start_does_not_end_another_one(start: Start) -> None:
    daemon = start("data_parallel_size=2", "engine_core=bad_model_of_1")
    daemon.wait_ready()
    daemon.titled(*TITLES)["engine 1"].kill()
    daemon.wait_for(
        "it is restarted in 600 s", "NotReady(what='engine 1 rests before its next restart'"
    )
    remaining = daemon.titled(*(title for title in TITLES if title != "engine 1"))
    remaining["engine 0"].kill()
    daemon.wait_for("engine 0 is back after")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text


# ---- Reload ----

DONE = "tokend reloaded after"
FAILED = (
    "tokend: the reload failed, 1 of 2 engines is new: engine 1: config.json asks for rope type"
)


def reload(start: Start, *choices: str) -> tuple[FakeDaemon, dict[str, psutil.Process]]:
    """Request a reload of two engines; return the daemon and its processes before."""
    daemon = start("data_parallel_size=2", *choices)
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    daemon.process.send_signal(signal.SIGHUP)
    return daemon, before


def settled(daemon: FakeDaemon, number: int = len(TITLES)) -> dict[str, psutil.Process]:
    """Return the processes by title, when the old ones have ended. number: of processes."""
    assert eventually(lambda: len(psutil.Process(daemon.process.pid).children()) == number)
    assert "it is restarted\n" not in daemon.text
    return daemon.titled(*TITLES)


def in_order(text: str, *parts: str) -> bool:
    positions = [text.index(each) for each in parts]
    return positions == sorted(positions)


@pytest.mark.parametrize("strategy", ["side-by-side", "in-place"])
def test_engines_are_reloaded_one_after_the_other(start: Start, strategy: str) -> None:
    daemon, before = reload(start, f"reload_strategy={strategy}")
    daemon.wait_for(DONE)
    after = settled(daemon)
    assert changed(before, after) == set(TITLES) - {"api 0"}
    switches = re.findall(r"SwitchEngine\(epoch=(\d+), engine=(\d), epochs=\(\)\)", daemon.text)
    taken_away = re.findall(r"NewEngine\(epoch=(\d+), .*died=False, engine=(\d)", daemon.text)
    if strategy == "side-by-side":
        assert (switches, taken_away) == ([("3", "0"), ("4", "1")], [])
    else:
        assert (switches, taken_away) == ([("4", "0"), ("6", "1")], [("3", "0"), ("5", "1")])
    after["engine 1"].kill()
    daemon.wait_for("engine 1 is back after")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text


def test_the_next_engine_waits_for_requests_of_the_last_one(start: Start) -> None:
    daemon, before = reload(start, "api_server=busy")
    daemon.wait_for("api 0: received SwitchEngine(epoch=3, engine=0, epochs=())")
    assert before["engine 0"].is_running()
    assert "SwitchEngine(epoch=4" not in daemon.text
    before["api 0"].send_signal(signal.SIGUSR2)
    daemon.wait_for("api 0: received SwitchEngine(epoch=4, engine=1, epochs=())", DONE)
    assert changed(before, settled(daemon)) == set(TITLES) - {"api 0"}


def test_a_later_engine_that_cannot_start_is_named(start: Start) -> None:
    daemon, before = reload(start, "engine_core=bad_model_of_1")
    daemon.wait_for(FAILED)
    assert changed(before, settled(daemon)) == {"engine 0", "worker 0"}


def test_a_changed_model_is_switched_to_at_once(start: Start) -> None:
    daemon, before = reload(start, "model=changed")
    daemon.wait_for(DONE, "api 0: received SwitchEngine(epoch=3, engine=0, epochs=(3, 4))")
    assert changed(before, settled(daemon)) == set(TITLES) - {"api 0"}
    assert in_order(daemon.text, "epochs=(3, 4)", "engine 1: incarnation 1, epochs 4 and 4", DONE)
    assert "NotReady(what='engine 1 is being reloaded', since=" in daemon.text
    assert "received Restarted" not in daemon.text
    daemon.wait_for("api 0: received HealthStatus(reasons=(), ")


def test_a_later_engine_that_cannot_load_a_changed_model_rests(start: Start) -> None:
    """A later reload does not wait for it, and begins with it."""
    daemon, before = reload(start, "model=changed", "engine_core=bad_model_of_1")
    daemon.wait_for(FAILED, "NotReady(what='engine 1 rests before its next restart'")
    remaining = [title for title in TITLES if title != "engine 1"]
    assert changed(before, daemon.titled(*remaining)) == {"engine 0", "worker 0", "worker 1"}
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("tokend: the reload failed, nothing has changed: engine 1: config.json asks")


def test_an_old_engine_that_dies_is_followed_by_the_new_model(start: Start) -> None:
    daemon, before = reload(start, "model=changed", "api_server=busy")
    daemon.wait_for(DONE)
    before["engine 0"].kill()
    daemon.wait_for("api 0: received DropEngine(epoch=1)")
    assert changed(before, settled(daemon)) == set(TITLES) - {"api 0"}


def changed(before: dict[str, psutil.Process], after: dict[str, psutil.Process]) -> set[str]:
    """Return the titles of processes that were replaced."""
    return {title for title in after if before[title].pid != after[title].pid}
