"""The channels to the front ends.

The path of a channel contains the engine's epoch and the front end's incarnation, so a restarted
process never receives messages for its predecessor.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from proto.messages.engine_io import AdminCall, ToEngine
from proto.messages.lora import AdapterCall, AdapterCard, AdapterList
from proto.messages.view import Watch
from proto.runtime.sockets import Link, PeerStalledError, front_end_path

logger = logging.getLogger("tokend.transport")

LAST_MESSAGES_SECONDS: Final = 1.0
"""Time that a stopping engine waits for front ends to receive the last messages."""


class FrontEndLinks:
    """The channels of all front ends, by index.

    A front end that does not read its messages until its send buffer overflows is considered dead:
    it is removed, and `pop_stalled` returns it once.
    incarnations: of each front end, by index.
    """

    def __init__(self, run_dir: str, epoch: int, incarnations: Sequence[int]) -> None:
        self._run_dir = run_dir
        self._epoch = epoch
        self._context: zmq.Context[Any] = zmq.Context()
        self._incarnations = dict(enumerate(incarnations))
        self._links = {
            front_end: self._bind(front_end, incarnation)
            for front_end, incarnation in enumerate(incarnations)
        }
        self._stalled: list[tuple[int, Link]] = []
        self._greeting: msgspec.Struct | None = None
        self._adapters: dict[str, AdapterCard] | None = None

    @property
    def links(self) -> list[Link]:
        """Return the channels of the front ends that are alive."""
        return list(self._links.values())

    @property
    def alive(self) -> list[int]:
        return list(self._links)

    def receive(self) -> list[tuple[int, ToEngine]]:
        """Return received messages with the index of the sender; drops other epochs."""
        received = []
        for front_end, link in self._links.items():
            for message in link.receive():
                if message.epoch == self._epoch:
                    received.append((front_end, message))
                else:
                    logger.warning("front end %d: dropped %s", front_end, _description(message))
        return received

    def send(self, front_end: int, message: msgspec.Struct) -> None:
        """Queue a message for a front end, unless it is dead; never blocks."""
        link = self._links.get(front_end)
        if link is None:
            return
        try:
            link.send(message)
        except PeerStalledError as error:
            logger.error("front end %d is declared dead: %s", front_end, error)
            self._stalled.append((front_end, self._links.pop(front_end)))

    def keeps_up(self, front_end: int) -> bool:
        """Return whether a front end is alive and no message waits in its send buffer."""
        link = self._links.get(front_end)
        return link is not None and link.flush()

    def incarnation(self, front_end: int) -> int:
        return self._incarnations[front_end]

    def send_greeting(self, message: msgspec.Struct) -> None:
        """Send a message to every front end, and first of all to those that connect later."""
        self._greeting = message
        for front_end in list(self._links):
            self.send(front_end, message)

    def send_adapters(self, message: AdapterList) -> None:
        """Send adapters to every front end, and all of them after the greeting to later ones."""
        if self._adapters is None:
            self._adapters = {}
        message.apply_to(self._adapters)
        for front_end in list(self._links):
            self.send(front_end, message)

    def replace(self, front_end: int, incarnation: int) -> tuple[list[Link], Link]:
        """Bind a channel for the successor of a dead front end.

        Returns the old channels, for the caller to remove from its poller and close, and the new
        one.
        """
        old = [link for stalled, link in self._stalled if stalled == front_end]
        self._stalled = [(other, link) for other, link in self._stalled if other != front_end]
        if front_end in self._links:
            old.append(self._links.pop(front_end))
        self._incarnations[front_end] = incarnation
        link = self._links[front_end] = self._bind(front_end, incarnation)
        if self._greeting is not None:
            self.send(front_end, self._greeting)
        if self._adapters is not None:
            self.send(front_end, AdapterList(self._epoch, list(self._adapters.values())))
        return old, link

    def pop_stalled(self) -> list[tuple[int, Link]]:
        """Return the front ends that stalled since the last call, with their channels to close."""
        stalled, self._stalled = self._stalled, []
        return stalled

    def _bind(self, front_end: int, incarnation: int) -> Link:
        path = front_end_path(self._run_dir, self._epoch, front_end, incarnation)
        return Link.bind(path, ToEngine, self._context)

    def close(self) -> None:
        """Close the channels once the last messages are sent, which takes a second at most.

        The last message of a crashing engine names the request that it crashed with
        (`OutputDispatcher.report_begun`).
        """
        for link in self._links.values():
            link.close(LAST_MESSAGES_SECONDS)
        self._context.destroy(int(LAST_MESSAGES_SECONDS * 1000))


def _description(message: ToEngine) -> str:
    if isinstance(message, Watch):
        return f"Watch of epoch {message.epoch}"
    if isinstance(message, AdminCall | AdapterCall):
        return f"{type(message).__name__} {message.call_id} of epoch {message.epoch}"
    subject = message.request_id
    return f"{type(message).__name__} {subject} of epoch {message.epoch}"
