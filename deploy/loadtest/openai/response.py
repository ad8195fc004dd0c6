"""The bytes of one HTTP/1.1 response, as they come, to the bytes of its body.

Knows nothing of sockets, and nothing of what the body means.

      HTTP/1.1 200 OK\\r\\n … \\r\\n\\r\\n   5\\r\\n  hello  \\r\\n  0\\r\\n  \\r\\n
      └────────── head ─────────────┘   └size┘└data┘ └─┘  └size┘└trailer┘
"""

from collections.abc import Callable
from typing import Final

from proto.errors import TokendError

_MAX_HEAD_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 12


class BrokenResponseError(TokendError):
    """What came is no response, or not all of one."""


class ResponseReader:
    """status: 0 until the head is there. complete: nothing more belongs to this response.

    reusable: the connection may carry another request when this one is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        self.complete = False
        self._rest = b""
        self._left = 0
        self._read: Callable[[list[bytes]], bool] = self._read_head

    @property
    def begun(self) -> bool:
        """Something has come."""
        return self.status > 0 or bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body; raises BrokenResponseError."""
        self._rest = self._rest + data if self._rest else data
        pieces: list[bytes] = []
        while not self.complete and self._read(pieces):
            pass
        if self.complete and self._rest:
            self.reusable = False
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """The connection is closed; raises BrokenResponseError if something is missing."""
        if self._read == self._read_all:
            self.complete = True
        elif not self.complete:
            what = "in the middle of an answer" if self.begun else "without an answer"
            raise BrokenResponseError(f"the connection was closed {what}")

    def _read_head(self, _: list[bytes]) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise BrokenResponseError("the head of the answer does not end")
            return False
        lines, self._rest = self._rest[:end].split(b"\r\n"), self._rest[end + 4 :]
        status = _status(lines[0])
        if status < 200:  # 100 Continue and the like come before the response
            return True
        headers = dict(map(_header, lines[1:]))
        self.status = status
        self.reusable = headers.get(b"connection", b"").lower() != b"close"
        self._begin_body(headers)
        return True

    def _begin_body(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._read = self._read_size
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
            self._read = self._read_content
            self.complete = self._left == 0
        elif self.status in (204, 304):
            self.complete = True
        else:
            self.reusable = False
            self._read = self._read_all

    def _read_content(self, pieces: list[bytes]) -> bool:
        self._take(pieces)
        self.complete = self._left == 0
        return False

    def _read_all(self, pieces: list[bytes]) -> bool:
        pieces.append(self._rest)
        self._rest = b""
        return False

    def _read_size(self, _: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        self._left = _number(line.partition(b";")[0], 16)
        self._read = self._read_chunk if self._left else self._read_trailer
        return True

    def _read_chunk(self, pieces: list[bytes]) -> bool:
        if not self._rest:
            return False
        self._take(pieces)
        if not self._left:
            self._read = self._read_chunk_end
        return True

    def _read_chunk_end(self, _: list[bytes]) -> bool:
        if len(self._rest) < 2:
            return False
        if not self._rest.startswith(b"\r\n"):
            raise BrokenResponseError("a chunk of the answer is longer than it says")
        self._rest = self._rest[2:]
        self._read = self._read_size
        return True

    def _read_trailer(self, _: list[bytes]) -> bool:
        line = self._line()
        self.complete = line == b""
        return line is not None

    def _take(self, pieces: list[bytes]) -> None:
        piece = self._rest[: self._left]
        if piece:
            pieces.append(piece)
        self._rest = self._rest[len(piece) :]
        self._left -= len(piece)

    def _line(self) -> bytes | None:
        """The next line; None while its end is missing."""
        end = self._rest.find(b"\r\n")
        if end < 0:
            if len(self._rest) > _MAX_LINE_BYTES:
                raise BrokenResponseError("a line of the answer does not end")
            return None
        line, self._rest = self._rest[:end], self._rest[end + 2 :]
        return line


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise BrokenResponseError(f"not HTTP: {line[:80]!r}")
    return _number(rest.partition(b" ")[0], 10)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _number(text: bytes, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise BrokenResponseError(f"not a number: {text[:80]!r}")
    return number
