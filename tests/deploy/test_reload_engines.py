"""Reloads of several engines over fake processes: unchanged files, changed ones, and in place."""

import pytest

from proto.codec import Message
from proto.errors import ModelError
from proto.messages.lifecycle import (
    DropEngine,
    FrontEndReady,
    NewEngine,
    NextEngine,
    NextReady,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
)
from tests.fakes import lifecycle_messages
from tests.fakes.reload_case import NEW, Case

SAME = lifecycle_messages.model()


def begun(num_engines: int = 3) -> Case:
    """Return a reload with unchanged files whose engine 0 is new, and whose engine 1 starts."""
    case = Case(num_engines=num_engines)
    case.start_reload(SAME)
    case.switch(case.first)
    case.become_idle(1)
    case.end_generation(1)
    case.reload.advance()
    assert case.sent[-1] == NextEngine(case.first + 1, None, in_place=False, engine=1)
    return case


def changed_model(num_engines: int = 3) -> Case:
    """Return a reload with changed files after the first switch, which is that of all engines."""
    case = Case(num_engines=num_engines)
    case.start_reload(NEW)
    case.switch(case.first)
    return case


# ---- Unchanged files ----


def test_engines_are_replaced_one_after_the_other() -> None:
    case = Case(num_engines=3)
    case.start_reload(SAME)
    for engine in range(3):
        epoch, model = 4 + engine, None if engine else SAME
        assert case.sent[-1] == NextEngine(epoch, model, in_place=False, engine=engine)
        assert [each.index for each in case.boots[-3:]] == [2 * engine, 2 * engine + 1, engine]
        assert {each.epoch for each in case.boots[-3:]} == {epoch}
        case.receive(NextReady(0, epoch), NextReady(1, epoch))
        assert case.sent[-1] == SwitchEngine(epoch, engine)
        assert case.ended == [], "the last engine is not new yet"
        case.receive(Switched(0, epoch), Switched(1, epoch))
        others = [each for each in case.running if each.engine != engine]
        assert all(case.epochs.is_current(each) for each in others), "they serve"
        case.become_idle(engine + 1)
        case.end_generation(engine + 1)
        case.reload.advance()
    assert (case.ended, case.num_new) == ([("", False)], [3])
    assert case.epochs.epochs == case.epochs.generations == [4, 5, 6]
    assert {each.generation for each in case.running} == {4, 5, 6}
    assert case.recovery.not_ready() == []
    assert case.prepared == [None]


def test_a_later_engine_that_cannot_start_ends_the_reload() -> None:
    """It is named, and the engines that are new and those that are old serve on."""
    case = begun()
    assert case.report_death(case.of_generation(5)[0], ModelError("no weights"))
    assert (case.ended, case.num_new) == ([("engine 1: no weights", False)], [1])
    assert case.sent[-1] == DropEngine(5)
    case.end_generation(5)
    assert case.epochs.epochs == [4, 2, 3]
    assert not any(each.shutdown_requested for each in case.running)
    case.start_reload(SAME)
    assert case.sent[-1] == NextEngine(6, SAME, in_place=False)


@pytest.mark.parametrize("dies", ["front end", "old engine", "new engine"])
def test_after_a_death_a_later_engine_begins_again(dies: str) -> None:
    case = begun()
    engines = {"old engine": case.of_generation(3)[2], "new engine": case.of_generation(4)[2]}
    dead = case.front_ends[1] if dies == "front end" else engines[dies]
    assert not case.report_death(dead), "the recovery handles it"
    case.recovery.note_death(dead)
    assert case.sent[-1] == DropEngine(5)
    case.end_generation(5)
    case.reload.advance()
    assert case.sent[-1] == DropEngine(5), "it waits for the other process"
    epochs = case.run_recovery()
    back = lifecycle_messages.engine_ready(epoch=epochs[0]) if epochs else FrontEndReady(1)
    case.recovery.note_message(back)
    case.reload.advance()
    begins = case.sent[-1]
    assert isinstance(begins, NextEngine)
    assert (begins.engine, begins.model) == (1, None)
    assert case.ended == []


def test_after_a_pause_a_later_engine_begins_again_paused() -> None:
    case = begun()
    case.receive(paused := Paused("finish_running"))
    case.recovery.note_message(paused)
    case.end_generation(5)
    case.reload.advance()
    assert case.sent[-1] == NextEngine(6, None, in_place=False, engine=1)
    assert [each.pause_mode for each in case.boots[-3:]] == ["finish_running"] * 3
    assert case.ended == []


def test_the_old_engine_of_a_place_that_dies_is_not_restarted() -> None:
    case = begun()
    case.switch(5)
    assert case.report_death(case.of_generation(2)[2])
    assert case.sent[-1] == DropEngine(2)
    case.end_generation(2)
    case.reload.advance()
    assert case.sent[-1] == NextEngine(6, None, in_place=False, engine=2)


