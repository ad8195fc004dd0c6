"""systemd notifications: the protocol over a real socket, times on a fake clock."""

import io
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.notify import SystemdNotifier

LIMIT_SECONDS = 10.0


class Manager:
    """The service manager. address: the value of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(LIMIT_SECONDS)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def receive(self) -> list[str]:
        """Return the assignments of the next message."""
        return self._socket.recv(4096).decode().split("\n")

    def is_silent(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(LIMIT_SECONDS)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    manager = Manager(path if request.param == "path" else f"@tokend-{os.getpid()}")
    yield manager
    manager.close()


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_starting_ready_reloading_and_stopping(manager: Manager) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": manager.address})
    notifier.report_starting("loading\nREADY=1")
    assert manager.receive() == ["EXTEND_TIMEOUT_USEC=300000000", "STATUS=loading READY=1"]
    notifier.report_ready("serving")
    assert manager.receive() == ["READY=1", "STATUS=serving"]
    notifier.report_reloading()
    reloading, clock, more_time, status = manager.receive()
    assert (reloading, status) == ("RELOADING=1", "STATUS=reloading")
    microseconds = int(clock.removeprefix("MONOTONIC_USEC="))
    assert abs(microseconds / 1e6 - time.clock_gettime(time.CLOCK_MONOTONIC)) < LIMIT_SECONDS
    assert more_time == "EXTEND_TIMEOUT_USEC=300000000"
    notifier.report_reloaded()
    assert manager.receive() == ["READY=1", "STATUS=serving"]
    notifier.report_stopping(34.0)
    assert manager.receive() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=44000000", "STATUS=stopping"]
    notifier.send_heartbeat(True)
    assert manager.is_silent(), "no heartbeat without WATCHDOG_USEC"
    assert notifier.seconds_to_next_heartbeat() is None


def test_heartbeats_are_sent_every_half_period(manager: Manager) -> None:
    clock = FakeClock()
    variables = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    notifier = SystemdNotifier(variables, clock)
    assert notifier.seconds_to_next_heartbeat() == 0.0
    notifier.send_heartbeat(True)
    assert manager.receive() == ["WATCHDOG=1"]
    clock.now += 5.0
    notifier.send_heartbeat(True)
    assert manager.is_silent()
    assert notifier.seconds_to_next_heartbeat() == pytest.approx(10.0)
    clock.now += 10.0
    notifier.send_heartbeat(True)
    assert manager.receive() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "watchdog",
    [{"WATCHDOG_PID": "1", "WATCHDOG_USEC": "1000000"}, {"WATCHDOG_USEC": "soon"}, {}],
)
def test_no_heartbeat_for_another_process_or_an_invalid_period(
    manager: Manager, watchdog: dict[str, str]
) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": manager.address, **watchdog})
    notifier.send_heartbeat(True)
    assert manager.is_silent()
    assert notifier.seconds_to_next_heartbeat() is None


def test_no_heartbeat_from_a_daemon_that_cannot_recover(manager: Manager) -> None:
    clock = FakeClock()
    variables = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "30000000"}
    notifier = SystemdNotifier(variables, clock)
    notifier.send_heartbeat(False)
    assert manager.is_silent()
    assert notifier.seconds_to_next_heartbeat() == pytest.approx(15.0), "or the loop would spin"
    clock.now += 15.0
    notifier.send_heartbeat(True)
    assert manager.receive() == ["WATCHDOG=1"]


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "notify"])
def test_without_a_service_manager_nothing_is_sent(address: str | None) -> None:
    variables = {} if address is None else {"NOTIFY_SOCKET": address}
    notifier = SystemdNotifier({**variables, "WATCHDOG_USEC": "1000000"})
    notifier.report_starting("x")
    notifier.report_ready("x")
    notifier.report_reloading()
    notifier.report_reloaded()
    notifier.send_heartbeat(True)
    notifier.report_stopping(1.0)
    assert notifier.seconds_to_next_heartbeat() is None


def test_a_missing_manager_socket_is_ignored(tmp_path: Path) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notifier.report_ready("serving")
    notifier.report_stopping(1.0)


def test_progress_is_forwarded_at_most_once_a_second(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    clock, shown = FakeClock(), io.StringIO()
    notifier = SystemdNotifier({"NOTIFY_SOCKET": manager.address}, clock)
    display = Display(shown, notifier)
    for fraction in (0.0, 0.1, 0.2):
        display.progress("loading", fraction, "worker 0")
    assert manager.receive()[-1] == "STATUS=worker 0: loading 0%"
    assert manager.is_silent()
    clock.now += 1.0
    display.progress("loading", 0.35, "worker 0")
    assert manager.receive()[-1] == "STATUS=worker 0: loading 35%"
    display.progress("warming up")
    assert manager.receive()[-1] == "STATUS=tokend: warming up"
    display.notice("mind the gap")
    display.close()
    assert manager.is_silent()
    assert shown.getvalue().splitlines() == [
        "worker 0: loading …",
        "tokend: warming up …",
        "tokend: mind the gap",
    ]
    manager.close()


def test_child_processes_do_not_inherit_the_notify_variables() -> None:
    notify = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2"}
    around = HostEnvironment.of({**notify, "PATH": "/bin"})
    assert around.variables == {"PATH": "/bin"}
    assert around.service_manager == notify
    assert HostEnvironment.of({}).service_manager == {}
