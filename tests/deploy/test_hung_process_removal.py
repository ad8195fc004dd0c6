"""The signals to a hung process, on a fake clock."""

import signal

import pytest

from deploy.supervisor.watchdog import DISCONNECT_SECONDS, STACKS_SECONDS, HungProcessRemoval


class Process:
    name = "worker 0"

    def __init__(self) -> None:
        self.got: list[str] = []
        self.gone = False

    def has_ended(self) -> bool:
        return self.gone

    def dump_stacks(self) -> None:
        self.got.append("stacks")

    def send_signal(self, number: signal.Signals) -> None:
        self.got.append(number.name)


def test_a_hung_process_prints_its_stacks_and_is_killed_in_a_second() -> None:
    now, process = [100.0], Process()
    removal = HungProcessRemoval(process, lambda: now[0])
    removal.send_due_signals()
    assert process.got == []
    assert removal.seconds_to_next_signal() == pytest.approx(DISCONNECT_SECONDS)
    now[0] += DISCONNECT_SECONDS
    removal.send_due_signals()
    removal.send_due_signals()
    assert process.got == ["stacks"]
    assert removal.seconds_to_next_signal() == pytest.approx(STACKS_SECONDS)
    now[0] = 101.0
    removal.send_due_signals()
    assert process.got == ["stacks", "SIGKILL"]
    assert removal.seconds_to_next_signal() is None
    assert not removal.done
    process.gone = True
    assert removal.done


def test_a_process_that_survives_sigkill_is_stuck() -> None:
    now, process = [100.0], Process()
    removal = HungProcessRemoval(process, lambda: now[0])
    now[0] += 5
    assert not removal.stuck
    now[0] += 6
    assert removal.stuck
    process.gone = True
    assert not removal.stuck