def test_no_further_engine_begins_when_the_daemon_ends() -> None:
    case = Case(num_engines=2)
    case.start_reload(SAME)
    case.switch(3)
    case.reload.cancel("the end")
    case.become_idle(1)
    case.end_generation(1)
    case.reload.advance()
    assert (case.ended, case.num_new) == ([("the end", False)], [1])
    assert case.sent[-1] == SwitchEngine(3)
    assert case.epochs.epochs == [3, 2]


def with_resting(num_engines: int, *resting: int) -> Case:
    """Return a case in which an error of the model has ended these engines, but not their workers.

    They rest before they are restarted.
    """
    case = Case(num_engines=num_engines)
    for engine in resting:
        dead = case.of_generation(engine + 1)[2]
        assert not case.report_death(dead, ModelError("no weights"))
        case.recovery.note_death(dead)
        assert case.recovery.rests(engine)
    return case


def test_an_engine_that_rests_is_replaced_first() -> None:
    """A reload does not wait for it. Its workers that are left end."""
    case = with_resting(2, 1)
    case.start_reload(SAME)
    assert case.sent == [NewEngine(3, 3, died=False, engine=1)]
    case.end_generation(2)
    assert case.sent[-1] == NextEngine(4, SAME, in_place=False, engine=1)
    case.switch(4)
    assert (case.recovery.not_ready(), case.recovery.has_outages) == ([], False)
    case.become_idle(3)
    case.reload.advance()
    case.reload.advance()
    assert case.sent[-1] == NextEngine(5, None, in_place=False, engine=0)
    case.switch(5)
    assert case.ended == [("", False)]
    assert case.epochs.epochs == [5, 4]


def test_requests_for_a_changed_model_do_not_go_to_an_engine_that_rests() -> None:
    case = with_resting(3, 1, 2)
    case.start_reload(NEW)
    case.end_generation(2)
    case.receive(NextReady(0, 5), NextReady(1, 5))
    assert case.sent[-2:] == [SwitchEngine(5, 1, (6, 5, 7)), DropEngine(3)]
    case.receive(Switched(0, 5), Switched(1, 5))
    case.end_generation(3)
    assert case.run_recovery() == [7]
    case.report_ready(7)
    case.become_idle(1)
    case.end_generation(1)
    assert case.run_recovery() == [6]
    case.report_ready(6)
    assert case.ended == [("", False)]


# ---- Changed files ----


def test_the_first_switch_to_a_changed_model_is_that_of_all_engines() -> None:
    """The others start one at a time, when the old ones have finished their requests."""
    case = Case(num_engines=3)
    case.start_reload(NEW)
    case.receive(NextReady(0, 4), NextReady(1, 4))
    assert case.sent[-1] == SwitchEngine(4, 0, (4, 5, 6))
    assert (case.epochs.epochs, case.epochs.models.model) == ([4, 5, 6], NEW)
    case.receive(Switched(0, 4), Switched(1, 4))
    assert not any(each.shutdown_requested for each in case.running)
    assert {each.engine: each.rests for each in case.recovery.not_ready()} == {1: True, 2: True}
    assert case.run_recovery() == []
    case.become_idle(2)
    case.become_idle(3)
    case.end_generation(2)
    case.end_generation(3)
    assert case.run_recovery() == [5]
    case.reload.advance()
    assert case.run_recovery() == [], "the memory for one of them is known when the other has its"
    case.report_ready(5)
    assert case.run_recovery() == [6]
    assert case.ended == []
    case.report_ready(6)
    assert (case.ended, case.num_new) == ([("", False)], [3])
    assert case.announced == [], "front ends know these engines, and no restart is counted"
    assert {each.model for each in case.boots[-6:]} == {NEW}
    assert case.recovery.not_ready() == []
    case.become_idle(1)
    case.end_generation(1)
    assert {each.generation for each in case.running} == {4, 5, 6}
    case.start_reload(NEW)
    assert case.sent[-1] == NextEngine(7, NEW, in_place=False)


@pytest.mark.parametrize("generation", [1, 2, 3])
def test_an_old_engine_that_dies_is_not_restarted(generation: int) -> None:
    case = changed_model()
    dead = case.of_generation(generation)[0]
    assert case.report_death(dead)
    assert case.sent[-1] == DropEngine(generation)
    stopping = [each for each in case.running if each.shutdown_requested]
    assert {each.generation for each in stopping} == {generation}
    case.end_generation(generation)
    assert case.run_recovery() == ([] if generation == 1 else [3 + generation])


