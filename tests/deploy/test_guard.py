"""The watchdog over fake processes: pings, removals and reports of health."""

import signal
from typing import Any

from deploy.supervisor.hang_detector import HangLimits
from deploy.supervisor.watchdog import Watchdog
from proto.config import ReliabilityConfig
from proto.lifecycle import (
    Alive,
    EngineAlive,
    FrontEndReady,
    HealthStatus,
    NotReady,
    Ping,
    Role,
    WaitingForRanks,
    process_name,
)
from tests.deploy.test_recovery import Case
from tests.fakes import boots

STEP = 8.0


class Child:
    """answers: what it says to a Ping; None where it hangs."""

    exit_status = None
    fatal_error = None

    def __init__(self, role: Role, index: int = 0, generation: int = 1) -> None:
        self.role, self.index, self.generation, self.pid = role, index, generation, 7
        self.name = process_name(role, index)
        self.heard: list[Any] = []
        self.got: list[str] = []
        self.gone = False
        self.num_answered = 0
        self.answer: Any = Alive()

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def has_ended(self) -> bool:
        return self.gone

    def dump_stacks(self) -> None:
        self.got.append("stacks")

    def send_signal(self, number: signal.Signals) -> None:
        self.got.append(number.name)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.heard if isinstance(each, kind)]


class Daemon:
    """Two workers, the engine, two front ends."""

    def __init__(self) -> None:
        self.case = Case()
        self.watchdog = Watchdog(
            HangLimits.of(ReliabilityConfig(step_timeout=STEP)),
            self.case.epochs,
            self.case.recovery,
            self.case.notices,
            lambda: self.case.now,
        )
        self.children: list[Any] = [Child("worker", 0), Child("worker", 1), Child("engine_core")]
        self.children += [Child("api_server", 0), Child("api_server", 1)]
        self.engine.answer = EngineAlive(1, 100, ready=True)
        self.hung: list[Child] = []

    @property
    def engine(self) -> Child:
        return self.children[2]

    def wait(self, seconds: float) -> None:
        end = self.case.now + seconds
        while self.case.now < end:
            self.turn()
            self.case.now = min(end, self.case.now + self.watchdog.seconds_to_next_check())
        self.turn()

    def turn(self) -> None:
        for child in self.children:
            if len(child.of(Ping)) > child.num_answered and child.answer is not None:
                child.num_answered += 1
                self.watchdog.note_message(child, child.answer)
        for hung in self.watchdog.find_hung(self.children):
            assert hung.got == [], "the others disconnect first"
            self.hung.append(hung)
            self.watchdog.begin_removal(hung)
        self.watchdog.continue_removals()
        self.watchdog.report_health(self.children)

    def reasons_told(self) -> list[str]:
        """Why requests should not come, as a front end knows it."""
        told = self.children[3].of(HealthStatus)
        return [each.what for each in told[-1].reasons] if told else []


def test_engine_and_front_ends_are_asked_one_question_at_a_time() -> None:
    daemon = Daemon()
    daemon.engine.answer = None
    daemon.wait(STEP / 2)
    asked = [len(each.of(Ping)) for each in daemon.children]
    assert asked == [0, 0, 1, asked[3], asked[3]]
    assert 3 <= asked[3] <= 5
    assert daemon.case.notices.lines == []


def test_of_two_workers_that_owe_a_step_the_one_that_waits_is_not_taken_away() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (0, 1), ready=True, has_work=True)
    daemon.wait(1.5)
    daemon.watchdog.note_message(daemon.children[0], WaitingForRanks(0))
    daemon.wait(1.5 * STEP)
    (line,) = daemon.case.notices.lines
    assert line.startswith("worker 1: (pid 7) hangs, no completed step for 8.")
    assert daemon.hung == [daemon.children[1]]
    assert daemon.children[0].got == []


def test_an_engine_that_hangs_is_cut_off_before_anything_is_done_to_it() -> None:
    daemon = Daemon()
    daemon.wait(1.0)
    daemon.engine.answer = None
    while not daemon.case.notices.lines:
        daemon.wait(0.5)
        assert daemon.engine.got == []
    assert daemon.case.notices.lines[0].startswith(
        "engine 0: (pid 7) hangs, no sign of life for 8."
    )
    assert daemon.hung == [daemon.engine]
    daemon.wait(1.0)
    assert daemon.engine.got == ["stacks", "SIGKILL"]
    assert daemon.reasons_told() == ["engine 0 hangs and is killed"]
    daemon.wait(5 * STEP)
    assert len(daemon.case.notices.lines) == 1, "one verdict is enough"
    assert not daemon.watchdog.can_recover, "it cannot be ended"
    daemon.engine.gone = True
    assert daemon.watchdog.can_recover


