"""The effect of SIGHUP."""

import pytest

from deploy.supervisor.signals import hangup_action


@pytest.mark.parametrize(
    ("under_nohup", "before", "after", "action"),
    [
        (False, False, False, "reload"),
        (False, True, True, "reload"),
        (False, True, False, "stop"),
        (True, True, False, "ignore"),
        (True, False, False, "reload"),
    ],
)
def test_a_hangup_reloads_stops_or_is_ignored(
    monkeypatch: pytest.MonkeyPatch, under_nohup: bool, before: bool, after: bool, action: str
) -> None:
    monkeypatch.setattr("deploy.supervisor.signals.has_terminal", lambda: after)
    assert hangup_action(before, under_nohup) == action
