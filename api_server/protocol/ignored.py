"""Fields that no API defines: left aside, and named to whoever sent them.

Owns the names of one request. What a client sent comes into a header and a log line, so
little of it is kept and nothing that could be more than a name.
"""

import re
from typing import Final

MAX_NAMES: Final = 16
MAX_NAME_CHARACTERS: Final = 64
HEADER: Final = b"x-tokend-ignored"
_ODD: Final = re.compile(r"[^A-Za-z0-9_.-]")


def not_shown(kind: str) -> str:
    """What the model reads where a tool gave something that it cannot."""
    return f"[{kind}: not shown, only text can be read here]"


class IgnoredFields:
    """Names in the order in which they came, each once, and how many are not kept."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._num_more = 0

    def add(self, name: str) -> None:
        """One more. Odd characters become question marks, a long name is cut."""
        name = name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 3] + "..."
        name = _ODD.sub("?", name)
        if name in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[name] = None
        else:
            self._num_more += 1

    def __str__(self) -> str:
        """The names with commas between them; empty for none."""
        more = [f"{self._num_more} more"] if self._num_more else []
        return ", ".join([*self._names, *more])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header that tells of them, if there are any."""
        return [(HEADER, str(self).encode())] if self._names else []
