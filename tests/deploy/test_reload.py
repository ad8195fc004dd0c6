"""Reloads, phase by phase: preparation, start of the new generation, switch, and end."""

import signal

import pytest

from proto.codec import changed
from proto.errors import ModelError
from proto.messages.lifecycle import (
    DropEngine,
    FrontEndReady,
    NextEngine,
    NextReady,
    OldEngineIdle,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
    WorkersReady,
)
from proto.runtime.process import describe
from tests.fakes import lifecycle_messages
from tests.fakes.reload_case import NEW, Case, roles

for_one_and_several = pytest.mark.parametrize("num_engines", [1, 3])
"""What holds before the first switch; test_reload_engines.py has what follows it."""


def test_side_by_side() -> None:
    case = Case()
    case.start_reload()
    assert case.sent == [NextEngine(2, NEW, in_place=False)]
    assert roles(case.of_generation(2)) == ["worker", "worker", "engine_core"]
    assert case.epochs.epochs == [1], "the old engine still serves"
    case.receive(NextReady(1, 2))
    assert len(case.sent) == 1
    case.receive(NextReady(0, 2))
    assert case.sent[1:] == [SwitchEngine(2)]
    case.receive(Switched(1, 2))
    assert case.ended == [], "new requests may still go to the old engine"
    case.receive(Switched(0, 2))
    assert case.ended == [("", False)]
    assert (case.epochs.epochs, case.epochs.generations) == ([2], [2])
    assert case.epochs.models.model == NEW
    assert not any(case.epochs.is_current(each) for each in case.of_generation(1))
    assert all(case.epochs.is_current(each) for each in case.of_generation(2) + case.front_ends)
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(0, 1))
    assert not any(each.shutdown_requested for each in case.of_generation(1)), (
        "the other front end has requests there"
    )
    case.receive(OldEngineIdle(1, 1))
    before = [case.weights_inode(generation) for generation in (1, 2)]
    case.end_generation(1)
    assert roles(case.running) == ["worker", "worker", "engine_core"]
    assert case.weights_inode(2) == before[1]
    assert case.weights_inode(1) != before[0], "the memory of its weights is free"
    assert not any(each.shutdown_requested for each in case.running)
    case.start_reload()
    assert case.sent[-1] == NextEngine(3, NEW, in_place=False)


def test_processes_that_ignore_shutdown_are_killed() -> None:
    case = Case()
    case.start_reload()
    case.switch(2)
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.now += 3.0
    case.reload.advance()
    assert {tuple(each.signals) for each in case.of_generation(1)} == {(signal.SIGTERM,)}
    assert case.reload.seconds_to_next_step() == 1.0
    case.now += 1.0
    case.reload.advance()
    assert case.of_generation(1)[0].signals[-1] == signal.SIGKILL


@for_one_and_several
def test_a_new_generation_that_cannot_start_changes_nothing(num_engines: int) -> None:
    case = Case(num_engines=num_engines)
    case.start_reload()
    worker = case.of_generation(case.first)[0]
    assert case.report_death(worker, ModelError("config.json: no"))
    assert case.ended == [(case.named("config.json: no"), False)]
    assert case.num_new == [0]
    assert case.sent[-1] == DropEngine(case.first)
    case.end_generation(case.first)
    assert case.epochs.epochs == [*range(1, case.first)]
    assert case.epochs.models.model == lifecycle_messages.model()
    case.switch(case.first)
    assert case.sent[-1] == DropEngine(case.first), "late messages are ignored"
    case.start_reload()
    assert case.sent[-1] == NextEngine(case.first + 1, NEW, in_place=False)


def test_an_unexpected_death_is_reported_with_its_traceback() -> None:
    case = Case()
    case.start_reload()
    case.report_death(case.of_generation(2)[2], ValueError("x"))
    ((problem, _),) = case.ended
    first, *others = problem.splitlines()
    assert first == "engine 0 (pid 77) failed with ValueError: x"
    assert others == ["  ValueError: x"]


@for_one_and_several
def test_a_model_that_a_front_end_cannot_load_changes_nothing(num_engines: int) -> None:
    case = Case(num_engines=num_engines)
    case.start_reload()
    error = describe(ModelError("tokenizer.json: no"))
    case.receive(NextReady(0, case.first), NextReady(1, case.first, error))
    assert case.ended == [(case.named("tokenizer.json: no"), False)]
    assert all(each.shutdown_requested for each in case.of_generation(case.first))


