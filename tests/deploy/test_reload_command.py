"""`tokend reload`, and SIGHUP with a terminal."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.daemons import reload
from proto.errors import ConfigError, TokendError
from proto.messages.lifecycle import DaemonState
from proto.runtime.run_directory import RunDirectory, write_state
from tests.fakes.supervised import FAKE_DAEMON, Start, eventually

BEGUN = "tokend reloads"
DONE = "tokend reloaded after"
FAILED = "tokend: the reload failed, nothing has changed: "


def at(parents: list[str]) -> Any:
    """Return an environment with run directories in these folders."""
    return SimpleNamespace(run_parents=lambda: parents)


def test_the_command_waits_for_the_reload_and_prints_its_result(
    begin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = begin()
    parents = [str(daemon.run_parent)]
    (run_dir,) = daemon.run_parent.iterdir()
    for words in ([], ["--pid", str(daemon.process.pid)], ["--run-directory", str(run_dir)]):
        assert reload(words, at(parents)) == 0
        assert capsys.readouterr().out == "reloaded\n"
    assert eventually(lambda: daemon.text.count(DONE) == 3)


def test_the_command_fails_with_the_reload(
    begin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = begin("model=broken")
    assert reload([f"--pid={daemon.process.pid}"], at([str(daemon.run_parent)])) == 1
    assert capsys.readouterr().err == f"{FAILED}the model is broken\n"


def test_a_daemon_that_drains_is_not_waited_for(begin: Start) -> None:
    daemon = begin("api_server=busy")
    parents, pid = [str(daemon.run_parent)], daemon.process.pid
    os.kill(pid, signal.SIGTERM)
    daemon.wait_for("2 requests in flight")
    with pytest.raises(TokendError, match=f"{pid} .* is draining and does not reload"):
        reload([], at(parents))
    assert daemon.process.poll() is None


def test_the_command_says_how_many_of_several_engines_are_new(
    begin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = begin("data_parallel_size=2", "engine_core=bad_model_of_1")
    assert reload([], at([str(daemon.run_parent)])) == 1
    said = "1 of 2 engines is new: engine 1: config.json asks for rope type 'moebius'"
    assert capsys.readouterr().err == f"tokend: the reload failed, {said}\n"


@pytest.mark.parametrize(
    "words",
    [["--pid"], ["--pid", "1", "2"], ["--pid", "1", "--port", "2"], ["now"], ["--port", "1"], []],
)
def test_the_command_fails_without_a_daemon(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        reload(words, at([str(tmp_path)]))


def test_several_daemons_are_listed_with_pid_model_and_address(tmp_path: Path) -> None:
    directories = []
    try:
        for pid, port in ((11, 8000), (22, 8001)):
            directories.append(RunDirectory.create(str(tmp_path)))
            state = DaemonState(pid, f"http://127.0.0.1:{port}", f"model-{pid}")
            write_state(directories[-1].path, state)
        with pytest.raises(ConfigError) as caught:
            reload([], at([str(tmp_path)]))
        with pytest.raises(ConfigError, match="no daemon of this user is 8002"):
            reload(["--port", "8002"], at([str(tmp_path)]))
    finally:
        for directory in directories:
            directory.leave()
    assert "11 (model-11 at http://127.0.0.1:8000)" in str(caught.value)
    assert "22 (model-22 at http://127.0.0.1:8001)" in str(caught.value)


def test_a_daemon_that_ends_during_the_reload_is_an_error(begin: Start, tmp_path: Path) -> None:
    daemon = begin()
    parent, pid = daemon.run_parent, daemon.process.pid
    os.kill(pid, signal.SIGSTOP)
    words = [sys.executable, "-m", "deploy.cli", "reload", f"--pid={pid}"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(parent)}
    command = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert eventually(lambda: "SIGHUP" in pending(pid) or command.poll() is not None)
    assert command.poll() is None, command.communicate()[1]
    daemon.process.kill()
    daemon.process.wait()
    assert command.wait() == 1
    assert "ended" in command.stderr.read()


def pending(pid: int) -> str:
    """Return whether SIGHUP is pending for a stopped process."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return "SIGHUP" if any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks) else ""


@pytest.mark.parametrize("nohup", [False, True])
def test_closing_the_terminal_ends_the_daemon_unless_sighup_is_ignored(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, nohup: bool
) -> None:
    """The daemon has a terminal of its own, which the test closes."""
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
