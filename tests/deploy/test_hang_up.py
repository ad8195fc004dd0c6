"""What SIGHUP means."""

import signal
from collections.abc import Iterator

import pytest

from deploy.supervisor.signals import HangUp


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The tests themselves may run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("handler", "before", "after", "meaning"),
    [
        (signal.SIG_DFL, False, False, "reload"),
        (signal.SIG_DFL, True, True, "reload"),
        (signal.SIG_DFL, True, False, "end"),
        (signal.SIG_IGN, True, False, "nothing"),
        (signal.SIG_IGN, False, False, "reload"),
    ],
)
def test_what_a_hang_up_means(
    handler: signal.Handlers, before: bool, after: bool, meaning: str
) -> None:
    signal.signal(signal.SIGHUP, handler)
    answers = iter([before, after])
    assert HangUp(lambda: next(answers, after)).meaning() == meaning
