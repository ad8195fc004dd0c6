"""Adapters and engines that come later: after a death, by a reload, beside the old engine."""

from proto.codec import changed
from proto.messages.lifecycle import NewEngine, NextReady, Switched
from proto.messages.lora import AdapterCard, AdapterList
from tests.fakes.lora import lora_request
from tests.fakes.reload_case import NEW, Case


def names(epoch: int, *numbers: int) -> AdapterList:
    return AdapterList(epoch, [AdapterCard(lora_request(each), 8, 1) for each in numbers])


def numbers_of(case: Case) -> list[tuple[int, ...] | None]:
    """Return the adapters that the last engine and its workers were started with."""
    return [
        each.adapters and tuple(card.lora.lora_int_id for card in each.adapters)
        for each in case.boots[-3:]
    ]


def test_an_engine_after_a_dead_one_has_the_names() -> None:
    case = Case()
    assert case.epochs.make_boot("engine_core", 0).adapters is None, "it loads --lora-modules"
    case.recovery.note_message(names(1, 3, 4))
    case.epochs.new_engine(0)
    boot = case.epochs.make_boot("engine_core", 0)
    assert boot.adapters == tuple(names(1, 3, 4).adapters)
    case.recovery.note_message(names(1))  # the last message of the dead engine
    assert case.epochs.make_boot("engine_core", 0).adapters == ()


def test_a_new_engine_has_the_names() -> None:
    """Side by side and in place."""
    for strategy in ("side-by-side", "in-place"):
        case = Case(strategy)
        case.recovery.note_message(names(1, 3))
        case.start_reload(changed(NEW, source=case.epochs.models.model.source))
        case.receive(NextReady(0, 2), NextReady(1, 2))
        if strategy == "in-place":
            assert any(isinstance(each, NewEngine) for each in case.sent)
            case.end_generation(1)
        assert numbers_of(case) == [(3,)] * 3


def test_another_model_has_no_adapters_of_this_one() -> None:
    case = Case()
    case.recovery.note_message(names(1, 3))
    case.start_reload(changed(NEW, source="/other"), model="/other")
    assert numbers_of(case) == [None] * 3
    case.receive(names(2, 5))  # what it loads at its start
    case.switch(2)
    assert list((case.epochs.adapters or {}).values()) == names(2, 5).adapters


def test_a_load_before_the_switch_postpones_the_reload() -> None:
    """The new engine was started without it."""
    case = Case()
    case.start_reload()
    case.receive(loaded := names(1, 3))
    case.recovery.note_message(loaded)
    assert case.ended == [("adapters were loaded or unloaded meanwhile", True)]
    case.end_generation(2)
    case.preparations[0].outcome = NEW
    case.reload.advance()
    assert numbers_of(case) == [(3,)] * 3


def test_a_load_through_a_front_end_that_has_not_switched_reaches_the_new_engine() -> None:
    case = Case()
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2), Switched(0, 2))
    late = names(1, 3)
    case.receive(late)
    (engine,) = [each for each in case.of_generation(2) if each.role == "engine_core"]
    assert engine.received == [late]
    assert list((case.epochs.adapters or {}).values()) == late.adapters


def change(epoch: int, number: int, *removed: str) -> AdapterList:
    return AdapterList(epoch, names(epoch, number).adapters, is_change=True, removed=list(removed))


def test_later_engines_have_all_names_though_only_changes_are_sent() -> None:
    """After a death, and beside the old engine, whose changes the new one gets as a whole list."""
    case = Case()
    case.recovery.note_message(names(1, 3, 4))
    case.recovery.note_message(change(1, 5, "adapter-3"))
    boot = case.epochs.make_boot("engine_core", 0)
    assert boot.adapters == tuple(names(1, 4, 5).adapters)
    case.start_reload(changed(NEW, source=case.epochs.models.model.source))
    case.receive(NextReady(0, 2), NextReady(1, 2), Switched(0, 2))
    case.receive(change(1, 6, "adapter-4"))
    (engine,) = [each for each in case.of_generation(2) if each.role == "engine_core"]
    assert engine.received == [names(1, 5, 6)]
    assert list((case.epochs.adapters or {}).values()) == names(1, 5, 6).adapters


def test_a_reload_that_fails_keeps_the_names_of_the_old_engine() -> None:
    case = Case()
    case.recovery.note_message(names(1, 3))
    case.start_reload(changed(NEW, source=case.epochs.models.model.source))
    case.receive(change(2, 9))
    case.receive(change(1, 4))  # which ends the reload
    case.recovery.note_message(change(1, 4))
    assert list((case.epochs.adapters or {}).values()) == names(1, 3, 4).adapters
