"""Reloads after the switch: the old generation is left, and something goes wrong."""

from typing import Literal

import pytest

from proto.codec import Message
from proto.lifecycle import (
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
    """The old engine has requests of both front ends."""
    case = Case()
    case.start_reload()
    case.switch(2)
    return case


def test_a_front_end_that_dies_while_it_switches_is_born_with_the_new_engine() -> None:
    case = Case()
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    case.receive(Switched(0, 2))
    assert not case.report_death(case.front_ends[1])
    assert case.ended == [("", False)]
    assert case.epochs.make_boot("api_server", 1).epoch == 2


def test_the_old_engine_dies_while_front_ends_switch() -> None:
    case = Case()
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    assert case.report_death(case.of_generation(1)[2])
    assert case.sent[-2:] == [SwitchEngine(2), DropEngine(1)]
    assert case.ended == [("", False)]


def test_with_a_front_end_its_requests_have_left() -> None:
    case = switched()
    case.receive(OldEngineIdle(0, 1))
    assert not case.report_death(case.front_ends[1])
    assert all(each.shutdown_requested for each in case.of_generation(1))


def heard(case: Case) -> dict[tuple[str, int], list[Message]]:
    return {(each.role, each.generation): each.received for each in case.running if each.received}


def test_who_pauses_the_daemon_pauses_both_engines_whichever_was_asked() -> None:
    """A front end that had not heard of the switch asks the one of before, and nobody else."""
    case = switched()
    case.receive(Paused("freeze"), Paused(None))
    said = [Paused("freeze"), Paused(None)]
    assert heard(case) == {("engine_core", 1): said, ("engine_core", 2): said}


def test_a_pause_that_was_on_its_way_at_the_switch_reaches_the_engine_of_now() -> None:
    """Its supervisor hears of it when no front end has anything open at the old engine."""
    case = switched()
    case.receive(OldEngineIdle(0, 1), OldEngineIdle(1, 1))
    case.receive(Paused("finish_running"))
    assert heard(case)["engine_core", 2] == [Paused("finish_running")]
    assert case.epochs.make_boot("engine_core", 0).pause_mode == "finish_running"


def test_a_pause_that_was_on_its_way_when_an_engine_made_room_is_born_with_the_next() -> None:
    case = Case("in-place")
    case.start_reload()
    case.receive(NextReady(0, 2), NextReady(1, 2))
    case.receive(Paused("freeze"))
    case.end_generation(1)
    assert [each.pause_mode for each in case.boots[-3:]] == ["freeze"] * 3


def test_an_engine_that_dies_while_it_is_left_is_not_replaced() -> None:
    case = switched()
    assert case.report_death(case.of_generation(1)[2])
    assert case.sent[-1] == DropEngine(1)
    case.end_generation(1)
    case.start_reload()
    assert case.num_begun == 2


def test_the_engine_of_now_is_the_affair_of_others() -> None:
    case = switched()
    assert not case.report_death(case.of_generation(2)[2])
    assert case.sent[-1] == SwitchEngine(2)


def test_whoever_hangs_is_cut_off_and_its_requests_go_on_before_it_is_dead() -> None:
    for hung in range(3):
        case = switched()
        assert case.reload.disconnect(case.of_generation(1)[hung])
        assert case.sent[-1] == DropEngine(1)
        assert all(case.reload.is_stopping(each) for each in case.of_generation(1))
        case.end_generation(1)
        assert case.sent.count(DropEngine(1)) == 1
        case.start_reload()
        assert case.num_begun == 2


def test_a_hang_elsewhere_is_the_affair_of_others() -> None:
    case = switched()
    for hung in (*case.of_generation(2), case.front_ends[0]):
        assert not case.reload.disconnect(hung)
    assert case.sent[-1] == SwitchEngine(2)
    assert not any(case.reload.is_stopping(each) for each in case.running)


@pytest.mark.parametrize("role", ["engine_core", "worker"])
def test_one_that_is_not_to_be_trusted_is_left_at_once(
    role: Literal["engine_core", "worker"],
) -> None:
    case = switched()
    case.receive(ProtocolViolation(role, 0, 2, "it babbles"))
    assert case.sent[-1] == SwitchEngine(2), "of the generation of now"
    case.receive(ProtocolViolation(role, 0, 1, "it babbles"))
    assert case.sent[-1] == DropEngine(1)
    case.end_generation(1)
    assert all(not each.shutdown_requested for each in case.of_generation(2))
