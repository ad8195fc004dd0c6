"""Reloads, phase by phase: without processes, on a fake clock."""

import signal
from dataclasses import dataclass, field

import pytest

from deploy.births import Births
from deploy.hang_up import HangUp
from deploy.recovery import Recovery
from deploy.reload import Reload
from deploy.restart_budget import RestartBudget
from proto import PROTOCOL_VERSION
from proto.codec import Message, changed
from proto.config import FrontEndConfig, ServeConfig
from proto.errors import ErrorInfo, ModelError
from proto.lifecycle import (
    DropEngine,
    EngineLeft,
    EngineReady,
    FrontEndReady,
    NewEngine,
    NextEngine,
    NextReady,
    ProcessBoot,
    Role,
    Switched,
    SwitchEngine,
    WorkersReady,
    process_name,
)
from proto.prepared_model import PreparedModel
from proto.process import describe
from tests.deploy.test_recovery import MODEL, Notices

NEW = changed(MODEL, folder="/new")


@dataclass
class Process:
    role: Role
    index: int
    generation: int
    exit_status: int | None = None
    last_words: ErrorInfo | None = None
    pid: int = 77
    asked: bool = False
    signals: list[signal.Signals] = field(default_factory=list)

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)

    def ask_to_end(self) -> None:
        self.asked = True

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


