"""The supervisor over fake processes: starting, ending, dying, and what is left."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

FAKE_DAEMON = Path(__file__).parents[1] / "fakes" / "fake_daemon.py"
ROLES = ("worker", "engine_core", "api_server")
TITLES = {"worker": "worker 0", "engine_core": "engine 0", "api_server": "api 0"}
LIMIT_SECONDS = 30.0
ECHO_SECONDS = 0.1
"""A signal that follows another sooner than this may be taken for the same one."""


class FakeDaemon:
    """A supervisor process; `run_parent` is where its run directory lies.

    It adopts orphans as process 1 of a container does.
    """

    def __init__(self, run_parent: Path, *choices: str, **variables: str) -> None:
        self.run_parent = run_parent
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_DAEMON), str(run_parent), *choices],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_adopt_orphans,
            env=os.environ | variables,
        )

    def wait_ready(self) -> str:
        """The URL of the ready line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            found = re.search(r"is ready: .* (http://\S+)", line)
            if found:
                return found[1]
        raise AssertionError(f"never ready: {self.text}")

    def children(self) -> dict[str, psutil.Process]:
        """By role, told by the title; waits until all have one."""
        titles = {"tokend: worker 0", "tokend: engine 0", "tokend: api 0"}
        roles = {"worker": "worker", "engine": "engine_core", "api": "api_server"}

        def named() -> dict[str, psutil.Process]:
            found = {}
            for child in psutil.Process(self.process.pid).children():
                title = " ".join(child.cmdline()).strip()
                if title in titles:
                    found[roles[title.split()[1]]] = child
            return found

        assert eventually(lambda: len(named()) == len(titles))
        return named()

    def wait_exit(self) -> int:
        out, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        self._lines.append(out)
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait()


_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36


def _adopt_orphans() -> None:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FakeDaemon]]:
    daemons = []

    def begin(*choices: str, run_parent: Path | None = None, **variables: str) -> FakeDaemon:
        daemon = FakeDaemon(run_parent or tmp_path_factory.mktemp("run"), *choices, **variables)
        daemons.append(daemon)
        return daemon

    yield begin
    for daemon in daemons:
        daemon.discard()


def assert_nothing_left(daemon: FakeDaemon, children: dict[str, psutil.Process]) -> None:
    for role, child in children.items():
        assert eventually(lambda c=child: not c.is_running()), f"{role} still runs"
    assert eventually(lambda: list(daemon.run_parent.iterdir()) == [])


def test_ready_when_engine_and_front_end_are(start: Callable[..., FakeDaemon]) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_in_order(
    start: Callable[..., FakeDaemon], number: signal.Signals
) -> None:
    daemon = start()
    url = daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(number)
    assert daemon.wait_exit() == 0, daemon.text
    assert "killed" not in daemon.text
    assert_nothing_left(daemon, children)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))


def test_a_signal_while_starting_ends_everything(start: Callable[..., FakeDaemon]) -> None:
    daemon = start()
    assert eventually(lambda: len(psutil.Process(daemon.process.pid).children()) == 3)
    children = {str(child.pid): child for child in psutil.Process(daemon.process.pid).children()}
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def test_a_process_that_does_not_listen_is_killed(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def test_a_second_signal_kills_at_once(start: Callable[..., FakeDaemon]) -> None:
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


def test_a_signal_that_comes_twice_at_once_is_one(start: Callable[..., FakeDaemon]) -> None:
    """As through make, which passes on what its process group got."""
    daemon = start()
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGSTOP)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGINT)
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.wait_exit() == 0
    assert_nothing_left(daemon, children)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_who_is_killed_is_named(
    start: Callable[..., FakeDaemon], role: str, number: signal.Signals
) -> None:
    daemon = start()
    daemon.wait_ready()
    children = daemon.children()
    pid = children[role].pid
    os.kill(pid, number)
    assert daemon.wait_exit() == 1
    killed = f"tokend: {TITLES[role]} (pid {pid}) was killed by {number.name} while serving"
    assert killed in daemon.text
    assert_nothing_left(daemon, children)


@pytest.mark.parametrize("role", ROLES)
def test_who_raises_is_named_with_its_traceback(
    start: Callable[..., FakeDaemon], role: str
) -> None:
    daemon = start(f"{role}=raises")
    assert daemon.wait_exit() == 1
    failed = rf"tokend: {TITLES[role]} \(pid \d+\) failed with RuntimeError: the core"
    assert re.search(failed, daemon.text)
    assert 'raise RuntimeError("the core is cracked")' in daemon.text
    assert daemon.text.count("Traceback") == 1
    assert list(daemon.run_parent.iterdir()) == []


def test_who_ends_without_a_word_is_named(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("worker=exits")
    assert daemon.wait_exit() == 1
    assert re.search(r"worker 0 \(pid \d+\) ended by itself with exit status 3 while", daemon.text)
    assert list(daemon.run_parent.iterdir()) == []


def test_a_model_that_cannot_be_run_is_one_line(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("worker=bad_model")
    assert daemon.wait_exit() == 2
    assert daemon.text.splitlines()[-1] == "tokend: config.json asks for rope type 'moebius'"
    assert "Traceback" not in daemon.text


def test_nothing_outlives_a_killed_supervisor(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.kill()
    daemon.process.wait()
    assert_nothing_left(daemon, children)


def test_two_daemons_side_by_side(
    start: Callable[..., FakeDaemon], tmp_path_factory: pytest.TempPathFactory
) -> None:
    parent = tmp_path_factory.mktemp("shared")
    first, second = start(run_parent=parent), start(run_parent=parent)
    assert first.wait_ready() != second.wait_ready()
    children = second.children()
    assert len(list(parent.iterdir())) == 2
    first.process.send_signal(signal.SIGTERM)
    assert first.wait_exit() == 0
    assert len(list(parent.iterdir())) == 1
    assert all(child.is_running() for child in children.values())


def test_orphans_are_reaped(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("engine_core=orphans")
    daemon.wait_ready()
    children = daemon.children()
    found = re.search(r"engine 0: orphan (\d+)", daemon.text)
    assert found is not None, daemon.text
    orphan = int(found[1])
    assert eventually(lambda: psutil.Process(orphan).ppid() == daemon.process.pid)
    os.kill(orphan, signal.SIGKILL)
    assert eventually(lambda: not psutil.pid_exists(orphan)), (
        "an entry of the process table is left"
    )
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, children)


def test_a_service_manager_is_told_of_everything(
    start: Callable[..., FakeDaemon], tmp_path: Path
) -> None:
    """With a heartbeat as long as the loop turns, and not one after it has stopped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(LIMIT_SECONDS)
        manager.bind(str(tmp_path / "notify"))
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        daemon = start(**variables)
        heard = ""
        while "READY=1" not in heard:
            heard += manager.recv(4096).decode() + "\n"
        assert "STATUS=engine 0: loading weights 50%" in heard
        assert "STATUS=serving fake at http://127.0.0.1:" in heard
        children = daemon.children()
        for child in children.values():
            assert not set(variables) & set(child.environ())
        for _ in range(3):
            assert manager.recv(4096) == b"WATCHDOG=1"
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_exit() == 0
        heard = ""
        while "STOPPING=1" not in heard:
            heard += manager.recv(4096).decode()
