"""The supervisor over fake processes: starting, ending, dying, and what is left."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
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


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class FakeDaemon:
    """A supervisor process; `run_parent` is where its run directory lies.

    It adopts orphans as process 1 of a container does.
    """

    def __init__(self, run_parent: Path, *choices: str, **variables: str) -> None:
        self.run_parent = run_parent
        self._lines: list[str] = []
        self._printed = threading.Condition()
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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self._lines.append(line)
                self._printed.notify_all()

    def wait_for(self, *texts: str) -> None:
        """Until all of these were printed."""
        with self._printed:
            done = self._printed.wait_for(
                lambda: all(each in self.text for each in texts), LIMIT_SECONDS
            )
        assert done, f"not printed: {texts}\n{self.text}"

    def wait_for_any(self, *texts: str) -> None:
        """Until one of these was printed."""
        with self._printed:
            done = self._printed.wait_for(
                lambda: any(each in self.text for each in texts), LIMIT_SECONDS
            )
        assert done, f"none was printed: {texts}\n{self.text}"

    def wait_ready(self) -> str:
        """The URL of the ready line."""
        self.wait_for("is ready: ")
        found = re.search(r"is ready: .* (http://\S+)", self.text)
        assert found is not None
        return found[1]

    def children(self) -> dict[str, psutil.Process]:
        """By role, told by the title; waits until all have one, and obey signals."""
        titles = {"tokend: worker 0", "tokend: engine 0", "tokend: api 0"}
        roles = {"worker": "worker", "engine": "engine_core", "api": "api_server"}

        def named() -> dict[str, psutil.Process]:
            found = {}
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # just died
                    title = " ".join(child.cmdline()).strip()
                    if title in titles and _catches(child.pid, signal.SIGUSR2):
                        found[roles[title.split()[1]]] = child
            return found

        assert eventually(lambda: len(named()) == len(titles))
        return named()

    def wait_exit(self) -> int:
        status = self.process.wait(LIMIT_SECONDS)
        self._reader.join(LIMIT_SECONDS)
        return status

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
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


def test_a_first_signal_waits_for_requests(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("api_server=busy")
    url = daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("api 0: heard Drain()", "2 requests under way may finish within 30 s")
    assert "engine 0: heard Drain()" not in daemon.text
    port = int(url.rsplit(":", 1)[1])
    socket.create_connection(("127.0.0.1", port)).close()
    children["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0, daemon.text
    assert "aborted\n" not in daemon.text
    assert_nothing_left(daemon, children)


def test_a_second_signal_aborts_them_and_a_third_kills(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("api_server=busy", "worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests under way")
    time.sleep(ECHO_SECONDS)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests not finished: aborted")
    assert eventually(lambda: not children["api_server"].is_running())
    assert children["worker"].is_running()
    time.sleep(ECHO_SECONDS)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 128 + signal.SIGTERM
    assert_nothing_left(daemon, children)


def test_requests_that_take_too_long_are_aborted(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("api_server=busy", "shutdown_timeout=0.2")
    daemon.wait_ready()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert "2 requests under way may finish within 0.2 s" in daemon.text
    assert "2 requests not finished: aborted" in daemon.text


def test_who_dies_while_the_daemon_drains_is_started_again(
    start: Callable[..., FakeDaemon],
) -> None:
    """The engine, because requests need it; the front end knows at birth that it drains."""
    daemon = start("api_server=busy")
    daemon.wait_ready()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests under way")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: is back after")
    daemon.children()["api_server"].kill()
    assert daemon.wait_exit() == 0, daemon.text
    assert daemon.text.count("api 0: heard Drain()") == 2
    assert "aborted\n" not in daemon.text


def test_who_hangs_while_requests_finish_is_started_again(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("api_server=busy", "step_timeout=0.5")
    daemon.wait_ready()
    children = daemon.children()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("2 requests under way")
    children["engine_core"].suspend()
    daemon.wait_for("engine 0: (pid", "hangs, no sign of life", "engine 0: is back after")
    children["api_server"].send_signal(signal.SIGUSR2)
    assert daemon.wait_exit() == 0, daemon.text


def test_an_operator_drains_by_http_and_the_signal_after_it_is_the_first(
    start: Callable[..., FakeDaemon],
) -> None:
    """As in a container, which sends SIGTERM as soon as its preStop hook returns."""
    daemon = start("api_server=asked_to_drain", "worker=stubborn")
    daemon.wait_ready()
    children = daemon.children()
    children["api_server"].send_signal(signal.SIGUSR2)
    assert eventually(lambda: not children["api_server"].is_running())
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert "api 0: heard Drain()" in daemon.text
    assert_nothing_left(daemon, children)


def others_than(role: str, children: dict[str, psutil.Process]) -> dict[str, int]:
    return {each: child.pid for each, child in children.items() if each != role}


HEARD = {
    "worker": [
        "engine 0: heard NewWorkers(worker_epoch=2)",
        "api 0: heard Restarted(role='worker', hung=False)",
        "worker 0: life 1, epochs 1 and 2",
    ],
    "engine_core": [
        "worker 0: heard NewEngine(epoch=2, worker_epoch=2, died=True)",
        "api 0: heard NewEngine(epoch=2, worker_epoch=2, died=True)",
        "api 0: heard Restarted(role='engine_core', hung=False)",
        "engine 0: life 1, epochs 2 and 2, front ends (0,)",
    ],
    "api_server": [
        "engine 0: heard NewFrontEnd(index=0, incarnation=1)",
        "api 0: life 1, epochs 1 and 1",
    ],
}
"""What the others and the new process are told after a first death."""


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_who_is_killed_is_started_again_alone(
    start: Callable[..., FakeDaemon], role: str, number: signal.Signals
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    pid = before[role].pid
    os.kill(pid, number)
    daemon.wait_for(f"{TITLES[role]}: is back after", *HEARD[role])
    assert f"{TITLES[role]}: (pid {pid}) was killed by {number.name}; it is started" in daemon.text
    after = daemon.children()
    assert after[role].pid != pid
    assert others_than(role, after) == others_than(role, before)
    assert daemon.text.count("is ready:") == 1
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0, daemon.text
    assert_nothing_left(daemon, before | after)


def test_engine_and_worker_that_die_together_meet_again(start: Callable[..., FakeDaemon]) -> None:
    """They are given the same epoch, or one of them hears of the later one."""
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    daemon.process.send_signal(signal.SIGSTOP)
    for role in ("worker", "engine_core"):
        before[role].kill()
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait_for("engine 0: is back", "worker 0: is back", "worker 0: life", "engine 0: life")
    latest = max(re.findall(r"life 1, epochs \d+ and (\d+)", daemon.text))
    for title in ("engine 0", "worker 0"):
        daemon.wait_for_any(
            f"{title}: life 1, epochs {latest} and {latest}",
            f"{title}: life 1, epochs 2 and {latest}",
            f"{title}: life 1, epochs 1 and {latest}",
            f"{title}: heard NewWorkers(worker_epoch={latest})",
            f"{title}: heard NewEngine(epoch={latest}, worker_epoch={latest}, died=True)",
        )


def test_a_second_death_comes_with_the_next_numbers(start: Callable[..., FakeDaemon]) -> None:
    daemon = start()
    daemon.wait_ready()
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: is back after")
    daemon.children()["api_server"].kill()
    daemon.wait_for("api 0: is back after", "life 1, epochs 2 and 2")
    daemon.children()["engine_core"].kill()
    daemon.wait_for("engine 0: life 2, epochs 3 and 3, front ends (1,)")


@pytest.mark.parametrize("role", ROLES)
def test_who_raises_is_named_with_its_traceback_and_started_again(
    start: Callable[..., FakeDaemon], role: str
) -> None:
    daemon = start()
    daemon.wait_ready()
    os.kill(daemon.children()[role].pid, signal.SIGUSR2)
    daemon.wait_for(f"{TITLES[role]}: is back after")
    failed = rf"{TITLES[role]}: \(pid \d+\) failed with RuntimeError: the core is cracked; it is"
    assert re.search(failed, daemon.text)
    assert 'raise RuntimeError("the core is cracked")' in daemon.text
    assert daemon.text.count("Traceback") == 1


def assert_in_this_order(text: str, *parts: str) -> None:
    places = [text.index(part) for part in parts]
    assert places == sorted(places), text


HUNG = {
    "worker": ("no completed step", "engine 0: heard NewWorkers(worker_epoch=2)"),
    "engine_core": (
        "no sign of life",
        "worker 0: heard NewEngine(epoch=2, worker_epoch=2, died=True)",
    ),
    "api_server": ("no sign of life", "engine 0: heard NewFrontEnd(index=0, incarnation=1)"),
}
"""What is said of each when it is stopped, and what the others hear before it is killed."""


@pytest.mark.parametrize("role", ROLES)
def test_who_hangs_is_cut_off_and_shows_where_before_it_is_started_again(
    start: Callable[..., FakeDaemon], role: str
) -> None:
    """A worker because the engine waits for it, the engine and a front end for their silence.

    The latter is not continued for its stacks: it would take connections with it.
    """
    daemon = start("step_timeout=0.5")
    daemon.wait_ready()
    before = daemon.children()
    pid, (what, heard) = before[role].pid, HUNG[role]
    before[role].suspend()
    if role == "worker":
        before["engine_core"].send_signal(signal.SIGHUP)
    daemon.wait_for(f"{TITLES[role]}: is back after", f"{TITLES[role]}: life 1, ")
    stacks = "fake_process.py"
    assert_in_this_order(
        daemon.text,
        f"{TITLES[role]}: (pid {pid}) hangs, {what} for ",
        heard,
        f"{TITLES[role]}: (pid {pid}) was killed by SIGKILL; it is started again",
        f"{TITLES[role]}: life 1, ",
    )
    if role == "api_server":
        assert stacks not in daemon.text
    else:
        assert_in_this_order(daemon.text, "hangs", stacks, "was killed by SIGKILL")
    assert daemon.text.count(heard) == 1
    after = daemon.children()
    assert after[role].pid != pid
    assert others_than(role, after) == others_than(role, before)
    if role != "api_server":
        daemon.wait_for(
            f"NotReady(what='{TITLES[role]} hangs and is killed'",
            f"NotReady(what='{TITLES[role]} is being restarted'",
            f"heard Restarted(role='{role}', hung=True)",
            "api 0: heard Condition(reasons=())",
        )


def test_a_front_end_that_the_engine_gave_up_is_killed_once(
    start: Callable[..., FakeDaemon],
) -> None:
    daemon = start()
    daemon.wait_ready()
    before = daemon.children()
    before["api_server"].suspend()
    os.kill(before["engine_core"].pid, signal.SIGIO)
    daemon.wait_for("api 0: is back after", "engine 0: heard NewFrontEnd(index=0, incarnation=1)")
    os.kill(before["engine_core"].pid, signal.SIGIO)
    before["engine_core"].kill()
    daemon.wait_for("engine 0: is back after")
    after = daemon.children()
    assert daemon.text.count("api 0: is back after") == 1, "the complaint was of an earlier life"
    assert after["api_server"].pid != before["api_server"].pid
    assert after["worker"].pid == before["worker"].pid


def test_without_progress_it_is_not_tried_for_ever(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("max_restarts=2")
    daemon.wait_ready()
    pids = {daemon.children()["worker"].pid}
    for life in (1, 2):
        os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
        daemon.wait_for(f"worker 0: life {life}", f"NewWorkers(worker_epoch={life + 1})")
        pids.add(daemon.children()["worker"].pid)
    os.kill(daemon.children()["worker"].pid, signal.SIGUSR2)
    assert daemon.wait_exit() == 1
    assert len(pids) == 3
    assert "tokend: 2 restarts have not led to one completed step" in daemon.text
    failed = (
        r"tokend: worker 0 \(pid \d+\) failed with RuntimeError: the core is cracked while serv"
    )
    assert re.search(failed, daemon.text)
    assert daemon.text.count("Traceback") == 3
    assert list(daemon.run_parent.iterdir()) == []


def test_what_the_user_must_mend_is_not_tried_again(start: Callable[..., FakeDaemon]) -> None:
    daemon = start("worker=bad_model_later")
    daemon.wait_ready()
    daemon.children()["worker"].kill()
    assert daemon.wait_exit() == 2
    assert daemon.text.splitlines()[-1] == "tokend: config.json asks for rope type 'moebius'"


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
        assert "EXTEND_TIMEOUT_USEC=44000000" in heard, "30 s for requests and all that follows"


def test_a_worker_that_the_engine_does_not_trust_is_replaced(
    start: Callable[..., FakeDaemon],
) -> None:
    daemon = start()
    daemon.wait_ready()
    engine = daemon.children()["engine_core"]
    engine.send_signal(signal.SIGALRM)
    daemon.wait_for(
        "worker 0: is not to be trusted and is ended: it babbles",
        "was killed by SIGKILL; it is started again",
        "worker 0: life 1, epochs 1 and 2",
        "worker 0: is back after",
    )
    engine.send_signal(signal.SIGALRM)  # of the epoch that is over
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_exit() == 0
    assert daemon.text.count("is started again") == 1
    assert "engine 0: life" not in daemon.text


def test_a_worker_that_is_not_trusted_before_the_daemon_is_ready_ends_it(
    start: Callable[..., FakeDaemon],
) -> None:
    daemon = start("api_server=mute")
    daemon.wait_for("the pool is small")
    daemon.children()["engine_core"].send_signal(signal.SIGALRM)
    assert daemon.wait_exit() == 1
    assert "worker 0: is not to be trusted and is ended: it babbles" in daemon.text
    assert "was killed by SIGKILL while starting" in daemon.text
