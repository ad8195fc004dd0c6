"""The end of a drain, without processes and on a fake clock."""

from deploy.supervisor.shutdown import RequestDrain
from proto.messages.lifecycle import DrainProgress
from tests.fakes.notices import Notices


class Case:
    """A drain of two front ends that may take 30 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.notices = Notices()
        self.draining = RequestDrain(range(2), 30.0, self.notices, lambda: self.now)

    def note(self, index: int, number: int) -> None:
        self.draining.note_progress(DrainProgress(index, number))
        self.draining.report_begin()


def begins(what: str, seconds: str) -> str:
    return (
        f"tokend: {what} may finish within {seconds} s, new ones are refused; "
        "a second Ctrl-C or SIGTERM aborts them"
    )


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
    assert case.notices.lines == [begins("4 requests in flight", "30")]
    case.note(1, 0)
    assert not case.draining.done
    case.note(0, 0)
    assert case.draining.done
    assert len(case.notices.lines) == 1


def test_a_front_end_that_does_not_count_delays_the_report_only_shortly() -> None:
    case = Case()
    case.note(0, 3)
    case.now += case.draining.seconds_to_next_step()
    assert 0 < case.now - 100.0 < 0.5
    case.draining.report_begin()
    assert case.notices.lines == [begins("open requests", "30")]
    case.note(1, 1)
    assert len(case.notices.lines) == 1
    case.now = 110.0
    case.draining.report_again()
    assert case.notices.lines[1:] == [begins("4 requests in flight", "20")]


def test_a_drain_ends_at_its_timeout() -> None:
    case = Case()
    case.note(0, 1)
    case.note(1, 0)
    case.now += 29.0
    assert (case.draining.done, case.draining.seconds_to_next_step()) == (False, 1.0)
    case.now += 1.0
    assert case.draining.done
    case.draining.report_unfinished()
    assert case.notices.lines[1:] == ["WARNING tokend: 1 request not finished: aborted"]
