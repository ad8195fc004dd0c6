"""Faults on purpose: what is asked for, in which life, at which step."""

import pytest

from proto.errors import ConfigError
from proto.faults import SLOW_SECONDS, Fault, FaultInjector, InjectedFaultError, parse_faults


def test_the_text_form():
    assert parse_faults("") == ()
    assert parse_faults("worker:raise@20, engine:kill@50x2,worker3:nan@1") == (
        Fault("worker", 0, "raise", 20),
        Fault("engine_core", 0, "kill", 50, 2),
        Fault("worker", 3, "nan", 1),
    )


@pytest.mark.parametrize("text", ["worker", "api:kill@1", "engine:nan@1", "worker:kill", "a:b@c"])
def test_what_is_no_fault(text):
    with pytest.raises(ConfigError, match="TOKEND_FAULTS"):
        parse_faults(text)


def test_it_comes_at_its_step_and_not_again():
    saboteur = FaultInjector([Fault("worker", 0, "raise", 3)])
    saboteur.begin_step()
    saboteur.begin_step()
    with pytest.raises(InjectedFaultError):
        saboteur.begin_step()
    saboteur.begin_step()


def test_numbers_break_for_one_step_and_slowness_stays():
    slept = []
    faults = [Fault("worker", 0, "nan", 2), Fault("worker", 0, "slow", 2)]
    saboteur = FaultInjector(faults, slept.append)
    broken = []
    for _ in range(4):
        saboteur.begin_step()
        broken.append(saboteur.breaks_numbers)
    assert broken == [False, True, False, False]
    assert slept == [SLOW_SECONDS] * 3


def test_it_is_meant_for_one_process_and_so_many_lives():
    faults = parse_faults("worker1:kill@5x2")
    assert not FaultInjector.of(faults, "worker", 1, 1).idle
    assert FaultInjector.of(faults, "worker", 1, 2).idle
    assert FaultInjector.of(faults, "worker", 0, 0).idle
    assert FaultInjector.of(faults, "engine_core", 1, 0).idle
