"""What the supervisor asks of the engine.

Owns the engine's end of that link, as far as it is read, and keeps what was asked until
somebody acts on it. Whether the engine is still there is answered at once.
"""

from collections.abc import Callable

from proto.codec import Message
from proto.lifecycle import Alive, NewFrontEnd, NewWorkers, Paused, Ping, Shutdown
from proto.sockets import Link


class Orders:
    """The word of the supervisor. stopped: it has asked for the end. report: answers a Ping."""

    def __init__(self, link: Link, report: Callable[[], Message] = Alive) -> None:
        self.link = link
        self.stopped = False
        self._report = report
        self._worker_epochs: list[int] = []
        self._front_ends: list[NewFrontEnd] = []
        self._pauses: list[Paused] = []

    def receive(self) -> bool:
        """Take in what has arrived; whether there is anything to do but for what is done here."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Ping):
                self.link.send(self._report())
            elif isinstance(message, Shutdown):
                self.stopped = True
            elif isinstance(message, NewWorkers):
                self._worker_epochs.append(message.worker_epoch)
            elif isinstance(message, NewFrontEnd):
                self._front_ends.append(message)
            elif isinstance(message, Paused):
                self._pauses.append(message)
        return not all(isinstance(each, Ping) for each in messages)

    def take_worker_epochs(self) -> list[int]:
        """The epochs of workers that take over, the last of which counts."""
        if not self._worker_epochs:
            return self._worker_epochs
        taken, self._worker_epochs = self._worker_epochs, []
        return taken

    def take_front_ends(self) -> list[NewFrontEnd]:
        """The front ends that take the place of others."""
        taken, self._front_ends = self._front_ends, []
        return taken

    def take_pauses(self) -> list[Paused]:
        """What the engine of now was told by its operators, for one that is left to do as well."""
        taken, self._pauses = self._pauses, []
        return taken
