"""The watchdog over fake processes: pings, removals and reports of health."""

import signal
from typing import Any

from deploy.supervisor.hang_detector import HangLimits
from deploy.supervisor.watchdog import Watchdog
from proto.messages.lifecycle import (
    Alive,
    EngineAlive,
    FrontEndReady,
    HealthStatus,
    NotReady,
    Paused,
    Ping,
    Role,
    WaitingForRanks,
    process_name,
)
from proto.settings.config import ReliabilityConfig
from tests.deploy.test_recovery import Case
from tests.fakes import lifecycle_messages

STEP = 8.0


class Child:
    """A fake process. answer: its reply to a Ping, None if it hangs."""

    exit_status = None
    fatal_error = None

    def __init__(self, role: Role, index: int = 0, generation: int = 0) -> None:
        self.role, self.index, self.pid = role, index, 7
        self.name = process_name(role, index)
        self.engine = None if role == "api_server" else index // 2 if role == "worker" else index
        self.generation = generation or 1 + (self.engine or 0)
        self.has_place, self.is_prepared = True, False
        self.messages: list[Any] = []
        self.actions: list[str] = []
        self.ended = False
        self.num_answered = 0
        self.answer: Any = Alive()

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def has_ended(self) -> bool:
        return self.ended

    def dump_stacks(self) -> None:
        self.actions.append("stacks")

    def send_signal(self, number: signal.Signals) -> None:
        self.actions.append(number.name)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.messages if isinstance(each, kind)]


class Daemon:
    """A watchdog over two workers, an engine and two front ends.

    num_engines: each has two workers; processes of further engines come last.
    """

    def __init__(self, num_engines: int = 1) -> None:
        self.case = Case(num_engines=num_engines)
        self.watchdog = Watchdog(
            HangLimits.of(ReliabilityConfig(step_timeout=STEP)),
            self.case.epochs,
            self.case.recovery,
            self.case.notices,
            lambda: self.case.now,
        )
        self.children: list[Any] = [Child("worker", 0), Child("worker", 1), Child("engine_core")]
        self.children += [Child("api_server", 0), Child("api_server", 1)]
        self.children += [Child(each.role, each.index) for each in self.case.processes[5:]]
        for each in self.children:
            if each.role == "engine_core":
                each.answer = EngineAlive(1 + each.index, 100, ready=True)
        self.hung: list[Child] = []

    @property
    def engine(self) -> Child:
        return self.children[2]

    def wait(self, seconds: float) -> None:
        end = self.case.now + seconds
        while self.case.now < end:
            self.run_watchdog()
            self.case.now = min(end, self.case.now + self.watchdog.seconds_to_next_check())
        self.run_watchdog()

    def run_watchdog(self) -> None:
        for child in self.children:
            if len(child.of(Ping)) > child.num_answered and child.answer is not None:
                child.num_answered += 1
                self.watchdog.note_message(child, child.answer)
        for hung in self.watchdog.find_hung(self.children):
            assert hung.actions == [], "the others disconnect first"
            self.hung.append(hung)
            self.watchdog.begin_removal(hung)
        self.watchdog.continue_removals()
        self.watchdog.report_health(self.children)

    def reported_reasons(self) -> list[str]:
        """Return why the daemon is not ready, as reported to a front end."""
        reports = self.children[3].of(HealthStatus)
        return [each.what for each in reports[-1].reasons] if reports else []


def test_engine_and_front_ends_get_one_ping_at_a_time() -> None:
    daemon = Daemon()
    daemon.engine.answer = None
    daemon.wait(STEP / 2)
    pings = [len(each.of(Ping)) for each in daemon.children]
    assert pings == [0, 0, 1, pings[3], pings[3]]
    assert 3 <= pings[3] <= 5
    assert daemon.case.notices.lines == []


def test_a_worker_that_waits_for_a_hung_rank_is_not_killed() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (0, 1), ready=True, has_work=True)
    daemon.wait(1.5)
    daemon.watchdog.note_message(daemon.children[0], WaitingForRanks(0))
    daemon.wait(1.5 * STEP)
    (line,) = daemon.case.notices.lines
    assert line.startswith("WARNING worker 1 (pid 7) hangs, no completed step for 8.")
    assert daemon.hung == [daemon.children[1]]
    assert daemon.children[0].actions == []


def test_a_hung_engine_is_disconnected_before_it_is_signalled() -> None:
    daemon = Daemon()
    daemon.wait(1.0)
    daemon.engine.answer = None
    while not daemon.case.notices.lines:
        daemon.wait(0.5)
        assert daemon.engine.actions == []
    assert daemon.case.notices.lines[0].startswith(
        "WARNING engine 0 (pid 7) hangs, no sign of life for 8."
    )
    assert daemon.hung == [daemon.engine]
    daemon.wait(1.0)
    assert daemon.engine.actions == ["stacks", "SIGKILL"]
    assert daemon.reported_reasons() == ["engine 0 hangs and is killed"]
    daemon.wait(5 * STEP)
    assert len(daemon.case.notices.lines) == 1, "the hang is reported once"
    assert not daemon.watchdog.can_recover, "the engine survived SIGKILL"
    daemon.engine.ended = True
    assert daemon.watchdog.can_recover


def test_only_the_hung_worker_of_two_is_killed() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.hung == [daemon.children[1]]
    assert [each.actions for each in daemon.children[:2]] == [[], ["stacks", "SIGKILL"]]


