"""A connection to a Redis server: as much of RESP2 as keeping large values takes.

Large replies are read straight into the caller's memory, and everything has a deadline: a server
that is down, stopped in the middle of a reply or trickling bytes costs the time given, and then an
error. Never reconnects or repeats anything by itself. One thread at a time.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from proto.errors import TokendError
from proto.kv_media import RemoteAddress

_CHUNK: Final = 64 << 10
_MAX_LINE: Final = 64 << 10
"""Of a reply's first line; only errors are longer than a number."""
_MAX_SHORT: Final = 16 << 20
"""Of a value that is not read into the caller's memory."""
_MAX_PARTS: Final = 1 << 16
"""Of an answer, those of its parts included."""
_MAX_DEPTH: Final = 8
"""Answers within answers."""
MISSING: Final = -1
"""Length of a value that is not there."""

Reply = int | bytes | str | None | list["Reply"]
"""An integer, a value, a status, nothing, or several of them."""


class RemoteStoreError(TokendError):
    """No answer in time, or one that is none. The connection is of no use any more."""


class RemoteRefusalError(TokendError):
    """The server answered with an error; the connection is as good as before."""


class RedisConnection:
    """seconds: for the connection to be made; later ones are given to each call."""

    def __init__(self, address: RemoteAddress, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pending = bytearray()
        self._parts_left = 0
        try:
            self._socket = self._connect(address)
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise RemoteStoreError(f"{address}: {error}") from None
        try:
            self._greet(address)
        except TokendError as error:
            self.close()
            raise RemoteStoreError(f"{address}: {error}") from None

    def call(self, seconds: float, *words: bytes) -> Reply:
        """One command, one answer; raises RemoteStoreError, or RemoteRefusalError."""
        self.begin(seconds)
        self.send([words])
        return self.reply()

    def begin(self, seconds: float) -> None:
        """What follows, until the next `begin`, has to be over in this time."""
        self._deadline = time.monotonic() + seconds

    def send(self, commands: Sequence[Sequence[bytes | memoryview]]) -> None:
        """Commands whose replies are to be read in the same order. Large words are not copied."""
        small = bytearray()
        for words in commands:
            small += b"*%d\r\n" % len(words)
            for word in words:
                small += b"$%d\r\n" % len(word)
                if len(word) <= _CHUNK:
                    small += word
                else:
                    self._send_all(memoryview(small))
                    self._send_all(memoryview(word))
                    small = bytearray()
                small += b"\r\n"
        self._send_all(memoryview(small))

    def reply(self) -> Reply:
        """The next reply."""
        self._parts_left = _MAX_PARTS
        return self._reply(_MAX_DEPTH)

    def _reply(self, depth: int) -> Reply:
        """depth: answers that this one may have within each other."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            raise RemoteRefusalError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            length = self._number(rest)
            if length == MISSING:
                return None
            if not 0 <= length <= _MAX_SHORT:
                raise RemoteStoreError(f"a value of {length} bytes")
            return self._value(length)
        if kind == b"*":
            length = self._number(rest)
            if not 0 <= length <= self._parts_left:
                raise RemoteStoreError(f"an answer of {length} parts")
            if not depth:
                raise RemoteStoreError("an answer of too many answers within each other")
            self._parts_left -= length
            return [self._reply(depth - 1) for _ in range(length)]
        raise RemoteStoreError("an answer that is not RESP")

    def reply_into(self, memory: memoryview) -> int:
        """The length of the next reply, which is a value; MISSING if there is none.

        It is in `memory` only where it is as long as that; any other is read and dropped.
        """
        line = self._line()
        if line[:1] == b"-":
            raise RemoteRefusalError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise RemoteStoreError("an answer that is no value")
        length = self._number(line[1:])
        if length == MISSING:
            return MISSING
        if length != len(memory):
            if not 0 <= length <= _MAX_SHORT:
                raise RemoteStoreError(f"a value of {length} bytes")
            self._value(length)
            return length
        have = min(length, len(self._pending))
        memory[:have] = self._pending[:have]
        del self._pending[:have]
        while have < length:
            have += self._receive(memory[have:])
        self._end_of_value()
        return length

    def close(self) -> None:
        self._socket.close()

    def _connect(self, address: RemoteAddress) -> socket.socket:
        if address.path:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                plain.settimeout(self._left())
                plain.connect(address.path)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((address.host, address.port), timeout=self._left())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return plain
        with contextlib.ExitStack() as undo:
            undo.callback(plain.close)
            plain.settimeout(self._left())
            wrapped = ssl.create_default_context().wrap_socket(plain, server_hostname=address.host)
            undo.pop_all()
        return wrapped

    def _greet(self, address: RemoteAddress) -> None:
        if address.password:
            user = [address.username.encode()] if address.username else []
            self.send([[b"AUTH", *user, address.password.encode()]])
            self.reply()
        if address.database:
            self.send([[b"SELECT", b"%d" % address.database]])
            self.reply()
        self.send([[b"PING"]])
        self.reply()

    def _line(self) -> bytes:
        searched = 0
        while (end := self._pending.find(b"\r\n", searched)) < 0:
            if len(self._pending) > _MAX_LINE:
                raise RemoteStoreError("an answer that is not RESP")
            searched = max(0, len(self._pending) - 1)
            self._receive_more()
        line = bytes(self._pending[:end])
        del self._pending[: end + 2]
        return line

    def _value(self, length: int) -> bytes:
        while len(self._pending) < length:
            self._receive_more()
        value = bytes(self._pending[:length])
        del self._pending[:length]
        self._end_of_value()
        return value

    def _end_of_value(self) -> None:
        while len(self._pending) < 2:
            self._receive_more()
        if self._pending[:2] != b"\r\n":
            raise RemoteStoreError("a value that does not end where it should")
        del self._pending[:2]

    def _receive_more(self) -> None:
        chunk = bytearray(_CHUNK)
        count = self._receive(memoryview(chunk))
        self._pending += chunk[:count]

    def _receive(self, memory: memoryview) -> int:
        try:
            self._socket.settimeout(self._left())
            count = self._socket.recv_into(memory)
        except (OSError, ssl.SSLError) as error:
            raise RemoteStoreError(str(error)) from None
        if not count:
            raise RemoteStoreError("the server has closed the connection")
        return count

    def _send_all(self, memory: memoryview) -> None:
        try:
            self._socket.settimeout(self._left())
            self._socket.sendall(memory)  # the time is for all of it
        except (OSError, ssl.SSLError) as error:
            raise RemoteStoreError(str(error)) from None

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out")
        return left

    @staticmethod
    def _number(text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise RemoteStoreError("an answer that is not RESP") from None


__all__ = [
    "MISSING",
    "RedisConnection",
    "RemoteRefusalError",
    "RemoteStoreError",
    "Reply",
]
