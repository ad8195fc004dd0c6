"""Reloads of the supervisor, over fake processes."""

import os
import signal

import psutil
import pytest

from tests.fakes.supervised import FakeDaemon, Start, assert_nothing_left, eventually

BEGUN = "tokend reloads"
DONE = "tokend reloaded after"
FAILED = "tokend: the reload failed, nothing has changed: "
MOEBIUS = "config.json asks for rope type 'moebius'"


def pids(daemon: FakeDaemon) -> dict[str, int]:
    """Return the process ids by role, once there are exactly three processes."""
    assert eventually(lambda: len(psutil.Process(daemon.process.pid).children()) == 3)
    return {role: child.pid for role, child in daemon.children().items()}


def send_sighup(daemon: FakeDaemon) -> None:
    daemon.process.send_signal(signal.SIGHUP)


def assert_clean_exit(daemon: FakeDaemon) -> None:
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def reload_with_open_requests(
    begin: Start, *choices: str
) -> tuple[FakeDaemon, dict[str, psutil.Process]]:
    """Return a daemon after the switch, and its old processes, which still have requests."""
    daemon = begin("api_server=busy", *choices)
    before = daemon.children()
    send_sighup(daemon)
    daemon.wait_for(DONE)
    return daemon, before


def assert_all_but_the_front_end_are_new(
    daemon: FakeDaemon, before: dict[str, psutil.Process]
) -> None:
    old = {child.pid for child in before.values()}
    assert set(pids(daemon).values()) & old == {before["api_server"].pid}


def test_side_by_side_replaces_all_but_the_front_end(begin: Start) -> None:
    daemon = begin()
    before = pids(daemon)
    send_sighup(daemon)
    daemon.wait_for(
        BEGUN, DONE, "api 0: received NextEngine", "api 0: received SwitchEngine(epoch=2,"
    )
    daemon.wait_for(
        "engine 0: incarnation 1, epochs 2 and 2", "worker 0: incarnation 1, epochs 2 and 2"
    )
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "killed" not in daemon.text
    daemon.children()["engine_core"].kill()
    daemon.wait_for(
        "engine 0 is back after", "received NewEngine(epoch=3, worker_epoch=3, died=True, engine=0)"
    )
    assert_clean_exit(daemon)


def test_old_processes_stay_until_their_requests_end(begin: Start) -> None:
    """A second reload waits until then."""
    daemon, before = reload_with_open_requests(begin)
    assert all(child.is_running() for child in before.values())
    send_sighup(daemon)
    daemon.wait_for("tokend: a reload is in progress: another one follows it")
    send_sighup(daemon)
    daemon.wait_for("tokend: a reload is in progress and another one follows it already")
    assert daemon.text.count(BEGUN) == 1
    before["api_server"].send_signal(signal.SIGUSR2)
    daemon.wait_for("api 0: received SwitchEngine(epoch=3,")
    assert_all_but_the_front_end_are_new(daemon, before)
    assert eventually(lambda: daemon.text.count(DONE) == 2)
    assert daemon.text.count(BEGUN) == 2
    assert_clean_exit(daemon)