@dataclass
class Preparation:
    """What comes of it: None while it goes on."""

    outcome: PreparedModel | ModelError | None = None

    def has_ended(self) -> bool:
        return self.outcome is not None

    def result(self) -> PreparedModel:
        if isinstance(self.outcome, ModelError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class Case:
    """Two front ends, two workers, one engine, and everybody who is told of something."""

    def __init__(self, strategy: str = "side-by-side") -> None:
        self.now = 1000.0
        config = ServeConfig(frontend=FrontEndConfig(api_server_count=2))
        template = ProcessBoot(
            protocol_version=PROTOCOL_VERSION,
            role="worker",
            index=0,
            incarnation=0,
            epoch=0,
            worker_epoch=0,
            run_dir="/nowhere",
            death_fd=3,
            config=config,
            model=MODEL,
        )
        self.births = Births(template, (9,))
        self.recovery = Recovery(
            self.births, RestartBudget(8), Notices(), 2, clock=lambda: self.now
        )
        self.running: list[Process] = []
        self.front_ends = [Process("api_server", each, 1) for each in range(2)]
        for role, index in (("worker", 0), ("worker", 1), ("engine_core", 0)):
            self.start(self.births.boot(role, index))
        for each in range(2):
            self.births.boot("api_server", each)
        self.told: list[Message] = []
        self.ended: list[tuple[str, bool]] = []
        self.reasons: list[str] = []
        self.num_begun = 0
        self.preparations: list[Preparation] = []
        self.has_room = True
        self.reload = Reload(
            self.births, self.recovery, self, self, strategy, 2, 2, lambda: self.now
        )

    # what is done to processes

    def prepare(self) -> Preparation:
        self.preparations.append(Preparation())
        return self.preparations[-1]

    def let_go(self, preparation: Preparation) -> None:
        self.preparations.remove(preparation)

    def fits(self) -> bool:
        return self.has_room

    def start(self, boot: ProcessBoot) -> None:
        assert boot.epoch == boot.generation or boot.epoch == boot.worker_epoch
        self.running.append(Process(boot.role, boot.index, boot.generation))

    def members(self, generation: int) -> list[Process]:
        return [each for each in self.running if each.generation == generation]

    def tell_front_ends(self, message: Message) -> None:
        self.told.append(message)

    # who hears of it

    def reload_begins(self) -> None:
        self.num_begun += 1

    def reload_waits(self, reason: str) -> None:
        self.reasons.append(reason)

    def reload_ends(self, problem: str, seconds: float, *, another: bool) -> None:
        self.ended.append((problem, another))

    # what happens

    def ask(self, outcome: PreparedModel | ModelError = NEW) -> None:
        """Up to the meeting."""
        self.reload.ask()
        self.reload.press()
        self.preparations[0].outcome = outcome
        self.reload.press()

    def say(self, *messages: Message) -> None:
        for each in messages:
            self.reload.note(each)
        self.reload.press()

    def switch(self, epoch: int) -> None:
        self.say(NextReady(0, epoch), NextReady(1, epoch))
        self.say(Switched(0, epoch), Switched(1, epoch))

    def die(self, dead: Process, error: Exception | None = None) -> bool:
        """Whether it is the affair of the reload."""
        if dead in self.running:
            self.running.remove(dead)
        dead.exit_status = -9 if error is None else 1
        dead.last_words = None if error is None else describe(error)
        owned = self.reload.note_death(dead)
        self.reload.press()
        return owned

    def end(self, generation: int) -> None:
        """Everybody of it does as asked."""
        for each in self.members(generation):
            assert each.asked
            assert self.die(each)


def roles(processes: list[Process]) -> list[str]:
    return [each.role for each in processes]


def test_side_by_side() -> None:
    case = Case()
    case.ask()
    assert case.told == [NextEngine(2, NEW, in_place=False)]
    assert roles(case.members(2)) == ["worker", "worker", "engine_core"]
    assert case.births.epoch == 1, "the engine of now is the old one"
    case.say(NextReady(1, 2))
    assert len(case.told) == 1
    case.say(NextReady(0, 2))
    assert case.told[1:] == [SwitchEngine(2)]
    case.say(Switched(1, 2))
    assert case.ended == [], "a request that comes now may still go to the old engine"
    case.say(Switched(0, 2))
    assert case.ended == [("", False)]
    assert (case.births.epoch, case.births.generation, case.births.model) == (2, 2, NEW)
    assert not any(case.reload.is_of_now(each) for each in case.members(1))
    assert all(case.reload.is_of_now(each) for each in case.members(2) + case.front_ends)
    case.say(EngineLeft(0, 1), EngineLeft(0, 1))
    assert not any(each.asked for each in case.members(1)), "somebody still needs them"
    case.say(EngineLeft(1, 1))
    case.end(1)
    assert roles(case.running) == ["worker", "worker", "engine_core"]
    assert not any(each.asked for each in case.running)
    case.ask()
    assert case.told[-1] == NextEngine(3, NEW, in_place=False)


def test_who_does_not_end_is_made_to() -> None:
    case = Case()
    case.ask()
    case.switch(2)
    case.say(EngineLeft(0, 1), EngineLeft(1, 1))
    case.now += 3.0
    case.reload.press()
    assert {tuple(each.signals) for each in case.members(1)} == {(signal.SIGTERM,)}
    assert case.reload.seconds_left() == 1.0
    case.now += 1.0
    case.reload.press()
    assert case.members(1)[0].signals[-1] == signal.SIGKILL


def test_what_cannot_start_changes_nothing() -> None:
    case = Case()
    case.ask()
    worker = case.members(2)[0]
    assert case.die(worker, ModelError("config.json: no"))
    assert case.ended == [("config.json: no", False)]
    assert case.told[-1] == DropEngine(2)
    case.end(2)
    assert (case.births.epoch, case.births.model) == (1, MODEL)
    case.switch(2)
    assert SwitchEngine(2) not in case.told, "a late word of nothing"
    case.ask()
    assert case.told[-1] == NextEngine(3, NEW, in_place=False)


def test_an_unexpected_death_is_told_with_its_traceback() -> None:
    case = Case()
    case.ask()
    case.die(case.members(2)[2], ValueError("x"))
    ((problem, _),) = case.ended
    first, *others = problem.splitlines()
    assert first == "engine 0 (pid 77) failed with ValueError: x"
    assert others == ["  ValueError: x"]


def test_what_a_front_end_cannot_read_changes_nothing() -> None:
    case = Case()
    case.ask()
    case.say(NextReady(0, 2), NextReady(1, 2, describe(ModelError("tokenizer.json: no"))))
    assert case.ended == [("tokenizer.json: no", False)]
    assert all(each.asked for each in case.members(2))


def test_what_is_never_ready_is_given_up() -> None:
    case = Case()
    case.ask()
    case.say(NextReady(0, 2))
    assert case.reload.seconds_left() == 600.0
    case.now += 600.0
    case.reload.press()
    assert case.ended == [("it was not ready after 600 s", False)]


def test_a_model_that_cannot_be_prepared_changes_nothing() -> None:
    case = Case()
    case.ask(ModelError("no such file"))
    assert case.ended == [("no such file", False)]
    assert (case.told, case.preparations) == ([], [])


@pytest.mark.parametrize("dies", ["front end", "engine"])
def test_a_death_before_the_switch_puts_it_off(dies: str) -> None:
    """That of the present generation or of a front end; it is tried again when all are back."""
    case = Case()
    case.ask()
    dead = case.front_ends[1] if dies == "front end" else case.members(1)[2]
    assert not case.die(dead), "it is for the recovery to replace it"
    case.recovery.note_death(dead)
    assert case.ended == [(f"{dead.name} died meanwhile", True)]
    case.end(2)
    assert case.num_begun == 1
    case.recovery.take_due(case.members(1))
    back = FrontEndReady(1) if dies == "front end" else EngineReady(1, 3, 1, 1, 1, 1, "x")
    case.recovery.note(back)
    case.reload.press()
    assert case.num_begun == 2


def test_one_that_is_asked_for_while_somebody_is_missing_waits() -> None:
    case = Case()
    dead = case.front_ends[0]
    case.recovery.note_death(dead)
    case.reload.ask()
    case.reload.press()
    assert case.reasons == ["a reload follows when all processes are back"]
    assert case.num_begun == 0
    case.recovery.take_due([])
    case.recovery.note(FrontEndReady(0))
    case.reload.press()
    assert case.num_begun == 1


def test_one_that_hangs_is_missing_before_it_is_dead() -> None:
    """Its place in the generation of now has other numbers already."""
    case = Case()
    hung = next(each for each in case.running if each.role == "engine_core")
    case.recovery.cut_off(hung)
    case.reload.ask()
    assert case.reasons
    assert not case.num_begun
    case.reload.press()
    assert not case.num_begun


def test_a_death_while_the_model_is_prepared_only_delays_it() -> None:
    case = Case()
    case.reload.ask()
    case.reload.press()
    case.recovery.note_death(case.front_ends[0])
    case.preparations[0].outcome = NEW
    case.reload.press()
    assert (case.told, case.preparations) == ([], [])
    case.recovery.take_due([])
    case.recovery.note(FrontEndReady(0))
    case.reload.press()
    assert case.told == [NextEngine(2, NEW, in_place=False)]


def test_a_front_end_that_dies_while_it_switches_is_born_with_the_new_engine() -> None:
    case = Case()
    case.ask()
    case.say(NextReady(0, 2), NextReady(1, 2))
    case.say(Switched(0, 2))
    assert not case.die(case.front_ends[1])
    assert case.ended == [("", False)]
    assert case.births.boot("api_server", 1).epoch == 2


def test_the_old_engine_dies_while_front_ends_switch() -> None:
    case = Case()
    case.ask()
    case.say(NextReady(0, 2), NextReady(1, 2))
    assert case.die(case.members(1)[2])
    assert case.told[-2:] == [SwitchEngine(2), DropEngine(1)]
    assert case.ended == [("", False)]


def test_nobody_is_missing_when_it_switches() -> None:
    case = Case()
    case.ask()
    case.recovery.note_death(case.members(1)[0])
    case.say(NextReady(0, 2), NextReady(1, 2))
    assert SwitchEngine(2) not in case.told
    case.recovery.take_due([])
    case.recovery.note(WorkersReady(case.births.worker_epoch))
    case.reload.press()
    assert case.told[-1] == SwitchEngine(2)


def test_with_a_front_end_its_requests_have_left() -> None:
    case = Case()
    case.ask()
    case.switch(2)
    case.say(EngineLeft(0, 1))
    assert not case.die(case.front_ends[1])
    assert all(each.asked for each in case.members(1))


def test_an_engine_that_dies_while_it_is_left_is_not_replaced() -> None:
    case = Case()
    case.ask()
    case.switch(2)
    assert case.die(case.members(1)[2])
    assert case.told[-1] == DropEngine(1)
    case.end(1)
    case.ask()
    assert case.num_begun == 2


def test_the_engine_of_now_is_the_affair_of_others() -> None:
    case = Case()
    case.ask()
    case.switch(2)
    assert not case.die(case.members(2)[2])
    assert case.told[-1] == SwitchEngine(2)


def test_in_place() -> None:
    case = Case("in-place")
    case.ask()
    assert case.told == [NextEngine(2, NEW, in_place=True)]
    assert case.members(2) == []
    case.switch(2)
    assert case.told[1:] == [NewEngine(2, 2, died=False)]
    assert case.ended == []
    case.end(1)
    assert roles(case.members(2)) == ["worker", "worker", "engine_core"]
    case.say(EngineReady(PROTOCOL_VERSION, 2, 1, 1, 1, 1, "x"))
    assert case.told[-1] == SwitchEngine(2)
    assert case.ended == [("", False)]
    assert not case.die(case.members(2)[0]), "from now on a death is one like any other"


def test_in_place_the_old_model_comes_back_when_the_new_one_cannot() -> None:
    case = Case("in-place")
    case.ask()
    case.switch(2)
    case.end(1)
    worker, other, engine = case.members(2)
    assert case.die(worker, ModelError("no weights"))
    assert case.ended == [("no weights", False)]
    assert case.told[-2:] == [DropEngine(2), NewEngine(3, 3, died=False)]
    assert (other.asked, engine.asked) == (True, True)
    case.end(2)
    assert roles(case.members(3)) == ["worker", "worker", "engine_core"]
    assert (case.births.model, case.births.generation) == (MODEL, 3)
    assert not case.die(case.members(3)[0]), "there is nothing else to go back to"


@pytest.mark.parametrize("room", [True, False])
def test_the_memory_decides(room: bool) -> None:
    case = Case("auto")
    case.has_room = room
    case.ask()
    assert case.told == [NextEngine(2, NEW, in_place=not room)]


def test_one_more_follows_and_not_two() -> None:
    case = Case()
    case.ask()
    case.reload.ask()
    case.reload.ask()
    assert case.reasons == [
        "a reload is under way: another one follows it",
        "a reload is under way and another one follows it already",
    ]
    case.switch(2)
    assert case.ended == [("", True)]
    case.say(EngineLeft(0, 1), EngineLeft(1, 1))
    case.end(1)
    assert case.num_begun == 2
    case.preparations[0].outcome = NEW
    case.reload.press()
    case.switch(3)
    assert case.ended[1:] == [("", False)]


@pytest.mark.parametrize("moment", ["preparing", "meeting", "leaving", "idle"])
def test_at_the_end_nothing_is_begun_and_nothing_needed_is_given_up(moment: str) -> None:
    case = Case()
    if moment != "idle":
        case.reload.ask()
        case.reload.press()
    if moment in ("meeting", "leaving"):
        case.preparations[0].outcome = NEW
        case.reload.press()
    if moment == "leaving":
        case.switch(2)
    case.reload.give_up("the end")
    case.reload.ask()
    case.reload.press()
    problems = {"preparing": [("the end", False)], "meeting": [("the end", False)]}
    assert case.ended == problems.get(moment, [("", False)] if moment == "leaving" else [])
    assert case.preparations == []
    assert not any(each.asked for each in case.members(1))
    assert all(each.asked for each in case.members(2)) is (moment != "leaving")
    assert case.reasons == ["the daemon is about to end: there is no reload"]


@pytest.mark.parametrize(
    ("before", "after", "meaning"),
    [(False, False, "reload"), (True, True, "reload"), (True, False, "end")],
)
def test_what_a_hang_up_means(before: bool, after: bool, meaning: str) -> None:
    answers = iter([before, after])
    assert HangUp(lambda: next(answers, after)).meaning() == meaning


def test_in_place_what_starts_is_the_affair_of_the_reload() -> None:
    case = Case("in-place")
    before = next(each for each in case.running if each.role == "engine_core")
    assert not case.reload.owns(before)
    case.ask()
    case.switch(2)
    assert case.reload.owns(before), "it makes room"
    case.end(1)
    coming = next(each for each in case.running if each.role == "engine_core")
    assert case.reload.owns(coming)
    assert case.reload.is_of_now(coming)
    assert not case.reload.owns(case.front_ends[0])
    case.say(EngineReady(1, 2, 128, 64, 16, 256, "fake"))
    assert not case.reload.owns(coming)
