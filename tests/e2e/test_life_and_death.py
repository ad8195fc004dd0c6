"""Start and end of a real daemon, graceful and forced; no process or file is left."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deploy.bench.servers import PrintedLine
from deploy.bench.startup import phases
from tests.e2e.daemon import ROLES, Daemon, eventually

pytestmark = pytest.mark.suite("daemons")


ENDLESS = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def generating(url: str) -> Iterator[Iterator[str]]:
    """Run a request during the block; yields the lines after its first."""
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def assert_nothing_left(daemon: Daemon, processes: dict[str, psutil.Process]) -> None:
    for role, process in processes.items():
        assert eventually(lambda p=process: not p.is_running(), 5), f"{role} still runs"
    assert eventually(lambda: list(daemon.runtime_dir.iterdir()) == [], 2)
    assert not [name for name in os.listdir("/dev/shm") if "tokend" in name]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{daemon.url}/health")


def test_processes_have_titles_and_process_groups(daemon: Daemon) -> None:
    processes = daemon.processes()
    assert set(processes) == set(ROLES)
    groups = {os.getpgid(process.pid) for process in processes.values()}
    assert os.getpgid(daemon.process.pid) not in groups
    assert "tokend: engine 0" in " ".join(processes["engine_core"].cmdline())
    assert (daemon.runtime_dir.stat().st_mode & 0o777) == 0o700
    (run_dir,) = daemon.runtime_dir.iterdir()
    assert (run_dir.stat().st_mode & 0o777) == 0o700


def test_the_start_is_reported_by_phase() -> None:
    """The phases of a process add up to no more than the reported total."""
    with Daemon("--log-level", "debug") as daemon:
        assert eventually(lambda: "Ctrl-C stops" in daemon.text)
    reported = re.search(r"start +([\d.]+) s: (.+)", daemon.text)
    assert reported is not None
    found = phases([PrintedLine(0.0, reported[0])])
    names = {name.partition(": ")[0] for name in found if ": " in name}
    assert names == {"worker 0", "engine 0", "api 0"}
    before = found["command"] + found["model"]
    for each in names:
        taken = sum(seconds for name, seconds in found.items() if name.startswith(f"{each}: "))
        assert 0 < taken <= float(reported[1]) - before + 0.05, reported[0]
    assert min(found["worker 0: imports"], found["worker 0: weights"]) > 0


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_daemon_gracefully(stop_signal: signal.Signals) -> None:
    daemon = Daemon()
    daemon.wait_ready()
    processes = daemon.processes()
    with generating(daemon.url):
        pass  # an aborted request delays nothing
    started = time.monotonic()
    daemon.process.send_signal(stop_signal)
    assert daemon.wait_exit() == 0, daemon.text
    assert time.monotonic() - started < 5
    assert_nothing_left(daemon, processes)


def test_a_second_signal_ends_at_once_even_a_stopped_worker() -> None:
    daemon = Daemon()
    daemon.wait_ready()
    processes = daemon.processes()
    processes["worker"].suspend()
    daemon.process.send_signal(signal.SIGINT)
    assert eventually(lambda: not processes["api_server"].is_running(), 3)
    daemon.process.send_signal(signal.SIGINT)
    daemon.wait_exit(timeout=3)
    assert_nothing_left(daemon, processes)


def test_a_death_beyond_max_restarts_ends_the_daemon_and_is_named() -> None:
    """With --max-restarts 0, the first death. The stream ends without a finish reason."""
    daemon = Daemon("--max-restarts", "0")
    daemon.wait_ready()
    processes = daemon.processes()
    received = []
    with generating(daemon.url) as lines:
        started = time.monotonic()
        os.kill(processes["worker"].pid, signal.SIGKILL)
        with contextlib.suppress(httpx.RemoteProtocolError):  # the connection may close at once
            received.extend(lines)
    assert daemon.wait_exit() == 1
    assert time.monotonic() - started < 5
    assert not any('"finish_reason":"stop"' in line for line in received)
    assert not any('"finish_reason":"length"' in line for line in received)
    assert re.search(rf"{ROLES['worker']} 0.*SIGKILL while serving", daemon.text)
    assert_nothing_left(daemon, processes)


def test_killing_the_supervisor_ends_all_processes() -> None:
    daemon = Daemon()
    daemon.wait_ready()
    processes = daemon.processes()
    with generating(daemon.url):
        daemon.process.kill()
        daemon.wait_exit()
        assert_nothing_left(daemon, processes)


def test_sigabrt_shows_the_stack_of_the_supervisor() -> None:
    daemon = Daemon()
    daemon.wait_ready()
    processes = daemon.processes()
    daemon.process.send_signal(signal.SIGABRT)
    assert daemon.wait_exit() == -signal.SIGABRT
    assert re.search(r"deploy/supervisor/supervisor.py.* in _run_loop", daemon.text)
    assert_nothing_left(daemon, processes)


def test_two_daemons_run_side_by_side_and_a_used_port_is_refused(daemon: Daemon) -> None:
    request = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}

    def choices(server: Daemon) -> object:
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60)
        return answer.json()["choices"]

    with Daemon() as other:
        assert other.url != daemon.url
        assert choices(other) == choices(daemon)
        third = Daemon("--port", other.url.rsplit(":", 1)[1])
        assert third.wait_exit() != 0
        assert other.url.rsplit(":", 1)[1] in third.text
        assert "Traceback" not in third.text
    assert choices(daemon)
