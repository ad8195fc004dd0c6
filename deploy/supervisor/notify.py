"""Tells a service manager how the daemon is: the notification protocol of systemd.

Owns one datagram socket and the time of the next heartbeat. Knows neither
processes nor settings. Protocol: sd_notify(3), sd_watchdog_enabled(3).
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from deploy.display import Display

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Meant for the process that the manager started, and for none of its children."""

_SEND_SECONDS: Final = 1.0
_START_SECONDS: Final = 300
"""A start that reports progress may take this much longer, counted from each report."""
_STOP_SLACK_SECONDS: Final = 10
"""For all that an end does beside waiting."""
_STATUS_SECONDS: Final = 1.0
"""Progress of one and the same thing is passed on this often at most."""

Clock = Callable[[], float]


class Notifier(Protocol):
    """Who wants to know how the daemon is."""

    def starting(self, what: str) -> None:
        """The start has come as far as `what`, and needs more time."""

    def ready(self, status: str) -> None:
        """Requests are taken."""

    def reloading(self) -> None:
        """A reload has begun."""

    def reloaded(self) -> None:
        """It is over, however it went."""

    def stopping(self, seconds: float) -> None:
        """The end has begun, and may take so long."""

    def beat(self, well: bool) -> None:
        """The supervisor's loop has turned; may be called as often as one likes.

        well: it can mend what is broken; otherwise the manager hears nothing.
        """

    def seconds_to_next_beat(self) -> float | None:
        """How long the loop may sleep; None for as long as it likes."""


class NoServiceManager:
    """Started by hand, or by something that does not ask."""

    def starting(self, what: str) -> None:
        """Nothing."""

    def ready(self, status: str) -> None:
        """Nothing."""

    def reloading(self) -> None:
        """Nothing."""

    def reloaded(self) -> None:
        """Nothing."""

    def stopping(self, seconds: float) -> None:
        """Nothing."""

    def beat(self, well: bool) -> None:
        """Nothing."""

    def seconds_to_next_beat(self) -> float | None:
        """As long as it likes."""
        return None


class NoServiceWatchdog:
    """The manager expects no heartbeat."""

    def due(self) -> bool:
        """Never."""
        return False

    def seconds_left(self) -> float | None:
        """For ever."""
        return None


class ServiceWatchdog:
    """The manager kills a daemon that is silent for `period` seconds; half of that is aimed at."""

    def __init__(self, period: float, clock: Clock) -> None:
        self._interval = period / 2
        self._clock = clock
        self._next = clock()

    def due(self) -> bool:
        """Whether it is time; if so, the next time is set."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + self._interval
        return True

    def seconds_left(self) -> float | None:
        return max(0.0, self._next - self._clock())


class SystemdNotifier:
    """Speaks to the socket in NOTIFY_SOCKET.

    A manager that cannot be reached is no reason to end: what it does about the
    silence is its own affair.
    """

    def __init__(self, address: str, watchdog: ServiceWatchdog | NoServiceWatchdog) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._serving = _status("serving")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_SEND_SECONDS)

    def starting(self, what: str) -> None:
        self._send(_more_time(_START_SECONDS), _status(what))

    def ready(self, status: str) -> None:
        self._serving = _status(status)
        self._send("READY=1", self._serving)

    def reloading(self) -> None:
        now = round(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
        more_time = _more_time(_START_SECONDS)
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", more_time, _status("reloading"))

    def reloaded(self) -> None:
        self._send("READY=1", self._serving)

    def stopping(self, seconds: float) -> None:
        self._send("STOPPING=1", _more_time(seconds + _STOP_SLACK_SECONDS), _status("stopping"))

    def beat(self, well: bool) -> None:
        if self._watchdog.due() and well:
            self._send("WATCHDOG=1")

    def seconds_to_next_beat(self) -> float | None:
        return self._watchdog.seconds_left()

    def _send(self, *assignments: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(assignments).encode(), self._address)


def notifier_for(variables: Mapping[str, str], clock: Clock = time.monotonic) -> Notifier:
    """Who listens, by the variables that the service manager set."""
    address = variables.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return NoServiceManager()
    return SystemdNotifier(address, _watchdog_for(variables, clock))


def _watchdog_for(
    variables: Mapping[str, str], clock: Clock
) -> ServiceWatchdog | NoServiceWatchdog:
    period = variables.get("WATCHDOG_USEC", "")
    if not period.isascii() or not period.isdigit() or int(period) == 0:
        return NoServiceWatchdog()
    if variables.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return NoServiceWatchdog()
    return ServiceWatchdog(int(period) / 1e6, clock)


def _more_time(seconds: float) -> str:
    """What is going on may take so long from now, whatever the unit says."""
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"


def _status(text: str) -> str:
    """A line break would begin another assignment."""
    return "STATUS=" + " ".join(text.split())


class NotifyingDisplay:
    """A display whose progress the service manager hears of, too."""

    def __init__(self, display: Display, notifier: Notifier, clock: Clock = time.monotonic) -> None:
        self._display = display
        self._notifier = notifier
        self._clock = clock
        self._last = ("", float("-inf"))

    def close(self) -> None:
        self._display.close()

    def progress(self, what: str, fraction: float | None = None, who: str = "tokend") -> None:
        self._display.progress(what, fraction, who)
        line, now = f"{who}: {what}", self._clock()
        if line != self._last[0] or now - self._last[1] >= _STATUS_SECONDS:
            self._last = (line, now)
            percent = "" if fraction is None else f" {fraction:.0%}"
            self._notifier.starting(line + percent)

    def notice(self, message: str, who: str = "tokend") -> None:
        self._display.notice(message, who)
