"""The supervisor over fake processes, one of which hangs."""

import signal

import pytest

from tests.fakes.supervised import ROLES, TITLES, Start, pids_except


def assert_in_this_order(text: str, *parts: str) -> None:
    places = [text.index(part) for part in parts]
    assert places == sorted(places), text


HUNG = {
    "worker": ("no completed step", "engine 0: received NewWorkers(worker_epoch=2)"),
    "engine_core": (
        "no sign of life",
        "worker 0: received NewEngine(epoch=2, worker_epoch=2, died=True, engine=0)",
    ),
    "api_server": ("no sign of life", "engine 0: received NewFrontEnd(index=0, incarnation=1)"),
}
"""The reported reason of a hang, and the notice that another process gets before the kill."""


@pytest.mark.parametrize("role", ROLES)
def test_a_hung_process_is_disconnected_and_prints_its_stacks_before_its_restart(
    start: Start, role: str
) -> None:
    """A worker hangs if the engine waits for it, the engine and a front end if they are silent.

    A front end is not resumed to print its stacks, because it would accept connections.
    """
    daemon = start("step_timeout=0.5")
    daemon.wait_ready()
    before = daemon.children()
    pid, (what, notified) = before[role].pid, HUNG[role]
    before[role].suspend()
    if role == "worker":
        before["engine_core"].send_signal(signal.SIGHUP)
    daemon.wait_for(f"{TITLES[role]} is back after", f"{TITLES[role]}: incarnation 1, ")
    stacks = "fake_process.py"
    assert_in_this_order(
        daemon.text,
        f"{TITLES[role]} (pid {pid}) hangs, {what} for ",
        notified,
        f"{TITLES[role]} (pid {pid}) was killed by SIGKILL; it is restarted",
        f"{TITLES[role]}: incarnation 1, ",
    )
    if role == "api_server":
        assert stacks not in daemon.text
    else:
        assert_in_this_order(daemon.text, "hangs", stacks, "was killed by SIGKILL")
    assert daemon.text.count(notified) == 1
    after = daemon.children()
    assert after[role].pid != pid
    assert pids_except(role, after) == pids_except(role, before)
    if role != "api_server":
        daemon.wait_for(
            f"NotReady(what='{TITLES[role]} hangs and is killed'",
            f"NotReady(what='{TITLES[role]} is being restarted'",
            f"received Restarted(role='{role}', hung=True",
            "api 0: received HealthStatus(reasons=(), ",
        )


def test_a_process_that_hangs_during_a_drain_is_restarted(start: Start) -> None:
    daemon = start("api_server=busy", "step_timeout=0.5")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    children["engine_core"].suspend()
    daemon.wait_for("engine 0 (pid", "hangs, no sign of life", "engine 0 is back after")
    children["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0, daemon.text
