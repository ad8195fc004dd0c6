"""What a policy for waiting requests must offer.

A queue orders; it decides nothing about blocks, budgets or statuses.
"""

from collections.abc import Iterator
from typing import Protocol

from engine_core.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted.

    A request that is set aside keeps its place: peek and pop pass over it until
    it is brought back, and then it stands where it would have stood anyway.
    """

    def add(self, request: Request) -> None:
        """Put a new request in its place."""
        ...

    def restore(self, request: Request) -> None:
        """Put back a request that was running and lost its blocks."""
        ...

    def peek(self) -> Request:
        """The next request that is not set aside; there must be one."""
        ...

    def pop(self) -> Request:
        """Take the next request out that is not set aside; there must be one."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is; raises KeyError when it is not here."""
        ...

    def set_aside(self, request: Request) -> None:
        """Let those behind it pass; raises KeyError for a request that is not in the line."""
        ...

    def bring_back(self, request: Request) -> None:
        """End of set_aside; raises KeyError for a request that is not set aside."""
        ...

    @property
    def num_ready(self) -> int:
        """How many are not set aside."""
        ...

    def __len__(self) -> int:
        """All of them."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """All of them, in the order of admission."""
        ...
