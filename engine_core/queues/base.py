"""What a policy for waiting requests must offer.

A queue orders; it decides nothing about blocks, budgets or statuses.
"""

from collections.abc import Iterator
from typing import Protocol

from engine_core.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted."""

    def add(self, request: Request) -> None:
        """Put a new request in its place."""
        ...

    def restore(self, request: Request) -> None:
        """Put back a request that was running and lost its blocks."""
        ...

    def peek(self) -> Request:
        """The next request; the queue must not be empty."""
        ...

    def pop(self) -> Request:
        """Take the next request out; the queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is; raises KeyError when it is not here."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""
        ...
