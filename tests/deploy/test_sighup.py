"""The effect of SIGHUP."""

import signal
from collections.abc import Iterator

import pytest

from deploy.supervisor.signals import HangupPolicy


@pytest.fixture(autouse=True)
def restore_sighup() -> Iterator[None]:
    """Restore the handler of SIGHUP; the tests may run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("handler", "before", "after", "action"),
    [
        (signal.SIG_DFL, False, False, "reload"),
        (signal.SIG_DFL, True, True, "reload"),
        (signal.SIG_DFL, True, False, "stop"),
        (signal.SIG_IGN, True, False, "ignore"),
        (signal.SIG_IGN, False, False, "reload"),
    ],
)
def test_a_hangup_reloads_stops_or_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
    handler: signal.Handlers,
    before: bool,
    after: bool,
    action: str,
) -> None:
    signal.signal(signal.SIGHUP, handler)
    answers = iter([before, after])
    monkeypatch.setattr("deploy.supervisor.signals.has_terminal", lambda: next(answers, after))
    assert HangupPolicy().action() == action
