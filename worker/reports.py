"""What others hear of a worker while it gets ready; knows nothing of what it does."""

from typing import Protocol

from proto.lifecycle import Notice, Progress
from proto.sockets import Link


class Reports(Protocol):
    """Whoever wants to know how far a worker is."""

    def progress(self, what: str, fraction: float) -> None:
        """`fraction` (0 to 1) of something that takes long is done."""
        ...

    def notice(self, message: str) -> None:
        """A fact for whoever runs the daemon."""
        ...


class NoReports:
    """Nobody wants to know."""

    def progress(self, what: str, fraction: float) -> None:
        pass

    def notice(self, message: str) -> None:
        pass


class SupervisorReports:
    """The supervisor wants to know; a process that says nothing for long is a hung one."""

    def __init__(self, supervisor: Link, index: int) -> None:
        self._supervisor = supervisor
        self._index = index

    def progress(self, what: str, fraction: float) -> None:
        self._supervisor.send(Progress("worker", self._index, what, fraction))

    def notice(self, message: str) -> None:
        self._supervisor.send(Notice("worker", self._index, message))