def test_an_engine_that_cannot_start_changes_nothing(begin: Start) -> None:
    daemon = begin("engine_core=bad_model_later")
    before = pids(daemon)
    send_sighup(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: received DropEngine(epoch=2)")
    assert pids(daemon) == before
    assert "it is restarted" not in daemon.text
    assert_clean_exit(daemon)


def test_a_model_that_cannot_be_prepared_changes_nothing(begin: Start) -> None:
    daemon = begin("model=broken")
    before = pids(daemon)
    send_sighup(daemon)
    daemon.wait_for(FAILED + "the model is broken")
    assert pids(daemon) == before
    assert "NextEngine" not in daemon.text
    assert_clean_exit(daemon)


def test_death_of_the_old_engine_moves_its_requests_to_the_new_one(begin: Start) -> None:
    """The rest of the old generation ends."""
    daemon, before = reload_with_open_requests(begin)
    before["engine_core"].kill()
    daemon.wait_for("api 0: received DropEngine(epoch=1)")
    assert_all_but_the_front_end_are_new(daemon, before)
    assert "it is restarted" not in daemon.text
    before["api_server"].send_signal(signal.SIGUSR2)
    assert_clean_exit(daemon)


@pytest.mark.parametrize(
    ("role", "what"), [("engine_core", "no sign of life"), ("worker", "no completed step")]
)
def test_hang_of_an_old_process_moves_its_requests_to_the_new_engine(
    begin: Start, role: str, what: str
) -> None:
    """They move before the hung process prints its stacks; its later messages are dropped."""
    daemon, before = reload_with_open_requests(begin, "step_timeout=0.5")
    if role == "worker":
        before["engine_core"].send_signal(signal.SIGHUP)
    before[role].suspend()
    verdict = f"(pid {before[role].pid}) hangs, {what} for "
    dropped = "api 0: received DropEngine(epoch=1)"
    daemon.wait_for(verdict, dropped, "fake_process.py")
    assert_all_but_the_front_end_are_new(daemon, before)
    positions = [daemon.text.index(each) for each in (verdict, dropped, "fake_process.py")]
    assert positions == sorted(positions)
    assert daemon.text.count(dropped) == 1
    assert "it is restarted" not in daemon.text
    assert "HealthStatus" not in daemon.text, "the new engine was ready all the time"
    before["api_server"].send_signal(signal.SIGUSR2)
    assert_clean_exit(daemon)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_old_engine_is_notified_of_a_lost_front_end(begin: Start, how: str) -> None:
    """The old engine has requests of both front ends."""
    daemon, before = reload_with_open_requests(
        begin, "api_server_count=2", "step_timeout=0.5", "shutdown_timeout=0.1"
    )
    first = before["api_server"]
    if how == "dies":
        first.kill()
    else:
        first.suspend()
    notified = "engine 0: received NewFrontEnd(index=0, incarnation=1)"
    assert eventually(lambda: daemon.text.count(notified) == 2), daemon.text
    assert before["engine_core"].is_running()
    daemon.wait_for("api 0 is back after")
    assert_clean_exit(daemon)


def test_an_invalid_message_of_an_old_worker_ends_the_old_generation(begin: Start) -> None:
    daemon, before = reload_with_open_requests(begin)
    before["engine_core"].send_signal(signal.SIGALRM)
    daemon.wait_for("api 0: received DropEngine(epoch=1)")
    assert_all_but_the_front_end_are_new(daemon, before)
    before["api_server"].send_signal(signal.SIGUSR2)
    assert_clean_exit(daemon)


def test_a_death_during_a_reload_postpones_it(begin: Start) -> None:
    """The reload is retried once all processes are back."""
    daemon = begin()
    before = pids(daemon)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    os.kill(before["api_server"], signal.SIGKILL)
    send_sighup(daemon)
    os.kill(daemon.process.pid, signal.SIGCONT)
    daemon.wait_for("api 0 is back after", DONE)
    assert daemon.text.index("api 0 is back after") < daemon.text.index(DONE)
    assert set(pids(daemon).values()).isdisjoint(before.values())
    assert_clean_exit(daemon)


def test_in_place_ends_the_old_generation_before_starting_the_new_one(begin: Start) -> None:
    daemon = begin("reload_strategy=in-place")
    before = pids(daemon)
    send_sighup(daemon)
    daemon.wait_for(
        DONE, "api 0: received NewEngine(epoch=2, worker_epoch=2, died=False, engine=0)"
    )
    daemon.wait_for("api 0: received SwitchEngine(epoch=2,")
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "it is restarted" not in daemon.text
    assert_clean_exit(daemon)


def test_in_place_returns_to_the_old_model_if_the_new_one_cannot_start(begin: Start) -> None:
    daemon = begin("reload_strategy=in-place", "engine_core=bad_model_once")
    before = pids(daemon)
    send_sighup(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: received DropEngine(epoch=2)")
    daemon.wait_for("api 0: received NewEngine(epoch=3, worker_epoch=3, died=False, engine=0)")
    daemon.wait_for("engine 0: incarnation 2, epochs 3 and 3")
    assert pids(daemon)["api_server"] == before["api_server"]
    assert "it is restarted" not in daemon.text
    assert_clean_exit(daemon)


def test_a_draining_daemon_does_not_reload(begin: Start) -> None:
    daemon = begin("api_server=busy")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    send_sighup(daemon)
    daemon.wait_for("the daemon is about to end: there is no reload")
    daemon.children()["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0
    assert BEGUN not in daemon.text
