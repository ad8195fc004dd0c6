"""The guard over children that are only pretended: who is asked, told and taken away."""

import signal
from typing import Any

from deploy.guard import Guard
from deploy.hangs import HangDetector, Limits
from proto.config import ReliabilityConfig
from proto.lifecycle import (
    Alive,
    Condition,
    EngineAlive,
    FrontEndReady,
    NewEngine,
    NewWorkers,
    NotReady,
    Ping,
    Role,
    process_name,
)
from tests.deploy.test_recovery import Case

STEP = 8.0


class Child:
    """answers: what it says to a Ping; None where it hangs."""

    exit_status = None
    last_words = None

    def __init__(self, role: Role, index: int = 0) -> None:
        self.role, self.index, self.pid = role, index, 7
        self.name = process_name(role, index)
        self.heard: list[Any] = []
        self.got: list[str] = []
        self.gone = False
        self.num_answered = 0
        self.answer: Any = Alive()

    def tell(self, message: Any) -> None:
        self.heard.append(message)

    def has_ended(self) -> bool:
        return self.gone

    def show_stacks(self) -> None:
        self.got.append("stacks")

    def signal(self, number: signal.Signals) -> None:
        self.got.append(number.name)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.heard if isinstance(each, kind)]


class Daemon:
    """Two workers, the engine, two front ends; `reasons` are somebody else's."""

    def __init__(self) -> None:
        self.case = Case()
        detector = HangDetector(
            Limits.of(ReliabilityConfig(step_timeout=STEP)), lambda: self.case.now
        )
        self.reasons: list[NotReady] = []
        self.guard = Guard(
            detector,
            self.case.births,
            self.case.recovery,
            self.case.notices,
            [lambda: self.reasons],
            lambda: self.case.now,
        )
        self.children: list[Any] = [Child("worker", 0), Child("worker", 1), Child("engine_core")]
        self.children += [Child("api_server", 0), Child("api_server", 1)]
        self.engine.answer = EngineAlive(1, 100, ready=True)
        self.serving = True
        self.replaced: Child | None = None

    @property
    def engine(self) -> Child:
        return self.children[2]

    def wait(self, seconds: float) -> None:
        end = self.case.now + seconds
        while self.case.now < end:
            self.turn()
            self.case.now = min(end, self.case.now + self.guard.seconds_to_next())
        self.turn()

    def turn(self) -> None:
        for child in self.children:
            if len(child.of(Ping)) > child.num_answered and child.answer is not None:
                child.num_answered += 1
                self.guard.hear(child, child.answer)
        self.guard.turn(self.children, self.recovers)

    def recovers(self, child: Any) -> bool:
        return self.serving and child is not self.replaced


def test_engine_and_front_ends_are_asked_one_question_at_a_time() -> None:
    daemon = Daemon()
    daemon.engine.answer = None
    daemon.wait(STEP / 2)
    asked = [len(each.of(Ping)) for each in daemon.children]
    assert asked == [0, 0, 1, asked[3], asked[3]]
    assert 3 <= asked[3] <= 5
    assert daemon.case.notices.lines == []


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
    for child in (each for each in daemon.children if each is not daemon.engine):
        assert child.of(NewEngine) == [NewEngine(2, 2)]
    daemon.wait(1.0)
    assert daemon.engine.got == ["stacks", "SIGKILL"]
    for child in daemon.children[3:]:
        (reason,) = child.of(Condition)[-1].reasons
        assert reason.what == "engine 0 hangs and is killed"
    daemon.wait(5 * STEP)
    assert len(daemon.case.notices.lines) == 1, "one verdict is enough"
    assert not daemon.guard.copes, "it cannot be ended"
    daemon.engine.gone = True
    assert daemon.guard.copes


def test_one_of_two_workers_that_hangs_is_cut_off_with_the_other() -> None:
    daemon = Daemon()
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.engine.of(NewWorkers) == [NewWorkers(2)]
    assert [each.got for each in daemon.children[:2]] == [[], ["stacks", "SIGKILL"]]


def test_while_the_daemon_starts_nobody_else_is_told() -> None:
    daemon = Daemon()
    daemon.serving = False
    daemon.engine.answer = EngineAlive(1, 100, (1,), True, True)
    daemon.wait(STEP + 4)
    assert daemon.children[1].got == ["stacks", "SIGKILL"]
    assert daemon.engine.of(NewWorkers) == []


def test_of_one_that_somebody_else_replaces_the_others_hear_nothing_here() -> None:
    """And of the next one that dies in its place they hear as ever."""
    daemon = Daemon()
    daemon.replaced = daemon.engine
    daemon.engine.answer = None
    daemon.wait(600 + STEP)
    assert daemon.engine.got == ["stacks", "SIGKILL"]
    assert daemon.children[0].of(NewEngine) == []
    assert not daemon.case.recovery.has_gaps


def test_front_ends_hear_what_is_amiss_once_and_new_ones_what_there_is() -> None:
    daemon = Daemon()
    daemon.turn()
    assert daemon.children[3].of(Condition) == [], "there was nothing to say"
    daemon.reasons = [NotReady("draining", 5.0)]
    daemon.wait(STEP)
    daemon.children[4] = Child("api_server", 1)
    daemon.wait(STEP)
    told = [Condition((NotReady("draining", 5.0),))]
    assert daemon.children[3].of(Condition) == daemon.children[4].of(Condition) == told
    daemon.reasons = []
    daemon.wait(STEP)
    assert daemon.children[3].of(Condition) == [*told, Condition()]


def test_what_the_dead_have_said_does_not_count_for_those_who_follow() -> None:
    daemon = Daemon()
    daemon.turn()
    old, new = daemon.children[3], Child("api_server", 0)
    new.answer = None
    daemon.children[3] = new
    daemon.turn()
    daemon.guard.hear(old, Alive())
    daemon.wait(STEP)
    assert len(new.of(Ping)) == 1
    assert daemon.case.notices.lines == [], "it starts"
    daemon.guard.hear(new, FrontEndReady(0))
    daemon.wait(3 * STEP)
    assert daemon.case.notices.lines[0].startswith("api 0: (pid 7) hangs, no sign of life")
