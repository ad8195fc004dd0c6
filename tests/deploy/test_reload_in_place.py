"""Reloads in place, phase by phase: one generation after the other."""

from proto import PROTOCOL_VERSION
from proto.errors import ModelError
from proto.messages.lifecycle import DropEngine, EngineReady, NewEngine, NextEngine, SwitchEngine
from tests.fakes import lifecycle_messages
from tests.fakes.reload_case import NEW, Case, roles


def test_in_place() -> None:
    case = Case("in-place")
    case.start_reload()
    assert case.sent == [NextEngine(2, NEW, in_place=True)]
    assert case.of_generation(2) == []
    case.switch(2)
    assert case.sent[1:] == [NewEngine(2, 2, died=False)]
    assert case.ended == []
    case.end_generation(1)
    assert roles(case.of_generation(2)) == ["worker", "worker", "engine_core"]
    case.receive(EngineReady(PROTOCOL_VERSION, 2, 1, 1, 1, 1, "x"))
    assert case.sent[-1] == SwitchEngine(2)
    assert case.ended == [("", False)]
    assert not case.report_death(case.of_generation(2)[0]), "the recovery handles it"


def test_in_place_returns_to_the_old_model_if_the_new_one_fails() -> None:
    case = Case("in-place")
    case.start_reload()
    case.switch(2)
    case.end_generation(1)
    worker, other, engine = case.of_generation(2)
    assert case.report_death(worker, ModelError("no weights"))
    assert case.ended == [("no weights", False)]
    assert case.sent[-2:] == [DropEngine(2), NewEngine(3, 3, died=False)]
    assert (other.shutdown_requested, engine.shutdown_requested) == (True, True)
    case.end_generation(2)
    assert roles(case.of_generation(3)) == ["worker", "worker", "engine_core"]
    assert (case.epochs.models.model, case.epochs.generations) == (lifecycle_messages.model(), [3])
    assert not case.report_death(case.of_generation(3)[0]), "there is no other model to return to"


def test_in_place_the_reload_handles_deaths_of_starting_processes() -> None:
    case = Case("in-place")
    before = next(each for each in case.running if each.role == "engine_core")
    assert not case.reload.handles_death_of(before)
    case.start_reload()
    case.switch(2)
    assert case.reload.handles_death_of(before), "it must end for the new generation"
    case.end_generation(1)
    coming = next(each for each in case.running if each.role == "engine_core")
    assert case.reload.handles_death_of(coming)
    assert case.epochs.is_current(coming)
    assert not case.reload.handles_death_of(case.front_ends[0])
    case.receive(EngineReady(1, 2, 128, 64, 16, 256, "fake"))
    assert not case.reload.handles_death_of(coming)
