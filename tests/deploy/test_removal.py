"""How a hanging process is taken away: what is done to it, and when."""

import signal

import pytest

from deploy.supervisor.watchdog import CUT_OFF_SECONDS, STACKS_SECONDS, Removal


class Process:
    name = "worker 0"

    def __init__(self) -> None:
        self.got: list[str] = []
        self.gone = False

    def has_ended(self) -> bool:
        return self.gone

    def show_stacks(self) -> None:
        self.got.append("stacks")

    def signal(self, number: signal.Signals) -> None:
        self.got.append(number.name)


def test_it_is_left_alone_until_it_is_cut_off_then_shown_then_killed_within_a_second() -> None:
    now, process = [100.0], Process()
    removal = Removal(process, lambda: now[0])
    removal.press()
    assert process.got == []
    assert removal.seconds_to_next_step() == pytest.approx(CUT_OFF_SECONDS)
    now[0] += CUT_OFF_SECONDS
    removal.press()
    removal.press()
    assert process.got == ["stacks"]
    assert removal.seconds_to_next_step() == pytest.approx(STACKS_SECONDS)
    now[0] = 101.0
    removal.press()
    assert process.got == ["stacks", "SIGKILL"]
    assert removal.seconds_to_next_step() is None
    assert not removal.done
    process.gone = True
    assert removal.done


def test_whom_not_even_that_ends_is_overdue() -> None:
    now, process = [100.0], Process()
    removal = Removal(process, lambda: now[0])
    now[0] += 5
    assert not removal.overdue
    now[0] += 6
    assert removal.overdue
    process.gone = True
    assert not removal.overdue