@for_one_and_several
def test_an_invalid_message_of_the_new_generation_changes_nothing(num_engines: int) -> None:
    case = Case(num_engines=num_engines)
    case.start_reload()
    for epoch in range(1, case.first):
        case.receive(ProtocolViolation("worker", 0, epoch, "it sends garbage"))
    assert case.ended == [], "it was sent by an engine that serves"
    case.receive(ProtocolViolation("worker", 0, case.first, "it sends garbage"))
    assert case.ended == [(case.named("one of its processes sent an invalid message"), False)]
    case.end_generation(case.first)
    assert case.sent[-1] == DropEngine(case.first)


@for_one_and_several
def test_a_new_generation_that_is_never_ready_is_abandoned(num_engines: int) -> None:
    case = Case(num_engines=num_engines)
    case.start_reload()
    case.receive(NextReady(0, case.first))
    assert case.reload.seconds_to_next_step() == 600.0
    case.now += 600.0
    case.reload.advance()
    assert case.ended == [(case.named("it was not ready after 600 s"), False)]


def test_a_model_that_cannot_be_prepared_changes_nothing() -> None:
    case = Case()
    case.start_reload(ModelError("no such file"))
    assert case.ended == [("no such file", False)]
    assert (case.sent, case.preparations) == ([], [])


@for_one_and_several
@pytest.mark.parametrize("dies", ["front end", "engine"])
def test_a_death_before_the_switch_postpones_the_reload(dies: str, num_engines: int) -> None:
    """A serving process dies; the reload is retried once all processes are back."""
    case = Case(num_engines=num_engines)
    case.start_reload()
    last = case.of_generation(num_engines)[2]
    dead = case.front_ends[1] if dies == "front end" else last
    assert not case.report_death(dead), "the recovery handles it"
    case.recovery.note_death(dead)
    assert case.ended == [(case.named(f"{dead.name} died meanwhile"), True)]
    case.end_generation(case.first)
    assert case.num_begun == 1
    case.recovery.pop_due_restarts(case.current())
    engine = lifecycle_messages.engine_ready(epoch=case.epochs.epochs[-1])
    case.recovery.note_message(FrontEndReady(1) if dies == "front end" else engine)
    case.reload.advance()
    assert case.num_begun == 2


@for_one_and_several
def test_a_pause_before_the_switch_postpones_the_reload(num_engines: int) -> None:
    """The next new engine boots in the paused state."""
    case = Case(num_engines=num_engines)
    case.start_reload()
    case.receive(Paused(None))
    assert case.ended == [], "the pause state has not changed"
    case.receive(paused := Paused("finish_running"))
    case.recovery.note_message(paused)
    assert case.ended == [(case.named("the engine was paused or resumed meanwhile"), True)]
    case.end_generation(case.first)
    assert case.num_begun == 2
    case.preparations[0].outcome = NEW
    case.reload.advance()
    assert [each.pause_mode for each in case.boots[-3:]] == ["finish_running"] * 3
    case.receive(paused)
    case.switch(case.first + 1)
    assert case.epochs.epochs[0] == case.first + 1
    assert case.ended[1:] == ([("", False)] if num_engines == 1 else [])


def test_a_frozen_engine_is_replaced_in_place() -> None:
    """It would never finish its requests."""
    case = Case("side-by-side")
    case.recovery.note_message(Paused("freeze"))
    case.start_reload()
    assert case.sent == [NextEngine(2, NEW, in_place=True)]


def test_a_reload_requested_during_a_restart_waits() -> None:
    case = Case()
    dead = case.front_ends[0]
    case.recovery.note_death(dead)
    case.reload.request()
    case.reload.advance()
    assert case.reasons == ["a reload follows when all processes are back"]
    assert case.num_begun == 0
    case.recovery.pop_due_restarts([])
    case.recovery.note_message(FrontEndReady(0))
    case.reload.advance()
    assert case.num_begun == 1


def test_a_hung_process_delays_a_reload_before_it_is_dead() -> None:
    """Its successor already has the next epoch."""
    case = Case()
    hung = next(each for each in case.running if each.role == "engine_core")
    case.recovery.disconnect(hung)
    case.reload.request()
    assert case.reasons
    assert not case.num_begun
    case.reload.advance()
    assert not case.num_begun


