"""The supervisor over fake processes: start and end of the daemon, and cleanup."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.supervised import (
    ECHO_SECONDS,
    LIMIT_SECONDS,
    ROLES,
    Start,
    assert_nothing_left,
    eventually,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_after_engine_and_front_end_and_ends_in_order(
    start: Start, number: signal.Signals
) -> None:
    daemon = start()
    url = daemon.wait_ready()
    children = daemon.children()
    assert set(children) == set(ROLES)
    assert "engine 0: loading weights" in daemon.text
    assert "engine 0: the pool is small" in daemon.text
    groups = {os.getpgid(child.pid) for child in children.values()}
    assert len(groups) == 3
    assert os.getpgid(daemon.process.pid) not in groups
    port = int(url.rsplit(":", 1)[1])
    socket.create_connection(("127.0.0.1", port)).close()
    (run_dir,) = daemon.run_parent.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    daemon.process.send_signal(number)
    assert daemon.wait_exit() == 0, daemon.text
    assert daemon.text.endswith("tokend stopped; nothing is left running\n")
    assert "killed" not in daemon.text
    assert_nothing_left(daemon, children)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_starting_ends_everything(
    start: Start, number: signal.Signals, status: int
) -> None:
    daemon = start()
    assert eventually(lambda: len(psutil.Process(daemon.process.pid).children()) == 3)
    children = {str(child.pid): child for child in psutil.Process(daemon.process.pid).children()}
    daemon.process.send_signal(number)
    assert daemon.wait_exit() == status, daemon.text
    assert daemon.text.endswith("tokend stopped; nothing is left running\n")
    assert_nothing_left(daemon, children)


def test_a_process_that_ignores_shutdown_is_killed(start: Start) -> None:
    daemon = start("worker=stubborn", "limits=0.4")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def test_a_second_signal_kills_at_once(start: Start) -> None:
    daemon = start("worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    children["engine_core"].suspend()
    daemon.process.send_signal(signal.SIGINT)
    assert eventually(lambda: not children["api_server"].is_running())
    assert children["worker"].is_running()
    time.sleep(ECHO_SECONDS)
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.wait_exit() == 128 + signal.SIGINT
    assert_nothing_left(daemon, children)


def test_a_signal_received_twice_at_once_counts_once(start: Start) -> None:
    """`make` forwards a signal that its whole process group got already."""
    daemon = start()
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGSTOP)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGINT)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.wait_exit() == 0
    assert_nothing_left(daemon, children)


def test_a_process_that_exits_without_an_error_message_is_named(start: Start) -> None:
    """With the mute front end the daemon never becomes ready; a ready one restarts the worker."""
    daemon = start("worker=exits", "api_server=mute")
    assert daemon.wait_exit() == 1
    assert re.search(r"worker 0 \(pid \d+\) ended by itself with exit status 3 while", daemon.text)
    assert list(daemon.run_parent.iterdir()) == []


def test_an_unsupported_model_is_reported_in_one_line(start: Start) -> None:
    daemon = start("worker=bad_model", "api_server=mute")
    assert daemon.wait_exit() == 2
    assert daemon.text.splitlines()[-1] == "tokend: config.json asks for rope type 'moebius'"
    assert "Traceback" not in daemon.text


def test_nothing_outlives_a_killed_supervisor(start: Start) -> None:
    daemon = start("worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.kill()
    daemon.process.wait()
    assert_nothing_left(daemon, children)


def test_two_daemons_side_by_side(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    parent = tmp_path_factory.mktemp("shared")
    first, second = start(run_parent=parent), start(run_parent=parent)
    assert first.wait_ready() != second.wait_ready()
    children = second.children()
    assert len(list(parent.iterdir())) == 2
    first.process.send_signal(signal.SIGTERM)
    assert first.wait_exit() == 0
    assert len(list(parent.iterdir())) == 1
    assert all(child.is_running() for child in children.values())


def test_orphans_are_reaped(start: Start) -> None:
    daemon = start("engine_core=orphans")
    daemon.wait_ready()
    children = daemon.children()
    found = re.search(r"engine 0: orphan (\d+)", daemon.text)
    assert found is not None, daemon.text
    orphan = int(found[1])
    assert eventually(lambda: psutil.Process(orphan).ppid() == daemon.process.pid)
    os.kill(orphan, signal.SIGKILL)
    assert eventually(lambda: not psutil.pid_exists(orphan)), "a zombie process is left"
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def test_a_service_manager_gets_ready_status_heartbeat_and_stopping(
    start: Start, tmp_path: Path
) -> None:
    """The heartbeat lasts as long as the event loop runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(LIMIT_SECONDS)
        manager.bind(str(tmp_path / "notify"))
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        daemon = start(**variables)
        notifications = ""
        while "READY=1" not in notifications:
            notifications += manager.recv(4096).decode() + "\n"
        assert "STATUS=engine 0: loading weights 50%" in notifications
        assert "STATUS=serving fake at http://127.0.0.1:" in notifications
        children = daemon.children()
        for child in children.values():
            assert not set(variables) & set(child.environ())
        for _ in range(3):
            assert manager.recv(4096) == b"WATCHDOG=1"
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_exit() == 0
        notifications = ""
        while "STOPPING=1" not in notifications:
            notifications += manager.recv(4096).decode()
        assert "EXTEND_TIMEOUT_USEC=44000000" in notifications, (
            "30 s for requests and the time of the shutdown"
        )
