"""The supervisor over fake processes: who dies is started again, the others are told."""

import os
import re
import signal

import pytest

from tests.fakes.supervised import ROLES, TITLES, Start, assert_nothing_left, others_than

HEARD = {
    "worker": [
        "engine 0: received NewWorkers(worker_epoch=2)",
        "api 0: received Restarted(role='worker', hung=False)",
        "worker 0: life 1, epochs 1 and 2",
    ],
    "engine_core": [
        "worker 0: received NewEngine(epoch=2, worker_epoch=2, died=True)",
        "api 0: received NewEngine(epoch=2, worker_epoch=2, died=True)",
        "api 0: received Restarted(role='engine_core', hung=False)",
        "engine 0: life 1, epochs 2 and 2, front ends (0,)",
    ],
    "api_server": [
        "engine 0: received NewFrontEnd(index=0, incarnation=1)",
        "api 0: life 1, epochs 1 and 1",
    ],
}
"""What the others and the new process are told after a first death."""


@pytest.mark.parametrize(
    ("role", "number"), [*((role, signal.SIGKILL) for role in ROLES), ("worker", signal.SIGSEGV)]
)
def test_who_is_killed_is_started_again_alone(
    start: Start, role: str, number: signal.Signals
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    pid = before[role].pid
    os.kill(pid, number)
    daemon.wait_for(f"{TITLES[role]}: is back after", *HEARD[role])
    line = f"{TITLES[role]}: (pid {pid}) was killed by {number.name}; it is restarted"
    assert line in daemon.text
    after = daemon.children()
    assert after[role].pid != pid
    assert others_than(role, after) == others_than(role, before)
    assert daemon.text.count("is ready:") == 1
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, before | after)


def test_engine_and_worker_that_die_together_meet_again(start: Start) -> None:
    """They are given the same epoch, or one of them hears of the later one."""
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    daemon.process.send_signal(signal.SIGSTOP)
    for role in ("worker", "engine_core"):
        before[role].kill()
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait_for("engine 0: is back", "worker 0: is back", "worker 0: life", "engine 0: life")
    latest = max(re.findall(r"life 1, epochs \d+ and (\d+)", daemon.text))
    for title in ("engine 0", "worker 0"):
        daemon.wait_for_any(
            f"{title}: life 1, epochs {latest} and {latest}",
            f"{title}: life 1, epochs 2 and {latest}",
            f"{title}: life 1, epochs 1 and {latest}",
            f"{title}: received NewWorkers(worker_epoch={latest})",
            f"{title}: received NewEngine(epoch={latest}, worker_epoch={latest}, died=True)",
        )


def test_a_second_death_comes_with_the_next_numbers(start: Start) -> None:
    daemon = start()
    daemon.wait_ready()
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: is back after")
    daemon.children()["api_server"].kill()
    daemon.wait_for("api 0: is back after", "life 1, epochs 2 and 2")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: life 2, epochs 3 and 3, front ends (1,)")


def test_who_raises_is_named_with_its_traceback_and_started_again(start: Start) -> None:
    daemon = start()
    daemon.wait_ready()
    for number, role in enumerate(ROLES, 1):
        os.kill(daemon.children()[role].pid, signal.SIGUSR2)
        daemon.wait_for(f"{TITLES[role]}: is back after")
        cause = "RuntimeError: the core is cracked; it is"
        assert re.search(rf"{TITLES[role]}: \(pid \d+\) failed with {cause}", daemon.text)
        assert daemon.text.count("Traceback") == number
        assert daemon.text.count('raise RuntimeError("the core is cracked")') == number


def test_a_front_end_that_the_engine_gave_up_is_killed_once(
    start: Start,
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    before["api_server"].suspend()
    os.kill(before["engine_core"].pid, signal.SIGIO)
    daemon.wait_for(
        "api 0: is back after", "engine 0: received NewFrontEnd(index=0, incarnation=1)"
    )
    os.kill(before["engine_core"].pid, signal.SIGIO)
    before["engine_core"].kill()
    daemon.wait_for("engine 0: is back after")
    after = daemon.children()
    assert daemon.text.count("api 0: is back after") == 1, "the complaint was of an earlier life"
    assert after["api_server"].pid != before["api_server"].pid
    assert after["worker"].pid == before["worker"].pid


def test_a_worker_that_the_engine_does_not_trust_is_replaced(
    start: Start,
) -> None:
    daemon = start()
    daemon.wait_ready()
    engine = daemon.children()["engine_core"]
    engine.send_signal(signal.SIGALRM)
    daemon.wait_for(
        "worker 0: sent an invalid message and is killed: it babbles",
        "was killed by SIGKILL; it is restarted",
        "worker 0: life 1, epochs 1 and 2",
        "worker 0: is back after",
    )
    engine.send_signal(signal.SIGALRM)  # of the epoch that is over
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert daemon.text.count("is restarted") == 1
    assert "engine 0: life" not in daemon.text


def test_a_worker_that_is_not_trusted_before_the_daemon_is_ready_ends_it(
    start: Start,
) -> None:
    daemon = start("api_server=mute")
    daemon.wait_for("the pool is small")
    daemon.children()["engine_core"].send_signal(signal.SIGALRM)
    assert daemon.wait_exit() == 1
    assert "worker 0: sent an invalid message and is killed: it babbles" in daemon.text
    assert "was killed by SIGKILL while starting" in daemon.text


def test_without_progress_it_is_not_tried_for_ever(start: Start) -> None:
    daemon = start("max_restarts=2")
    daemon.wait_ready()
    pids = {daemon.children()["worker"].pid}
    for life in (1, 2):
        os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
        daemon.wait_for(f"worker 0: life {life}", f"NewWorkers(worker_epoch={life + 1})")
        pids.add(daemon.children()["worker"].pid)
    os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
    assert daemon.wait_exit() == 1
    assert len(pids) == 3
    assert "tokend: 2 restarts have not led to one completed step" in daemon.text
    failed = (
        r"tokend: worker 0 \(pid \d+\) failed with RuntimeError: the core is cracked while serv"
    )
    assert re.search(failed, daemon.text)
    assert daemon.text.count("Traceback") == 3
    assert list(daemon.run_parent.iterdir()) == []


def test_what_the_user_must_mend_is_not_tried_again(start: Start) -> None:
    daemon = start("worker=bad_model_later")
    daemon.wait_ready()
    daemon.children()["worker"].kill()
    assert daemon.wait_exit() == 2
    assert daemon.text.splitlines()[-1] == "tokend: config.json asks for rope type 'moebius'"