def test_an_old_engine_that_hangs_or_sends_garbage_ends_alone() -> None:
    case = changed_model()
    assert case.reload.disconnect(case.of_generation(3)[1])
    assert case.sent[-1] == DropEngine(3)
    case.receive(ProtocolViolation("engine_core", 1, 2, "it sends garbage"))
    assert case.sent[-1] == DropEngine(2)
    stopping = {each.generation for each in case.running if case.reload.is_stopping(each)}
    assert stopping == {2, 3}
    new = case.of_generation(4)[2]
    assert not case.reload.disconnect(new)
    assert not case.report_death(new), "the recovery handles it"


def test_a_later_engine_that_cannot_load_a_changed_model_is_named() -> None:
    """The recovery tries again later; the others have the new model."""
    case = changed_model()
    case.become_idle(2)
    case.end_generation(2)
    assert case.run_recovery() == [5]
    dead = case.of_generation(5)[1]
    assert not case.report_death(dead, ModelError("no weights"))
    assert case.recovery.can_restart(dead)
    case.recovery.note_death(dead)
    assert case.ended == [], "engine 2 has not begun"
    case.become_idle(3)
    case.end_generation(3)
    assert case.run_recovery() == [6]
    case.report_ready(6)
    assert (case.ended, case.num_new) == ([("engine 1: no weights", False)], [2])
    assert (case.names, case.reloaded) == ([NEW.name], [None])
    assert case.recovery.rests(1)


def test_a_pause_reaches_old_and_new_engines() -> None:
    case = changed_model()
    case.receive(Paused("freeze"))
    got: dict[int, list[Message]] = {}
    for each in case.running:
        if each.received:
            got[each.generation] = each.received
    assert got == {number: [Paused("freeze")] * len(got[number]) for number in (1, 2, 3, 4)}
    assert case.epochs.make_boot("engine_core", 1).pause_mode == "freeze"


def test_no_new_model_is_loaded_when_the_daemon_ends() -> None:
    case = changed_model()
    case.reload.cancel("the end")
    case.become_idle(2)
    case.end_generation(2)
    case.reload.advance()
    assert case.run_recovery() == []
    assert not any(each.shutdown_requested for each in case.of_generation(3))


# ---- In place ----


def test_in_place_requests_continue_at_the_others() -> None:
    """Each engine ends first; after that all is as side by side."""
    case = Case("in-place", num_engines=2)
    case.start_reload(SAME)
    for engine in range(2):
        emptied, epoch = 3 + 2 * engine, 4 + 2 * engine
        assert case.sent[-1] == NewEngine(emptied, emptied, died=False, engine=engine)
        assert all(each.shutdown_requested for each in case.of_generation(engine + 1))
        assert {each.engine for each in case.recovery.not_ready() if each.rests} == {engine}
        assert case.run_recovery() == []
        case.end_generation(engine + 1)
        assert case.sent[-1] == NextEngine(
            epoch, None if engine else SAME, in_place=False, engine=engine
        )
        case.switch(epoch)
        assert SwitchEngine(epoch, engine) in case.sent
        case.become_idle(emptied)
        case.reload.advance()
        case.reload.advance()
    assert (case.ended, case.num_new) == ([("", False)], [2])
    assert case.epochs.epochs == [4, 6]
    assert case.recovery.not_ready() == []


@pytest.mark.parametrize("model", [SAME, NEW])
def test_in_place_the_present_model_returns_if_the_first_engine_fails(model: object) -> None:
    case = Case("in-place", num_engines=2)
    case.start_reload(model)
    case.end_generation(1)
    assert case.report_death(case.of_generation(4)[0], ModelError("no weights"))
    assert (case.ended, case.num_new) == ([("engine 0: no weights", False)], [0])
    assert case.run_recovery() == [], "the other processes still have the memory"
    case.end_generation(4)
    assert case.run_recovery() == [3]
    assert {each.model for each in case.boots[-3:]} == {SAME}
    assert case.announced == []
    case.report_ready(3)
    assert case.recovery.not_ready() == []


def test_in_place_a_death_begins_the_engine_again_without_its_old_model() -> None:
    case = Case("in-place", num_engines=2)
    case.start_reload(NEW)
    case.end_generation(1)
    dead = case.of_generation(2)[2]
    assert not case.report_death(dead)
    case.recovery.note_death(dead)
    case.end_generation(4)
    assert case.run_recovery() == [5]
    case.recovery.note_message(lifecycle_messages.engine_ready(epoch=5))
    case.reload.advance()
    case.reload.advance()
    assert case.sent[-1] == NextEngine(7, NEW, in_place=False)
    assert case.ended == []


def test_in_place_an_engine_that_has_ended_returns_when_the_daemon_ends() -> None:
    """The drain may take long, and its requests are at the others."""
    case = Case("in-place", num_engines=2)
    case.start_reload(SAME)
    case.reload.cancel("the end")
    case.end_generation(1)
    assert case.ended == [("the end", False)]
    assert case.run_recovery() == [3]
