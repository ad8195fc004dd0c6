"""Fault injection: parsing TOKEND_FAULTS; the step and incarnation at which a fault occurs."""

import pytest

from proto.errors import ConfigError
from proto.runtime.faults import (
    SLOW_SECONDS,
    Fault,
    FaultInjector,
    InjectedFaultError,
    parse_faults,
)


def test_parse_faults():
    assert parse_faults("") == ()
    assert parse_faults("worker:raise@20, engine:kill@50x2,worker3:nan@1") == (
        Fault("worker", 0, "raise", 20),
        Fault("engine_core", 0, "kill", 50, 2),
        Fault("worker", 3, "nan", 1),
    )


@pytest.mark.parametrize("text", ["worker", "api:kill@1", "engine:nan@1", "worker:kill", "a:b@c"])
def test_malformed_faults_are_a_configuration_error(text):
    with pytest.raises(ConfigError, match="TOKEND_FAULTS"):
        parse_faults(text)


def test_raise_occurs_once_at_its_step():
    injector = FaultInjector([Fault("worker", 0, "raise", 3)])
    injector.begin_step()
    injector.begin_step()
    with pytest.raises(InjectedFaultError):
        injector.begin_step()
    injector.begin_step()


def test_nan_lasts_one_step_and_slow_persists(monkeypatch):
    slept = []
    monkeypatch.setattr("proto.runtime.faults.time.sleep", slept.append)
    faults = [Fault("worker", 0, "nan", 2), Fault("worker", 0, "slow", 2)]
    injector = FaultInjector(faults)
    injected = []
    for _ in range(4):
        injector.begin_step()
        injected.append(injector.injects_nan)
    assert injected == [False, True, False, False]
    assert slept == [SLOW_SECONDS] * 3


def test_a_fault_applies_to_one_process_and_a_number_of_incarnations():
    faults = parse_faults("worker1:kill@5x2")
    assert not FaultInjector.of(faults, "worker", 1, 1).idle
    assert FaultInjector.of(faults, "worker", 1, 2).idle
    assert FaultInjector.of(faults, "worker", 0, 0).idle
    assert FaultInjector.of(faults, "engine_core", 1, 0).idle