def test_a_death_during_the_preparation_only_delays_the_reload() -> None:
    case = Case()
    case.reload.request()
    case.reload.advance()
    case.recovery.note_death(case.front_ends[0])
    case.preparations[0].outcome = NEW
    case.reload.advance()
    assert (case.sent, case.preparations) == ([], [])
    case.recovery.pop_due_restarts([])
    case.recovery.note_message(FrontEndReady(0))
    case.reload.advance()
    assert case.sent == [NextEngine(2, NEW, in_place=False)]


def test_the_switch_waits_until_all_processes_are_back() -> None:
    case = Case()
    case.start_reload()
    case.recovery.note_death(case.of_generation(1)[0])
    case.receive(NextReady(0, 2), NextReady(1, 2))
    assert SwitchEngine(2) not in case.sent
    case.recovery.pop_due_restarts([])
    case.recovery.note_message(WorkersReady(case.epochs.worker_epochs[0]))
    case.reload.advance()
    assert case.sent[-1] == SwitchEngine(2)


@pytest.mark.parametrize("room", [True, False])
def test_free_memory_decides_the_automatic_strategy(room: bool) -> None:
    case = Case("auto")
    case.has_room = room
    case.start_reload()
    assert case.sent == [NextEngine(2, NEW, in_place=not room)]


def test_at_most_one_more_reload_is_queued() -> None:
    case = Case()
    case.start_reload()
    case.reload.request()
    case.reload.request()
    assert case.reasons == [
        "a reload is in progress: another one follows it",
        "a reload is in progress and another one follows it already",
    ]
    case.switch(2)
    assert case.ended == [("", True)]
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.end_generation(1)
    assert case.num_begun == 2
    case.preparations[0].outcome = NEW
    case.reload.advance()
    case.switch(3)
    assert case.ended[1:] == [("", False)]


@pytest.mark.parametrize("moment", ["preparing", "meeting", "leaving", "idle"])
def test_cancel_ends_a_reload_but_keeps_serving_processes(moment: str) -> None:
    case = Case()
    if moment != "idle":
        case.reload.request()
        case.reload.advance()
    if moment in ("meeting", "leaving"):
        case.preparations[0].outcome = NEW
        case.reload.advance()
    if moment == "leaving":
        case.switch(2)
    case.reload.cancel("the end")
    case.reload.request()
    case.reload.advance()
    problems = {"preparing": [("the end", False)], "meeting": [("the end", False)]}
    assert case.ended == problems.get(moment, [("", False)] if moment == "leaving" else [])
    assert case.preparations == []
    assert not any(each.shutdown_requested for each in case.of_generation(1))
    assert all(each.shutdown_requested for each in case.of_generation(2)) is (moment != "leaving")
    assert case.reasons == ["the daemon is about to end: there is no reload"]


def test_another_model_is_served_from_now_on() -> None:
    """Later reloads without a model are of that one, and so is one that begins again."""
    case = Case()
    other = changed(NEW, name="other", source="/other")
    case.start_reload(other, model="org/other")
    case.receive(Paused("finish_running"))
    assert case.ended[-1][1], "it begins again"
    case.end_generation(2)
    case.preparations[0].outcome = other
    case.reload.advance()
    case.switch(3)
    assert case.ended[-1] == ("", False)
    assert case.names[-1] == "other"
    assert (case.prepared, case.reloaded) == (["org/other"] * 2, ["org/other"])
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.end_generation(1)
    case.start_reload(other)
    assert case.prepared[-1] is None


def test_a_model_that_the_flags_do_not_fit_changes_nothing() -> None:
    case = Case()
    case.start_reload(changed(NEW, name="unfit"), model="unfit")
    assert case.ended == [("the flags do not go with it", False)]
    assert case.names == [lifecycle_messages.model().name]
    assert case.reloaded == []
    assert case.of_generation(2) == []


def test_the_last_model_that_was_asked_for_counts() -> None:
    case = Case()
    case.start_reload(model="first")
    for model in ("second", "third", None):
        case.reload.request(model)
    case.switch(2)
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.end_generation(1)
    case.reload.advance()
    assert case.prepared == ["first", "third"]
