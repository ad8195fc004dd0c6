"""A client connection to a Redis server, for large values (RESP2).

Large replies are read directly into the caller's memory. Every call has a deadline: a server that
is down, stops in the middle of a reply or sends a byte now and then costs that much time, then the
call raises. A connection never reconnects or retries, and is not thread-safe. It is in proto/
because the engine (lookups) and the workers (copies) use it; docs/architecture.md says why it is
not the `redis` package.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from proto.errors import TokendError
from proto.settings.kv_transfer_config import RemoteAddress

_CHUNK: Final = 64 << 10
_MAX_LINE: Final = 64 << 10
"""Limit for the first line of a reply; only error messages are longer than a number."""
_MAX_SHORT: Final = 16 << 20
"""Limit for a value that is not read into the caller's memory."""
_MAX_PARTS: Final = 1 << 16
"""Limit for the elements of an array reply, nested ones included."""
_MAX_DEPTH: Final = 8
"""Limit for nested array replies."""
MISSING: Final = -1
"""Length returned for a missing value."""

Reply = int | bytes | str | None | list["Reply"]
"""An integer, a value (bytes), a status (str), null, or an array of replies."""


class RemoteStoreError(TokendError):
    """No reply in time, or not a valid one. The connection must be closed."""


class RemoteRefusalError(TokendError):
    """The server replied with an error; the connection stays usable."""


class RedisConnection:
    """An open connection with a deadline for every call.

    seconds: time limit for connecting. Raises RemoteStoreError.
    """

    def __init__(self, address: RemoteAddress, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pending = bytearray()
        self._parts_left = 0
        try:
            self._socket = self._connect(address)
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise RemoteStoreError(f"{address}: {error}") from None
        try:
            self._handshake(address)
        except TokendError as error:
            self.close()
            raise RemoteStoreError(f"{address}: {error}") from None

    def call(self, seconds: float, *words: bytes) -> Reply:
        """Send one command and return its reply; raises RemoteStoreError or RemoteRefusalError."""
        self.set_deadline(seconds)
        self.send([words])
        return self.reply()

    def set_deadline(self, seconds: float) -> None:
        """Limit the time of all following calls together, until it is set again."""
        self._deadline = time.monotonic() + seconds

    def send(self, commands: Sequence[Sequence[bytes | memoryview]]) -> None:
        """Send commands; their replies arrive in the same order. Large words are not copied."""
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
        """Read the next reply; raises RemoteRefusalError if it is an error."""
        self._parts_left = _MAX_PARTS
        return self._reply(_MAX_DEPTH)

    def _reply(self, depth: int) -> Reply:
        """depth: how many levels of nested arrays are allowed."""
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
                raise RemoteStoreError(f"an array of {length} elements")
            if not depth:
                raise RemoteStoreError("an array with too many nested arrays")
            self._parts_left -= length
            return [self._reply(depth - 1) for _ in range(length)]
        raise RemoteStoreError("a reply that is not RESP")

    def reply_into(self, memory: memoryview) -> int:
        """Read the next reply, a value, into `memory`; return its length, or MISSING.

        A value of another length than `memory` is read and dropped.
        """
        line = self._line()
        if line[:1] == b"-":
            raise RemoteRefusalError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise RemoteStoreError("a reply that is no value")
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
                plain.settimeout(self._seconds_left())
                plain.connect(address.path)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((address.host, address.port), timeout=self._seconds_left())
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not address.tls:
            return plain
        with contextlib.ExitStack() as undo:
            undo.callback(plain.close)
            plain.settimeout(self._seconds_left())
            wrapped = ssl.create_default_context().wrap_socket(plain, server_hostname=address.host)
            undo.pop_all()
        return wrapped

    def _handshake(self, address: RemoteAddress) -> None:
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
                raise RemoteStoreError("a reply that is not RESP")
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
            self._socket.settimeout(self._seconds_left())
            count = self._socket.recv_into(memory)
        except (OSError, ssl.SSLError) as error:
            raise RemoteStoreError(str(error)) from None
        if not count:
            raise RemoteStoreError("the server has closed the connection")
        return count

    def _send_all(self, memory: memoryview) -> None:
        try:
            self._socket.settimeout(self._seconds_left())
            self._socket.sendall(memory)  # one timeout for the whole buffer
        except (OSError, ssl.SSLError) as error:
            raise RemoteStoreError(str(error)) from None

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out")
        return left

    @staticmethod
    def _number(text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise RemoteStoreError("a reply that is not RESP") from None


__all__ = ["MISSING", "RedisConnection", "RemoteRefusalError", "RemoteStoreError", "Reply"]
