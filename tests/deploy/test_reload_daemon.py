"""Reloads of the supervisor over fake processes."""

import os
import signal

import psutil
import pytest

from tests.fakes.supervised import FakeDaemon, Start, assert_nothing_left, eventually

BEGUN = "tokend: reloading"
DONE = "tokend: reloaded after"
FAILED = "tokend: the reload failed, nothing has changed: "
MOEBIUS = "config.json asks for rope type 'moebius'"


def pids(daemon: FakeDaemon) -> dict[str, int]:
    """Of the three there are once nothing comes or goes."""
    assert eventually(lambda: len(psutil.Process(daemon.process.pid).children()) == 3)
    return {role: child.pid for role, child in daemon.children().items()}


def hang_up(daemon: FakeDaemon) -> None:
    daemon.process.send_signal(signal.SIGHUP)


def ends_well(daemon: FakeDaemon) -> None:
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def being_left(begin: Start, *choices: str) -> tuple[FakeDaemon, dict[str, psutil.Process]]:
    """A daemon after the switch, and its processes of before, which have requests to finish."""
    daemon = begin("api_server=busy", *choices)
    before = daemon.children()
    hang_up(daemon)
    daemon.wait_for(DONE)
    return daemon, before


def assert_all_but_the_front_end_are_new(
    daemon: FakeDaemon, before: dict[str, psutil.Process]
) -> None:
    old = {child.pid for child in before.values()}
    assert set(pids(daemon).values()) & old == {before["api_server"].pid}


def test_side_by_side_all_but_the_front_end_are_new(begin: Start) -> None:
    daemon = begin()
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(
        BEGUN, DONE, "api 0: received NextEngine", "api 0: received SwitchEngine(epoch=2)"
    )
    daemon.wait_for("engine 0: life 1, epochs 2 and 2", "worker 0: life 1, epochs 2 and 2")
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "killed" not in daemon.text
    daemon.children()["engine_core"].kill()
    daemon.wait_for(
        "engine 0: is back after", "received NewEngine(epoch=3, worker_epoch=3, died=True)"
    )
    ends_well(daemon)


def test_the_old_ones_stay_until_their_requests_have_ended(begin: Start) -> None:
    """A second reload waits for that."""
    daemon, before = being_left(begin)
    assert all(child.is_running() for child in before.values())
    hang_up(daemon)
    daemon.wait_for("tokend: a reload is in progress: another one follows it")
    hang_up(daemon)
    daemon.wait_for("tokend: a reload is in progress and another one follows it already")
    assert daemon.text.count(BEGUN) == 1
    before["api_server"].send_signal(signal.SIGUSR2)
    daemon.wait_for("api 0: received SwitchEngine(epoch=3)")
    assert_all_but_the_front_end_are_new(daemon, before)
    assert eventually(lambda: daemon.text.count(DONE) == 2)
    assert daemon.text.count(BEGUN) == 2
    ends_well(daemon)


def test_an_engine_that_cannot_start_changes_nothing(begin: Start) -> None:
    daemon = begin("engine_core=bad_model_later")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: received DropEngine(epoch=2)")
    assert pids(daemon) == before
    assert "it is restarted" not in daemon.text
    ends_well(daemon)


def test_a_model_that_is_broken_changes_nothing(begin: Start) -> None:
    daemon = begin("model=broken")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(FAILED + "the model is broken")
    assert pids(daemon) == before
    assert "NextEngine" not in daemon.text
    ends_well(daemon)


def test_the_old_engine_dies_before_its_requests_have_ended(begin: Start) -> None:
    """The new one takes them over; what is left of the old generation ends."""
    daemon, before = being_left(begin)
    before["engine_core"].kill()
    daemon.wait_for("api 0: received DropEngine(epoch=1)")
    assert_all_but_the_front_end_are_new(daemon, before)
    assert "it is restarted" not in daemon.text
    before["api_server"].send_signal(signal.SIGUSR2)
    ends_well(daemon)


