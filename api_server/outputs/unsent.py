"""What waits for a client that reads its stream more slowly than it is produced.

Owns the count of one HTTP request, over all its streams and choices. A connection that
takes nothing at all is ended by `http_protocol`.
"""

import math
from typing import Final

from api_server.errors import SlowReaderError

MAX_UNSENT_BYTES: Final = 1 << 20
"""Of text and log-probabilities that were produced and that the connection has not taken."""
ENTRY_BYTES: Final = 64
"""What one log-probability with its token counts for."""


class Unsent:
    """limit: bytes; infinite for an answer that is sent as a whole.

    is_blocked: the connection takes nothing more just now. Otherwise all that waits is about
    to be sent, however much a burst of the engine has brought.
    """

    __slots__ = ("_limit", "is_blocked", "num_bytes")

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self.is_blocked = False
        self.num_bytes = 0

    def add_text(self, text: str) -> None:
        self.num_bytes += len(text.encode())

    def add_entries(self, number: int) -> None:
        """Log-probabilities."""
        self.num_bytes += ENTRY_BYTES * number

    def clear(self) -> None:
        """All of it is on its way to the connection."""
        self.num_bytes = 0

    def check(self) -> None:
        """Raise SlowReaderError when too much waits."""
        if self.is_blocked and self.num_bytes > self._limit:
            raise SlowReaderError(
                f"the stream was ended: {self.num_bytes} bytes of it waited to be read"
            )
