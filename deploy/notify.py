"""Reports the state of the daemon to a service manager such as systemd.

Protocol: sd_notify(3), sd_watchdog_enabled(3).
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Environment variables that a service manager sets for the process it starts, not for children."""

_SEND_SECONDS: Final = 1.0
_START_SECONDS: Final = 300
"""Extension of the start timeout, counted from each progress report."""
_STOP_SLACK_SECONDS: Final = 10
"""Time that a shutdown may take in addition to waiting for requests."""
_PROGRESS_SECONDS: Final = 1.0
"""Minimum time between two reports about the same operation."""


class SystemdNotifier:
    """Sends states and heartbeats to the service manager; does nothing without one.

    An unreachable service manager is ignored.

    variables: the environment variables that the service manager has set.
    """

    def __init__(
        self, variables: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        address = variables.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._heartbeat_interval: float | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_SECONDS)
            self._heartbeat_interval = _heartbeat_interval(variables)
        self._next_heartbeat = clock()
        self._last_progress = ("", float("-inf"))
        self._serving_status = _status("serving")

    def report_starting(self, what: str, fraction: float | None = None) -> None:
        """Report progress of the start, which extends the start timeout."""
        now = self._clock()
        if what == self._last_progress[0] and now - self._last_progress[1] < _PROGRESS_SECONDS:
            return
        self._last_progress = (what, now)
        percent = "" if fraction is None else f" {fraction:.0%}"
        self._send(_extend_timeout(_START_SECONDS), _status(what + percent))

    def report_ready(self, status: str) -> None:
        self._serving_status = _status(status)
        self._send("READY=1", self._serving_status)

    def report_reloading(self) -> None:
        now = round(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
        timeout = _extend_timeout(_START_SECONDS)
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", timeout, _status("reloading"))

    def report_reloaded(self) -> None:
        """Report the end of a reload, whether it succeeded or not."""
        self._send("READY=1", self._serving_status)

    def report_stopping(self, seconds: float) -> None:
        """Report that the shutdown has begun and may take this long."""
        timeout = _extend_timeout(seconds + _STOP_SLACK_SECONDS)
        self._send("STOPPING=1", timeout, _status("stopping"))

    def send_heartbeat(self, healthy: bool) -> None:
        """Send a heartbeat if one is due; call it in every turn of the main loop.

        healthy: whether the supervisor can repair the daemon; otherwise no heartbeat is sent, and
        the service manager restarts the daemon.
        """
        if self._heartbeat_interval is None or self._clock() < self._next_heartbeat:
            return
        self._next_heartbeat = self._clock() + self._heartbeat_interval
        if healthy:
            self._send("WATCHDOG=1")

    def seconds_to_next_heartbeat(self) -> float | None:
        """Return the seconds until the next heartbeat; None if none is expected."""
        if self._heartbeat_interval is None:
            return None
        return max(0.0, self._next_heartbeat - self._clock())

    def _send(self, *assignments: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(assignments).encode(), self._address)


def _heartbeat_interval(variables: Mapping[str, str]) -> float | None:
    """Return half of the watchdog's timeout in seconds; None if it does not watch this process."""
    timeout = variables.get("WATCHDOG_USEC", "")
    if not timeout.isascii() or not timeout.isdigit() or int(timeout) == 0:
        return None
    if variables.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(timeout) / 1e6 / 2


def _extend_timeout(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"


def _status(text: str) -> str:
    """Return a status on one line: a line break would begin another assignment."""
    return "STATUS=" + " ".join(text.split())
