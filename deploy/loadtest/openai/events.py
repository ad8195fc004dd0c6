"""Server-sent events out of a body that arrives in pieces of any size.

Only the data is of interest; names, ids and comments are skipped. The format is that of the
HTML standard, section 9.2.6, without its lone carriage returns.
"""


class EventSplitter:
    """Holds what has come of a line and of an event that are not over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        if not self._rest and not self._data and piece.startswith(b"data: "):
            # Nearly always: one event, and nothing else.
            end = piece.find(b"\n")
            if end == len(piece) - 2 and piece.endswith(b"\n\n"):
                return [piece[6:-2]]
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return self._events(lines)

    def end(self) -> list[bytes]:
        """The data of an event that was not closed by an empty line."""
        lines, self._rest = [self._rest, b""], b""
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> list[bytes]:
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return found
