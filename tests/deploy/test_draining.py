"""The end of a drain, without processes and on a fake clock."""

from dataclasses import dataclass, field

from deploy.supervisor.shutdown import RequestDrain
from proto.lifecycle import DrainProgress


@dataclass
class Notices:
    lines: list[str] = field(default_factory=list)

    def progress(
        self,
        what: str,
        fraction: float | None = None,
        process: str = "tokend",
        *,
        detail: str = "",
    ) -> None:
        raise AssertionError("a drain has no progress")

    def notice(self, message: str, process: str = "tokend") -> None:
        self.lines.append(message)


class Case:
    """A drain of two front ends that may take 30 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.notices = Notices()
        self.draining = RequestDrain(range(2), 30.0, self.notices, lambda: self.now)

    def note(self, index: int, number: int) -> None:
        self.draining.note_progress(DrainProgress(index, number))


def test_a_drain_waits_for_the_report_of_every_front_end() -> None:
    case = Case()
    assert not case.draining.done
    case.note(0, 0)
    assert not case.draining.done
    case.note(1, 0)
    assert case.draining.done
    case.draining.report_unfinished()
    assert case.notices.lines == []


def test_open_requests_are_reported_once_and_awaited() -> None:
    case = Case()
    case.note(0, 3)
    assert case.notices.lines == [], "the other front end has not reported yet"
    case.note(1, 1)
    assert case.notices.lines == [
        "4 requests in flight may finish within 30 s, new ones are refused; "
        "a second signal aborts them"
    ]
    case.note(1, 0)
    assert not case.draining.done
    case.note(0, 0)
    assert case.draining.done
    assert len(case.notices.lines) == 1


def test_a_drain_ends_at_its_timeout() -> None:
    case = Case()
    case.note(0, 1)
    case.now += 29.0
    assert (case.draining.done, case.draining.seconds_left()) == (False, 1.0)
    case.now += 1.0
    assert case.draining.done
    case.draining.report_unfinished()
    assert case.notices.lines == ["1 request not finished: aborted"]
