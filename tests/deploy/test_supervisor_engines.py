"""The supervisor over the fake processes of two engines, which die and come back by themselves."""

import re
import signal

import psutil
import pytest

from tests.fakes.supervised import Start

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
    daemon.wait_for("api 0: received HealthStatus(reasons=())")
    assert not_notified not in daemon.text
    after = daemon.titled(*TITLES)
    assert changed(before, after) == {killed}


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


def test_several_engines_are_not_reloaded(start: Start) -> None:
    daemon = start("data_parallel_size=2")
    daemon.wait_ready()
    before = daemon.titled(*TITLES)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("the daemon has several engines (--data-parallel-size), which are not reloaded")
    assert changed(before, daemon.titled(*TITLES)) == set()
    assert "NextEngine" not in daemon.text


def changed(before: dict[str, psutil.Process], after: dict[str, psutil.Process]) -> set[str]:
    """Return the titles of processes that were replaced."""
    return {title for title in TITLES if before[title].pid != after[title].pid}
