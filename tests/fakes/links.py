"""Messages of a link, for tests that wait for them."""

from typing import Any

from proto.runtime.sockets import Link, Poller

WAIT_SECONDS = 20.0
"""Seconds after which a test fails instead of waiting."""


def receive(link: Link, count: int = 1) -> list[Any]:
    """Return messages of a link; waits until there are at least `count`."""
    messages: list[Any] = []
    poller = Poller([link])
    while len(messages) < count:
        assert poller.wait(WAIT_SECONDS)
        messages += link.receive()
    return messages
