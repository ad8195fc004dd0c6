"""When a drain is over: without processes, on a fake clock."""

from dataclasses import dataclass, field

from deploy.supervisor.shutdown import Draining, NotDraining
from proto.lifecycle import DrainProgress


@dataclass
class Notices:
    lines: list[str] = field(default_factory=list)

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        raise AssertionError("a drain has no progress")

    def notice(self, message: str, who: str = "tokend") -> None:
        self.lines.append(message)


class Case:
    """A drain of two front ends that may take 30 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.notices = Notices()
        self.draining = Draining(range(2), 30.0, self.notices, lambda: self.now)

    def note(self, index: int, number: int) -> None:
        self.draining.note(DrainProgress(index, number))


def test_an_idle_daemon_waits_for_the_word_of_every_front_end() -> None:
    case = Case()
    assert not case.draining.over
    case.note(0, 0)
    assert not case.draining.over
    case.note(1, 0)
    assert case.draining.over
    case.draining.report_left()
    assert case.notices.lines == []


def test_requests_are_told_of_once_and_waited_for() -> None:
    case = Case()
    case.note(0, 3)
    assert case.notices.lines == [], "the other one has not said anything"
    case.note(1, 1)
    assert case.notices.lines == [
        "4 requests under way may finish within 30 s, new ones are refused; "
        "a second signal aborts them"
    ]
    case.note(1, 0)
    assert not case.draining.over
    case.note(0, 0)
    assert case.draining.over
    assert len(case.notices.lines) == 1


def test_the_time_ends_it_whoever_has_not_spoken() -> None:
    case = Case()
    case.note(0, 1)
    case.now += 29.0
    assert (case.draining.over, case.draining.seconds_left()) == (False, 1.0)
    case.now += 1.0
    assert case.draining.over
    case.draining.report_left()
    assert case.notices.lines == ["1 request not finished: aborted"]


def test_who_does_not_drain_is_never_done() -> None:
    idle = NotDraining()
    idle.note(DrainProgress(0, 0))
    assert (idle.begun, idle.over, idle.seconds_left()) == (False, False, None)
