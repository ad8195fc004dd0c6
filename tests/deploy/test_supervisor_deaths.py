"""The supervisor over fake processes: dead processes are restarted, the others are notified."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from proto.runtime.run_directory import pixels_folder
from tests.fakes.supervised import (
    ROLES,
    TITLES,
    Start,
    assert_nothing_left,
    eventually,
    pids_except,
)

NOTIFIED = {
    "worker": [
        "engine 0: received NewWorkers(worker_epoch=2)",
        "api 0: received Restarted(role='worker', hung=False, engine=0)",
        "worker 0: incarnation 1, epochs 1 and 2",
    ],
    "engine_core": [
        "worker 0: received NewEngine(epoch=2, worker_epoch=2, died=True, engine=0)",
        "api 0: received NewEngine(epoch=2, worker_epoch=2, died=True, engine=0)",
        "api 0: received Restarted(role='engine_core', hung=False, engine=0)",
        "engine 0: incarnation 1, epochs 2 and 2, front ends (0,)",
    ],
    "api_server": [
        "engine 0: received NewFrontEnd(index=0, incarnation=1)",
        "api 0: incarnation 1, epochs 1 and 1",
    ],
}
"""Notices of the other processes and of the new one after a first death, by role."""


@pytest.mark.parametrize(
    ("role", "number"), [*((role, signal.SIGKILL) for role in ROLES), ("worker", signal.SIGSEGV)]
)
def test_a_killed_process_alone_is_restarted(
    start: Start, role: str, number: signal.Signals
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    pid = before[role].pid
    os.kill(pid, number)
    daemon.wait_for(f"{TITLES[role]} is back after", *NOTIFIED[role])
    line = f"{TITLES[role]} (pid {pid}) was killed by {number.name}; it is restarted"
    assert line in daemon.text
    after = daemon.children()
    assert after[role].pid != pid
    assert pids_except(role, after) == pids_except(role, before)
    assert daemon.text.count("is ready:") == 1
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, before | after)


def test_pixels_of_a_front_end_are_removed_when_it_dies(start: Start) -> None:
    """Those of others stay; at the end of the daemon the folder is removed."""
    daemon = start()
    daemon.wait_ready()
    (run_dir,) = daemon.run_parent.iterdir()
    folder = Path(pixels_folder(str(run_dir)))
    folder.mkdir(0o700)
    for name in ("0.0.1", "0.0.22", "1.0.1", "00.0.1"):
        (folder / name).touch()
    daemon.children()["worker"].kill()
    daemon.wait_for("worker 0 is back after")
    assert len(list(folder.iterdir())) == 4
    daemon.children()["api_server"].kill()
    daemon.wait_for("api 0 is back after")
    assert {path.name for path in folder.iterdir()} == {"1.0.1", "00.0.1"}
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert eventually(lambda: not folder.exists())


def test_engine_and_worker_that_die_together_reconnect(start: Start) -> None:
    """Both boot with the same epoch, or one is notified of the later epoch."""
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    daemon.process.send_signal(signal.SIGSTOP)
    for role in ("worker", "engine_core"):
        before[role].kill()
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait_for(
        "engine 0 is back", "worker 0 is back", "worker 0: incarnation", "engine 0: incarnation"
    )
    latest = max(map(int, re.findall(r"incarnation 1, epochs \d+ and (\d+)", daemon.text)))
    for title in ("engine 0", "worker 0"):
        daemon.wait_for_any(
            f"{title}: incarnation 1, epochs {latest} and {latest}",
            f"{title}: incarnation 1, epochs 2 and {latest}",
            f"{title}: incarnation 1, epochs 1 and {latest}",
            f"{title}: received NewWorkers(worker_epoch={latest})",
            f"{title}: received NewEngine(epoch={latest}, worker_epoch={latest}, died=True",
        )


def test_a_second_death_gets_the_next_epoch_and_incarnation(start: Start) -> None:
    daemon = start()
    daemon.wait_ready()
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0 is back after")
    daemon.children()["api_server"].kill()
    daemon.wait_for("api 0 is back after", "incarnation 1, epochs 2 and 2")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: incarnation 2, epochs 3 and 3, front ends (1,)")


def test_a_process_that_raises_is_restarted_and_its_traceback_is_printed(start: Start) -> None:
    daemon = start()
    daemon.wait_ready()
    for number, role in enumerate(ROLES, 1):
        os.kill(daemon.children()[role].pid, signal.SIGUSR2)
        daemon.wait_for(f"{TITLES[role]} is back after")
        cause = "RuntimeError: an error on purpose; it is"
        assert re.search(rf"{TITLES[role]} \(pid \d+\) failed with {cause}", daemon.text)
        assert daemon.text.count("Traceback") == number
        assert daemon.text.count('raise RuntimeError("an error on purpose")') == number


@pytest.mark.parametrize("num_free", [0, 1, 3, 6, 10])
def test_a_process_is_started_when_there_are_descriptors_again(start: Start, num_free: int) -> None:
    refusal = "engine 0 cannot be started: Too many open files; it is tried again in"
    daemon = start()
    daemon.wait_ready()
    before, supervisor = daemon.children(), psutil.Process(daemon.process.pid)
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds() + num_free, limits[1]))
    before["engine_core"].kill()
    daemon.wait_for_any(refusal, "engine 0 is back after")
    supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    daemon.wait_for("engine 0 is back after")
    assert pids_except("engine_core", daemon.children()) == pids_except("engine_core", before)
    assert num_free or refusal in daemon.text


def test_a_stalled_front_end_is_killed_once(
    start: Start,
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    before["api_server"].suspend()
    os.kill(before["engine_core"].pid, signal.SIGIO)
    daemon.wait_for("api 0 is back after", "engine 0: received NewFrontEnd(index=0, incarnation=1)")
    os.kill(before["engine_core"].pid, signal.SIGIO)
    before["engine_core"].kill()
    daemon.wait_for("engine 0 is back after")
    after = daemon.children()
    assert daemon.text.count("api 0 is back after") == 1, (
        "the second report was of the previous incarnation"
    )
    assert after["api_server"].pid != before["api_server"].pid
    assert after["worker"].pid == before["worker"].pid


def test_a_worker_that_sends_an_invalid_message_is_replaced(
    start: Start,
) -> None:
    daemon = start()
    daemon.wait_ready()
    engine = daemon.children()["engine_core"]
    engine.send_signal(signal.SIGALRM)
    daemon.wait_for(
        "worker 0 sent an invalid message and is killed: it sends garbage",
        "was killed by SIGKILL; it is restarted",
        "worker 0: incarnation 1, epochs 1 and 2",
        "worker 0 is back after",
    )
    engine.send_signal(signal.SIGALRM)  # reports the previous epoch
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert daemon.text.count("is restarted") == 1
    assert "engine 0: incarnation" not in daemon.text


def test_an_invalid_message_of_a_worker_before_ready_ends_the_daemon(
    start: Start,
) -> None:
    daemon = start("api_server=mute")
    daemon.wait_for("the pool is small")
    daemon.children()["engine_core"].send_signal(signal.SIGALRM)
    assert daemon.wait_exit() == 1
    assert "worker 0 sent an invalid message and is killed: it sends garbage" in daemon.text
    assert "was killed by SIGKILL while starting" in daemon.text


def test_restarts_without_progress_end_the_daemon(start: Start) -> None:
    daemon = start("max_restarts=2")
    daemon.wait_ready()
    pids = {daemon.children()["worker"].pid}
    for number in (1, 2):
        os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
        daemon.wait_for(f"worker 0: incarnation {number}", f"NewWorkers(worker_epoch={number + 1})")
        pids.add(daemon.children()["worker"].pid)
    os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
    assert daemon.wait_exit() == 1
    assert len(pids) == 3
    assert "tokend: 2 restarts have not led to one completed step" in daemon.text
    failed = (
        r"tokend: worker 0 \(pid \d+\) failed with RuntimeError: an error on purpose while serv"
    )
    assert re.search(failed, daemon.text)
    assert daemon.text.count("Traceback") == 3
    assert list(daemon.run_parent.iterdir()) == []


def test_an_error_for_the_user_to_fix_is_not_retried(start: Start) -> None:
    daemon = start("worker=bad_model_later")
    daemon.wait_ready()
    daemon.children()["worker"].kill()
    assert daemon.wait_exit() == 2
    last = daemon.text.splitlines()[-1]
    assert last.endswith(" ERROR tokend: config.json asks for rope type 'moebius'")
