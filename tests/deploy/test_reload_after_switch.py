"""Failures after the switch of a reload, while the old generation finishes its requests."""

from typing import Literal

import pytest

from proto.codec import Message
from proto.messages.lifecycle import (
    DropEngine,
    NextReady,
    OldEngineIdle,
    Paused,
    ProtocolViolation,
    Switched,
    SwitchEngine,
)
from tests.fakes.reload_case import Case


def switched() -> Case:
    """Return a reload after the switch; the old engine has requests of both front ends."""
    case = Case()
    case.start_reload()
    case.switch(2)
    return case


def test_a_front_end_that_dies_during_the_switch_boots_with_the_new_engine() -> None:
    case = Case()
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    case.receive(Switched(0, 2))
    assert not case.report_death(case.front_ends[1])
    assert case.ended == [("", False)]
    assert case.epochs.make_boot("api_server", 1).epoch == 2


def test_the_old_engine_may_die_during_the_switch() -> None:
    case = Case()
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    assert case.report_death(case.of_generation(1)[2])
    assert case.sent[-2:] == [SwitchEngine(2), DropEngine(1)]
    assert case.ended == [("", False)]


def test_requests_of_a_dead_front_end_do_not_keep_the_old_engine() -> None:
    case = switched()
    case.receive(OldEngineIdle(0, 1))
    assert not case.report_death(case.front_ends[1])
    assert all(each.shutdown_requested for each in case.of_generation(1))


def received(case: Case) -> dict[tuple[str, int], list[Message]]:
    return {(each.role, each.generation): each.received for each in case.running if each.received}


def test_a_pause_reaches_both_engines() -> None:
    """A front end that has not switched yet pauses only the old engine."""
    case = switched()
    case.receive(Paused("freeze"), Paused(None))
    pauses = [Paused("freeze"), Paused(None)]
    assert received(case) == {("engine_core", 1): pauses, ("engine_core", 2): pauses}


def test_a_pause_in_transit_at_the_switch_reaches_the_new_engine() -> None:
    """The supervisor receives it when no front end has open requests at the old engine."""
    case = switched()
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.receive(Paused("finish_running"))
    assert received(case)["engine_core", 2] == [Paused("finish_running")]
    assert case.epochs.make_boot("engine_core", 0).pause_mode == "finish_running"


def test_a_pause_in_transit_during_an_in_place_reload_applies_to_the_new_engine() -> None:
    case = Case("in-place")
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    case.receive(Paused("freeze"))
    case.end_generation(1)
    assert [each.pause_mode for each in case.boots[-3:]] == ["freeze"] * 3


def test_an_old_engine_that_dies_is_not_replaced() -> None:
    case = switched()
    assert case.report_death(case.of_generation(1)[2])
    assert case.sent[-1] == DropEngine(1)
    case.end_generation(1)
    case.start_reload()
    assert case.num_begun == 2


def test_the_recovery_handles_deaths_of_the_new_engine() -> None:
    case = switched()
    assert not case.report_death(case.of_generation(2)[2])
    assert case.sent[-1] == SwitchEngine(2)


def test_a_hung_old_process_is_disconnected_before_it_is_dead() -> None:
    for hung in range(3):
        case = switched()
        assert case.reload.disconnect(case.of_generation(1)[hung])
        assert case.sent[-1] == DropEngine(1)
        assert all(case.reload.is_stopping(each) for each in case.of_generation(1))
        case.end_generation(1)
        assert case.sent.count(DropEngine(1)) == 1
        case.start_reload()
        assert case.num_begun == 2


def test_the_recovery_handles_hangs_outside_the_old_generation() -> None:
    case = switched()
    for hung in (*case.of_generation(2), case.front_ends[0]):
        assert not case.reload.disconnect(hung)
    assert case.sent[-1] == SwitchEngine(2)
    assert not any(case.reload.is_stopping(each) for each in case.running)


@pytest.mark.parametrize("role", ["engine_core", "worker"])
def test_an_invalid_message_of_the_old_generation_ends_it_at_once(
    role: Literal["engine_core", "worker"],
) -> None:
    case = switched()
    case.receive(ProtocolViolation(role, 0, 2, "it sends garbage"))
    assert case.sent[-1] == SwitchEngine(2), "it was sent by the serving generation"
    case.receive(ProtocolViolation(role, 0, 1, "it sends garbage"))
    assert case.sent[-1] == DropEngine(1)
    case.end_generation(1)
    assert all(not each.shutdown_requested for each in case.of_generation(2))