@pytest.mark.parametrize(
    ("role", "what"), [("engine_core", "no sign of life"), ("worker", "no completed step")]
)
def test_one_of_the_old_hangs_before_its_requests_have_ended(
    begin: Start, role: str, what: str
) -> None:
    """They go on before it shows its stacks: what it says after that is heard by nobody."""
    daemon, before = being_left(begin, "step_timeout=0.5")
    if role == "worker":
        before["engine_core"].send_signal(signal.SIGHUP)
    before[role].suspend()
    verdict = f"(pid {before[role].pid}) hangs, {what} for "
    dropped = "api 0: received DropEngine(epoch=1)"
    daemon.wait_for(verdict, dropped, "fake_process.py")
    assert_all_but_the_front_end_are_new(daemon, before)
    places = [daemon.text.index(each) for each in (verdict, dropped, "fake_process.py")]
    assert places == sorted(places)
    assert daemon.text.count(dropped) == 1
    assert "it is restarted" not in daemon.text
    assert "HealthStatus" not in daemon.text, "the engine of now was ready all the time"
    before["api_server"].send_signal(signal.SIGUSR2)
    ends_well(daemon)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_old_engine_hears_of_a_front_end_that_is_gone(begin: Start, how: str) -> None:
    """It has requests of it, and of the other one."""
    daemon, before = being_left(
        begin, "api_server_count=2", "step_timeout=0.5", "shutdown_timeout=0.1"
    )
    first = before["api_server"]
    if how == "dies":
        first.kill()
    else:
        first.suspend()
    heard = "engine 0: received NewFrontEnd(index=0, incarnation=1)"
    assert eventually(lambda: daemon.text.count(heard) == 2), daemon.text
    assert before["engine_core"].is_running()
    daemon.wait_for("api 0: is back after")
    ends_well(daemon)


def test_an_old_worker_that_its_engine_does_not_trust_is_left_at_once(begin: Start) -> None:
    daemon, before = being_left(begin)
    before["engine_core"].send_signal(signal.SIGALRM)
    daemon.wait_for("api 0: received DropEngine(epoch=1)")
    assert_all_but_the_front_end_are_new(daemon, before)
    before["api_server"].send_signal(signal.SIGUSR2)
    ends_well(daemon)


def test_a_death_meanwhile_puts_the_reload_off(begin: Start) -> None:
    """All are back first, then it is tried again."""
    daemon = begin()
    before = pids(daemon)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    os.kill(before["api_server"], signal.SIGKILL)
    hang_up(daemon)
    os.kill(daemon.process.pid, signal.SIGCONT)
    daemon.wait_for("api 0: is back after", DONE)
    assert daemon.text.index("api 0: is back after") < daemon.text.index(DONE)
    assert set(pids(daemon).values()).isdisjoint(before.values())
    ends_well(daemon)


def test_in_place_the_old_ones_end_before_the_new_ones_start(begin: Start) -> None:
    daemon = begin("reload_strategy=in-place")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(DONE, "api 0: received NewEngine(epoch=2, worker_epoch=2, died=False)")
    daemon.wait_for("api 0: received SwitchEngine(epoch=2)")
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "it is restarted" not in daemon.text
    ends_well(daemon)


def test_in_place_what_cannot_start_is_replaced_by_what_was(begin: Start) -> None:
    daemon = begin("reload_strategy=in-place", "engine_core=bad_model_once")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: received DropEngine(epoch=2)")
    daemon.wait_for("api 0: received NewEngine(epoch=3, worker_epoch=3, died=False)")
    daemon.wait_for("engine 0: life 2, epochs 3 and 3")
    assert pids(daemon)["api_server"] == before["api_server"]
    assert "it is restarted" not in daemon.text
    ends_well(daemon)


def test_a_daemon_that_drains_is_not_reloaded(begin: Start) -> None:
    daemon = begin("api_server=busy")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    hang_up(daemon)
    daemon.wait_for("the daemon is about to end: there is no reload")
    daemon.children()["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0
    assert BEGUN not in daemon.text