def test_workers_unknown_to_the_engine_do_not_hang() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.case.epochs.new_workers(0)
    daemon.wait(2 * STEP)
    assert daemon.hung == []


def test_each_engine_reports_on_its_own_workers() -> None:
    """Their indices count on from one engine to the next; ranks do not."""
    daemon = Daemon(num_engines=2)
    *_, third, fourth, other_engine = daemon.children
    other_engine.answer = EngineAlive(2, 100, (1,), True, True)
    daemon.wait(STEP / 2 + 4)
    assert daemon.children[3].of(HealthStatus)[-1].reasons[0].engine == 1
    assert daemon.reported_reasons() == ["worker 3: no completed step"]
    daemon.wait(STEP / 2)
    assert daemon.hung == [fourth]
    assert third.actions == []


def test_an_engine_that_hangs_does_not_concern_another_one() -> None:
    daemon = Daemon(num_engines=2)
    daemon.wait(1.0)
    daemon.engine.answer = None
    daemon.wait(STEP + 4)
    assert daemon.hung == [daemon.engine]
    reasons = daemon.children[3].of(HealthStatus)[-1].reasons
    assert {each.engine for each in reasons} == {0}


def switch_generation(daemon: Daemon) -> list[Child]:
    """Switch to a new generation; return the engine and a worker of the old one."""
    daemon.wait(1.0)
    old = [daemon.engine, daemon.children[0]]
    epochs = daemon.case.epochs
    epochs.switch_to(epochs.next_generation(epochs.models, 0, is_first=True), 0)
    generation, *_ = epochs.generations
    new = [Child("worker", index, generation) for index in range(2)]
    engine = Child("engine_core", 0, generation)
    engine.answer = EngineAlive(epochs.worker_epochs[0], 100, ready=True)
    daemon.children += [*new, engine]
    return old


def test_a_hung_engine_of_the_old_generation_is_killed() -> None:
    """The daemon stays ready, because the new engine serves new requests."""
    daemon = Daemon()
    engine, _ = switch_generation(daemon)
    engine.answer = None
    daemon.wait(STEP + 4)
    assert daemon.hung == [engine]
    assert engine.actions == ["stacks", "SIGKILL"]
    assert daemon.reported_reasons() == []
    daemon.wait(5 * STEP)
    assert daemon.hung == [engine]


def test_an_old_worker_hangs_by_the_report_of_its_own_engine() -> None:
    daemon = Daemon()
    engine, worker = switch_generation(daemon)
    engine.answer = EngineAlive(1, 100, (0,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.hung == [worker]


def test_the_new_engine_is_watched_during_a_reload() -> None:
    daemon = Daemon()
    switch_generation(daemon)
    daemon.wait(STEP)
    daemon.children[-1].answer = None
    daemon.wait(STEP)
    assert daemon.reported_reasons() == ["engine 0: no sign of life"]
    daemon.wait(4.0)
    assert daemon.hung == [daemon.children[-1]]


def test_stopping_processes_do_not_hang() -> None:
    daemon = Daemon()
    engine, _ = switch_generation(daemon)
    engine.answer = None
    daemon.children = daemon.children[3:]
    daemon.wait(600 + STEP)
    assert daemon.hung == []


def test_health_changes_are_sent_once_and_to_new_front_ends() -> None:
    daemon = Daemon()
    daemon.run_watchdog()
    assert daemon.children[3].of(HealthStatus) == [], "the health has not changed"
    daemon.case.die(2)
    daemon.wait(STEP)
    daemon.children[4] = Child("api_server", 1)
    daemon.wait(STEP)
    reports = [
        HealthStatus((NotReady("engine 0 is being restarted", 1000.0, 0, is_restarted=True),))
    ]
    assert daemon.children[3].of(HealthStatus) == daemon.children[4].of(HealthStatus) == reports
    daemon.case.due(0, 1, 3, 4)
    daemon.case.recovery.note_message(
        lifecycle_messages.engine_ready(epoch=daemon.case.epochs.epochs[0])
    )
    daemon.wait(STEP)
    assert daemon.children[3].of(HealthStatus) == [*reports, HealthStatus()]


def test_a_paused_daemon_is_not_ready() -> None:
    daemon = Daemon()
    daemon.run_watchdog()
    daemon.case.recovery.note_message(Paused("freeze"))
    daemon.wait(STEP)
    assert daemon.reported_reasons() == ["paused by POST /pause"]
    daemon.case.recovery.note_message(Paused(None))
    daemon.wait(STEP)
    assert daemon.reported_reasons() == []


def test_messages_of_a_dead_process_do_not_count_for_its_successor() -> None:
    daemon = Daemon()
    daemon.run_watchdog()
    old, new = daemon.children[3], Child("api_server", 0)
    new.answer = None
    daemon.children[3] = new
    daemon.run_watchdog()
    daemon.watchdog.note_message(old, Alive())
    daemon.wait(STEP)
    assert len(new.of(Ping)) == 1
    assert daemon.case.notices.lines == [], "the new process is still starting"
    daemon.watchdog.note_message(new, FrontEndReady(0))
    daemon.wait(3 * STEP)
    assert daemon.case.notices.lines[0].startswith("WARNING api 0 (pid 7) hangs, no sign of life")
