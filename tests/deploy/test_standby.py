"""Standby processes: the supervisor over fake processes, and when one is started."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from deploy.supervisor.processes import StartError
from deploy.supervisor.standby import StandbyProcesses
from proto.messages.lifecycle import EngineAlive, ProcessBoot, Role
from proto.settings.config import ReliabilityConfig
from tests.deploy.test_recovery import Case
from tests.deploy.test_supervisor_deaths import NOTIFIED
from tests.fakes.notices import Notices
from tests.fakes.supervised import (
    TITLES,
    FakeDaemon,
    Start,
    assert_nothing_left,
    eventually,
    pids_except,
)

BOTH = ("standby_engines=1", "standby_workers=1", "step_timeout=2")
"""With this time-out an engine is asked every quarter of a second whether it has caught up."""
BOTH_READY = "standby_engines=1, standby_workers=1"


def standby_pid(daemon: FakeDaemon, role: str) -> int:
    """Return the id of the only standby process of a role; wait until there is one."""
    found: list[int] = []

    def look() -> bool:
        found.clear()
        for child in psutil.Process(daemon.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(child.cmdline()).strip() == f"tokend: standby {TITLES[role]}":
                    found.append(child.pid)
        return len(found) == 1

    assert eventually(look), daemon.text
    return found[0]


def num_ready(daemon: FakeDaemon, text: str = BOTH_READY) -> int:
    """Return how often the front end has received these numbers."""
    return daemon.text.count(f"api 0: received HealthStatus(reasons=(), {text})")


def wait_both(daemon: FakeDaemon, times: int = 1) -> None:
    """Wait until both standby processes have become ready for the n-th time."""
    assert eventually(lambda: num_ready(daemon) >= times), daemon.text


def stop(daemon: FakeDaemon) -> None:
    children = {str(each.pid): each for each in psutil.Process(daemon.process.pid).children()}
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


@pytest.mark.parametrize("role", ["worker", "engine_core"])
def test_a_standby_process_takes_the_place_of_a_dead_one(begin: Start, role: str) -> None:
    """The others get the same messages as for a new process, and another one stands by."""
    daemon = begin(*BOTH)
    before = daemon.children()
    wait_both(daemon)
    pid = standby_pid(daemon, role)
    before[role].kill()
    daemon.wait_for(f"{TITLES[role]} is back after", *NOTIFIED[role])
    assert f"{TITLES[role]} (pid {pid}) was on standby and takes the place" in daemon.text
    after = daemon.children()
    assert after[role].pid == pid
    assert pids_except(role, after) == pids_except(role, before)
    assert "Traceback" not in daemon.text
    wait_both(daemon, 2)
    assert standby_pid(daemon, role) != pid
    stop(daemon)


def test_two_deaths_in_a_row(begin: Start) -> None:
    """The second is cold if nothing is ready yet; no standby process gets two places."""
    daemon = begin(*BOTH)
    wait_both(daemon)
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: incarnation 1, epochs 2 and 2")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: incarnation 2, epochs 3 and 3")
    assert eventually(lambda: daemon.text.count("engine 0 is back after") == 2)
    wait_both(daemon, 2)
    stop(daemon)


def test_a_standby_process_that_dies_with_the_engine_gets_no_place(begin: Start) -> None:
    daemon = begin(*BOTH)
    wait_both(daemon)
    engine, standby = daemon.children()["engine_core"], standby_pid(daemon, "engine_core")
    daemon.process.send_signal(signal.SIGSTOP)
    engine.kill()
    os.kill(standby, signal.SIGKILL)
    assert eventually(lambda: psutil.Process(standby).status() == psutil.STATUS_ZOMBIE)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait_for("engine 0: incarnation 1, epochs 2 and 2", "engine 0 is back after")
    assert "was on standby" not in daemon.text
    stop(daemon)


def test_the_death_of_a_standby_process_concerns_only_itself(begin: Start) -> None:
    """It is in no budget of restarts; the next ones wait longer."""
    daemon = begin(*BOTH, "max_restarts=1")
    before = daemon.children()
    for times, delay in enumerate(("1 s", "2 s"), 1):
        wait_both(daemon, times)
        pid = standby_pid(daemon, "engine_core")
        os.kill(pid, signal.SIGKILL)
        line = f"standby engine 0 (pid {pid}) was killed by SIGKILL; another is started in {delay}"
        daemon.wait_for(line)
    wait_both(daemon, 3)
    assert pids_except("", daemon.children()) == pids_except("", before)
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0 is back after")
    stop(daemon)


def test_one_that_cannot_prepare_itself_does_not_end_the_daemon(begin: Start) -> None:
    daemon = begin(*BOTH, "worker=bad_standby")
    daemon.wait_for(
        "failed with RuntimeError: no standby today; another is started in 1 s",
        "another is started in 2 s",
        "standby_engines=1, standby_workers=0",
    )
    daemon.children()["worker"].kill()
    daemon.wait_for("worker 0 is back after")
    stop(daemon)


def test_a_reload_replaces_standby_workers(begin: Start) -> None:
    daemon = begin(*BOTH)
    wait_both(daemon)
    old = standby_pid(daemon, "worker")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("reloaded after")
    wait_both(daemon, 2)
    new = standby_pid(daemon, "worker")
    assert new != old
    assert f"standby worker 0 (pid {old})" not in daemon.text, "it is not reported as a failure"
    daemon.children()["worker"].kill()
    daemon.wait_for("worker 0 is back after", f"worker 0 (pid {new}) was on standby")
    stop(daemon)


def test_a_hung_standby_process_is_replaced_and_the_daemon_stays_ready(begin: Start) -> None:
    daemon = begin(*BOTH)
    before = daemon.children()
    wait_both(daemon)
    pid = standby_pid(daemon, "worker")
    os.kill(pid, signal.SIGSTOP)
    daemon.wait_for(f"standby worker 0 (pid {pid}) hangs, no sign of life for")
    wait_both(daemon, 2)
    assert standby_pid(daemon, "worker") != pid
    assert pids_except("", daemon.children()) == pids_except("", before)
    assert "NotReady" not in daemon.text
    stop(daemon)


def test_a_stop_while_standby_processes_start_ends_everything(begin: Start) -> None:
    daemon = begin(*BOTH, "worker=slow_standby")
    pid = standby_pid(daemon, "worker")

    def priorities() -> list[int]:
        threads = map(int, os.listdir(f"/proc/{pid}/task"))
        return sorted(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads)

    assert eventually(lambda: priorities()[-1] == 19), "it prepares itself at low priority"
    own = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)
    assert os.getpriority(os.PRIO_PROCESS, pid) == own
    stop(daemon)
    assert "killed" not in daemon.text


def test_standby_processes_end_with_a_killed_supervisor(begin: Start) -> None:
    daemon = begin(*BOTH)
    wait_both(daemon)
    children = {str(each.pid): each for each in psutil.Process(daemon.process.pid).children()}
    assert len(children) == 5
    daemon.process.kill()
    daemon.process.wait()
    assert_nothing_left(daemon, children)


# ---- When one is started ----


@dataclass(eq=False)
class Process:
    role: Role
    index: int
    weights_generation: int = 1
    engine: int | None = None
    is_prepared: bool = True
    pid: int = 7
    exit_status: int = -9
    fatal_error: Any = None
    signals: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"standby {self.role} {self.index}"

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Rig:
    """Standby processes of a daemon with two engines, on the clock of a `Case`."""

    def __init__(self, **numbers: int) -> None:
        self.case = Case(num_engines=2)
        self.standby: list[Process] = []
        self.boots: list[ProcessBoot] = []
        self.error: str | None = None
        self.display = Notices()
        self.processes = StandbyProcesses(
            self,  # type: ignore[arg-type]
            self.case.epochs,
            self.case.recovery,
            ReliabilityConfig(**numbers),
            self.display,
            lambda: self.case.now,
        )

    def start_standby(self, boot: ProcessBoot) -> None:
        if self.error is not None:
            raise StartError(boot, self.error)
        self.boots.append(boot)
        self.standby.append(Process(boot.role, boot.index, boot.weights_generation))

    def report(self, engine: int, **fields: Any) -> None:
        epoch = self.case.epochs.worker_epochs[engine]
        message = EngineAlive(**({"worker_epoch": epoch, "ready": True} | fields))
        self.processes.note_message(Process("engine_core", engine, engine=engine), message)

    def started(self) -> int:
        """Start what is due; return how many were started."""
        before = len(self.boots)
        self.processes.start_missing()
        return len(self.boots) - before

    def die(self, index: int = 0) -> None:
        self.processes.note_death(self.standby.pop(index))  # type: ignore[arg-type]


def test_none_is_started_before_all_engines_have_caught_up() -> None:
    rig = Rig(standby_engines=1, standby_workers=2)
    assert rig.started() == 0, "no engine has reported"
    rig.report(0)
    rig.report(1, catches_up=True)
    assert rig.started() == 0
    rig.report(1, ready=False)
    assert rig.started() == 0
    rig.report(1)
    assert rig.started() == 3
    assert not any(boot.has_place for boot in rig.boots)
    assert [(boot.role, boot.index) for boot in rig.boots] == [
        ("engine_core", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert (rig.processes.num_ready("engine_core"), rig.processes.num_ready("worker")) == (1, 2)
    rig.standby.pop()  # it has a place now: engine 1 has new workers
    rig.case.epochs.new_workers(1)
    assert rig.started() == 0
    rig.report(1)
    assert rig.started() == 1
    assert (rig.boots[-1].index, rig.boots[-1].incarnation) == (1, 1)


def test_an_engine_that_rests_is_not_waited_for() -> None:
    rig = Rig(standby_engines=1)
    rig.report(0)
    rig.case.recovery.reserve(1)
    assert rig.started() == 1


def test_one_that_dies_again_and_again_waits_longer() -> None:
    rig = Rig(standby_engines=1)
    rig.report(0)
    rig.report(1)
    delays = []
    for _ in range(11):
        assert rig.started() == 1
        rig.die()
        delay = rig.processes.seconds_to_next_start()
        assert delay is not None
        delays.append(delay)
        assert rig.started() == 0
        rig.case.now += delay
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert rig.started() == 1
    assert rig.processes.seconds_to_next_start() is None
    rig.case.now += 601
    rig.die()
    assert rig.processes.seconds_to_next_start() == 1.0


def test_one_that_cannot_be_started_is_tried_again() -> None:
    rig = Rig(standby_workers=1)
    rig.report(0)
    rig.report(1)
    rig.error = "Too many open files"
    assert rig.started() == 0
    rig.error = None
    assert rig.started() == 0
    rig.case.now += 1
    assert rig.started() == 1


def test_workers_with_old_weights_are_killed_without_a_delay() -> None:
    rig = Rig(standby_engines=1, standby_workers=1)
    rig.report(0)
    rig.report(1)
    assert rig.started() == 2
    rig.processes.discard_outdated()
    engine, worker = rig.standby
    assert (engine.signals, worker.signals) == ([], [])
    worker.weights_generation = 0
    rig.processes.discard_outdated()
    rig.processes.discard_outdated()
    assert (engine.signals, worker.signals) == ([], [signal.SIGKILL])
    assert rig.processes.num_ready("worker") == 0, "it gets no place any more"
    rig.die(1)
    assert rig.started() == 1
