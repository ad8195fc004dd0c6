"""Reloads of the supervisor over fake processes, by signal and by command."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy import reload_command
from proto.errors import ConfigError
from tests.deploy.test_supervisor import FAKE_DAEMON, FakeDaemon, assert_nothing_left, eventually

Start = Callable[..., FakeDaemon]
BEGUN = "tokend: reloading"
DONE = "tokend: reloaded after"
FAILED = "tokend: the reload failed, nothing has changed: "
MOEBIUS = "config.json asks for rope type 'moebius'"


@pytest.fixture
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A daemon that is ready."""
    daemons = []

    def ready(*choices: str) -> FakeDaemon:
        daemon = FakeDaemon(tmp_path_factory.mktemp("run"), *choices)
        daemons.append(daemon)
        daemon.wait_ready()
        return daemon

    yield ready
    for daemon in daemons:
        daemon.discard()


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


def test_side_by_side_all_but_the_front_end_are_new(begin: Start) -> None:
    daemon = begin()
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(BEGUN, DONE, "api 0: heard NextEngine", "api 0: heard SwitchEngine(epoch=2)")
    daemon.wait_for("engine 0: life 1, epochs 2 and 2", "worker 0: life 1, epochs 2 and 2")
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "killed" not in daemon.text
    daemon.children()["engine_core"].kill()
    daemon.wait_for(
        "engine 0: is back after", "heard NewEngine(epoch=3, worker_epoch=3, died=True)"
    )
    ends_well(daemon)


def test_the_old_ones_stay_until_their_requests_have_ended(begin: Start) -> None:
    """A second reload waits for that."""
    daemon = begin("api_server=busy")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(DONE)
    assert all(psutil.pid_exists(pid) for pid in before.values())
    hang_up(daemon)
    daemon.wait_for("tokend: a reload is under way: another one follows it")
    hang_up(daemon)
    daemon.wait_for("tokend: a reload is under way and another one follows it already")
    assert daemon.text.count(BEGUN) == 1
    os.kill(before["api_server"], signal.SIGUSR2)
    daemon.wait_for("api 0: heard SwitchEngine(epoch=3)")
    after = pids(daemon)
    assert set(after.values()) & set(before.values()) == {before["api_server"]}
    assert daemon.text.count(DONE) == daemon.text.count(BEGUN) == 2
    ends_well(daemon)


def test_an_engine_that_cannot_start_changes_nothing(begin: Start) -> None:
    daemon = begin("engine_core=bad_model_later")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: heard DropEngine(epoch=2)")
    assert pids(daemon) == before
    assert "it is started again" not in daemon.text
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
    daemon = begin("api_server=busy")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(DONE)
    os.kill(before["engine_core"], signal.SIGKILL)
    daemon.wait_for("api 0: heard DropEngine(epoch=1)")
    after = pids(daemon)
    assert set(after.values()) & set(before.values()) == {before["api_server"]}
    assert "it is started again" not in daemon.text
    os.kill(before["api_server"], signal.SIGUSR2)
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
    daemon.wait_for(DONE, "api 0: heard NewEngine(epoch=2, worker_epoch=2, died=False)")
    daemon.wait_for("api 0: heard SwitchEngine(epoch=2)")
    after = pids(daemon)
    assert after["api_server"] == before["api_server"]
    assert {after["worker"], after["engine_core"]}.isdisjoint(before.values())
    assert "it is started again" not in daemon.text
    ends_well(daemon)


def test_in_place_what_cannot_start_is_replaced_by_what_was(begin: Start) -> None:
    daemon = begin("reload_strategy=in-place", "engine_core=bad_model_once")
    before = pids(daemon)
    hang_up(daemon)
    daemon.wait_for(FAILED + MOEBIUS, "api 0: heard DropEngine(epoch=2)")
    daemon.wait_for("api 0: heard NewEngine(epoch=3, worker_epoch=3, died=False)")
    daemon.wait_for("engine 0: life 2, epochs 3 and 3")
    assert pids(daemon)["api_server"] == before["api_server"]
    assert "it is started again" not in daemon.text
    ends_well(daemon)


def test_a_daemon_that_drains_is_not_reloaded(begin: Start) -> None:
    daemon = begin("api_server=busy")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests under way")
    hang_up(daemon)
    daemon.wait_for("the daemon is about to end: there is no reload")
    daemon.children()["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0
    assert BEGUN not in daemon.text


def test_the_command_waits_and_says_how_it_went(
    begin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = begin()
    parent = str(daemon.run_parent)
    (run_dir,) = daemon.run_parent.iterdir()
    for words in ([], ["--pid", str(daemon.process.pid)], ["--run-directory", str(run_dir)]):
        assert reload_command.main(words, parent) == 0
        assert capsys.readouterr().out == "reloaded\n"
    assert daemon.text.count(DONE) == 3


def test_the_command_fails_with_the_reload(
    begin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = begin("model=broken")
    assert reload_command.main([f"--pid={daemon.process.pid}"], str(daemon.run_parent)) == 1
    assert capsys.readouterr().err == f"{FAILED}the model is broken\n"


@pytest.mark.parametrize("words", [["--pid"], ["--pid", "1", "2"], ["now"], ["--pid", "1"], []])
def test_a_command_that_finds_nobody(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        reload_command.main(words, str(tmp_path))


def test_a_daemon_that_ends_meanwhile_is_an_error(begin: Start, tmp_path: Path) -> None:
    daemon = begin()
    parent, pid = daemon.run_parent, daemon.process.pid
    os.kill(pid, signal.SIGSTOP)
    words = [sys.executable, "-m", "deploy.cli", "reload", f"--pid={pid}"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(parent)}
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert eventually(lambda: "SIGHUP" in pending(pid))
    daemon.process.kill()
    daemon.process.wait()
    assert command.wait() == 1
    assert "ended" in command.stderr.read()


def pending(pid: int) -> str:
    """SIGHUP, when it waits to be handled by a stopped process."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return "SIGHUP" if any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks) else ""


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_ends_the_daemon_unless_it_was_told_to_ignore_that(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, nohup: bool
) -> None:
    """Started with a terminal of its own, which is closed then."""
    master, slave = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    log = tmp_path / "log"
    parent = tmp_path_factory.mktemp("run")  # a short path, for sockets
    with log.open("w") as stream:
        daemon = subprocess.Popen(
            [sys.executable, str(FAKE_DAEMON), str(parent)],
            stdin=slave,
            stdout=stream,
            stderr=stream,
            preexec_fn=take_terminal,
        )
    try:
        os.close(slave)
        assert eventually(lambda: "is ready" in log.read_text())
        os.kill(daemon.pid, signal.SIGHUP)
        assert eventually(lambda: DONE in log.read_text()), "the terminal is there: a reload"
        os.close(master)
        if nohup:
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait(30) == 0
        assert log.read_text().count(BEGUN) == 1
    finally:
        daemon.kill()
        daemon.wait()