def test_of_two_workers_the_one_that_hangs_is_taken_away() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.hung == [daemon.children[1]]
    assert [each.got for each in daemon.children[:2]] == [[], ["stacks", "SIGKILL"]]


def test_workers_that_the_engine_has_not_heard_of_yet_owe_nothing() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.case.epochs.new_workers()
    daemon.wait(2 * STEP)
    assert daemon.hung == []


def beside_another(daemon: Daemon) -> list[Child]:
    """The engine and the worker of a generation that is left; those of now have begun to live."""
    daemon.wait(1.0)
    old = [daemon.engine, daemon.children[0]]
    epochs = daemon.case.epochs
    epochs.switch_to(epochs.next_generation(epochs.model))
    new = [Child("worker", index, epochs.generation) for index in range(2)]
    engine = Child("engine_core", 0, epochs.generation)
    engine.answer = EngineAlive(epochs.worker_epoch, 100, ready=True)
    daemon.children += [*new, engine]
    return old


def test_an_engine_that_is_left_is_taken_away_as_any_other() -> None:
    """Nobody is kept from coming: who comes now is answered by the next one."""
    daemon = Daemon()
    engine, _ = beside_another(daemon)
    engine.answer = None
    daemon.wait(STEP + 4)
    assert daemon.hung == [engine]
    assert engine.got == ["stacks", "SIGKILL"]
    assert daemon.reasons_told() == []
    daemon.wait(5 * STEP)
    assert daemon.hung == [engine]


def test_a_worker_that_is_left_is_judged_by_its_own_engine() -> None:
    daemon = Daemon()
    engine, worker = beside_another(daemon)
    engine.answer = EngineAlive(1, 100, (0,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.hung == [worker]


def test_the_engine_of_now_is_watched_beside_one_that_is_left() -> None:
    daemon = Daemon()
    beside_another(daemon)
    daemon.wait(STEP)
    daemon.children[-1].answer = None
    daemon.wait(STEP)
    assert daemon.reasons_told() == ["engine 0: no sign of life"]
    daemon.wait(4.0)
    assert daemon.hung == [daemon.children[-1]]


def test_of_those_who_were_asked_to_end_nothing_is_expected() -> None:
    daemon = Daemon()
    engine, _ = beside_another(daemon)
    engine.answer = None
    daemon.children = daemon.children[3:]
    daemon.wait(600 + STEP)
    assert daemon.hung == []


def test_front_ends_hear_what_is_amiss_once_and_new_ones_what_there_is() -> None:
    daemon = Daemon()
    daemon.turn()
    assert daemon.children[3].of(HealthStatus) == [], "there was nothing to say"
    daemon.case.die(2)
    daemon.wait(STEP)
    daemon.children[4] = Child("api_server", 1)
    daemon.wait(STEP)
    told = [HealthStatus((NotReady("engine 0 is being restarted", 1000.0),))]
    assert daemon.children[3].of(HealthStatus) == daemon.children[4].of(HealthStatus) == told
    daemon.case.due(0, 1, 3, 4)
    daemon.case.recovery.note_message(boots.engine_ready(epoch=daemon.case.epochs.epoch))
    daemon.wait(STEP)
    assert daemon.children[3].of(HealthStatus) == [*told, HealthStatus()]


def test_what_the_dead_have_said_does_not_count_for_those_who_follow() -> None:
    daemon = Daemon()
    daemon.turn()
    old, new = daemon.children[3], Child("api_server", 0)
    new.answer = None
    daemon.children[3] = new
    daemon.turn()
    daemon.watchdog.note_message(old, Alive())
    daemon.wait(STEP)
    assert len(new.of(Ping)) == 1
    assert daemon.case.notices.lines == [], "it starts"
    daemon.watchdog.note_message(new, FrontEndReady(0))
    daemon.wait(3 * STEP)
    assert daemon.case.notices.lines[0].startswith("api 0: (pid 7) hangs, no sign of life")
