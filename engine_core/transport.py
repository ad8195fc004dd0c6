"""The links to the front ends.

Owns one link per front end, at a path of this epoch and of its incarnation, and knows
which of them still read what they are sent. Knows nothing of requests.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from proto.engine_io import AdminCall, EngineCoreRequest, ToEngine
from proto.sockets import Link, PeerStalledError, front_end_path
from proto.view import Watch

logger = logging.getLogger("tokend.transport")

LAST_WORDS_SECONDS: Final = 1.0
"""How long the end waits for what front ends have been told last."""


class FrontEndLinks:
    """Front ends by client index.

    A front end that lets its buffer overflow is dead from then on: its link is
    closed, nothing is sent to it or read from it, and `take_stalled` names it once.
    incarnations: of each front end, by client index.
    """

    def __init__(self, run_dir: str, epoch: int, incarnations: Sequence[int]) -> None:
        self._run_dir = run_dir
        self._epoch = epoch
        self._context: zmq.Context[Any] = zmq.Context()
        self._incarnations = dict(enumerate(incarnations))
        self._links = {
            client: self._bind(client, incarnation)
            for client, incarnation in enumerate(incarnations)
        }
        self._stalled: list[tuple[int, Link]] = []
        self._greeting: list[msgspec.Struct] = []

    @property
    def links(self) -> list[Link]:
        """Of the front ends that are alive."""
        return list(self._links.values())

    @property
    def alive(self) -> list[int]:
        """Client indices of those."""
        return list(self._links)

    def receive(self) -> list[tuple[int, ToEngine]]:
        """What has arrived, with the client index of the sender; of this epoch only."""
        received = []
        for client, link in self._links.items():
            for message in link.receive():
                if message.epoch == self._epoch:
                    received.append((client, message))
                else:
                    logger.warning("front end %d: dropped %s", client, _name(message, self._epoch))
        return received

    def send(self, client: int, message: msgspec.Struct) -> None:
        """Queue a message for a front end; a dead one gets nothing."""
        link = self._links.get(client)
        if link is None:
            return
        try:
            link.send(message)
        except PeerStalledError as error:
            logger.error("front end %d is declared dead: %s", client, error)
            self._stalled.append((client, self._links.pop(client)))

    def keeps_up(self, client: int) -> bool:
        """A front end is alive and has been handed all that it was sent."""
        link = self._links.get(client)
        return link is not None and link.flush()

    def incarnation(self, client: int) -> int:
        """Which life of a front end the links are for."""
        return self._incarnations[client]

    def greet(self, message: msgspec.Struct) -> None:
        """Send a message to every front end, and to those to come before anything else."""
        self._greeting = [message]
        for client in list(self._links):
            self.send(client, message)

    def replace(self, client: int, incarnation: int) -> tuple[list[Link], Link]:
        """A front end died, another one takes its place; returns links to close, and the new one.

        The old links are not closed here, because somebody may be waiting on them.
        """
        old = [link for stalled, link in self._stalled if stalled == client]
        self._stalled = [each for each in self._stalled if each[0] != client]
        if client in self._links:
            old.append(self._links.pop(client))
        self._incarnations[client] = incarnation
        link = self._links[client] = self._bind(client, incarnation)
        for message in self._greeting:
            self.send(client, message)
        return old, link

    def take_stalled(self) -> list[tuple[int, Link]]:
        """Front ends that died since the last call, with the links to close."""
        stalled, self._stalled = self._stalled, []
        return stalled

    def _bind(self, client: int, incarnation: int) -> Link:
        path = front_end_path(self._run_dir, self._epoch, client, incarnation)
        return Link.bind(path, ToEngine, self._context)

    def close(self) -> None:
        """Close the links when all has been sent, which an engine that dies has to wait for.

        What it said last is what it died of (`OutputDispatcher.begins`).
        """
        for link in self._links.values():
            link.close(LAST_WORDS_SECONDS)
        self._context.destroy(int(LAST_WORDS_SECONDS * 1000))


def _name(message: ToEngine, epoch: int) -> str:
    if isinstance(message, Watch):
        return f"Watch of epoch {message.epoch}, this is {epoch}"
    subject = message.call_id if isinstance(message, AdminCall) else message.request_id
    kind = "request" if isinstance(message, EngineCoreRequest) else type(message).__name__
    return f"{kind} {subject} of epoch {message.epoch}, this is {epoch}"
