"""Authenticated messages between the workers of two daemons, and how blocks travel beside them.

    frame     | length, 4 bytes | message, msgpack | code of authentication, 32 bytes |

The code is HMAC-SHA256 of the frame's number and its message, with a key of the connection and the
direction that both ends derive from the shared secret and both nonces. So a program without the
secret cannot forge, repeat or move a frame. Nothing is encrypted, and blocks have only checksums,
which find accidents. The frames of the handshake have no code: `Welcome` has a proof,
and `Open` is the first frame with a code.

`BlockTransport` is what differs between transports: TCP sends blocks after the message that names
their checksums; shared memory has two areas, of which the producer fills one while the consumer
reads the other.
"""

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final, Protocol, TypeVar

from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError, shown
from proto.messages.kv_peer import (
    MAX_BATCH_BLOCKS,
    NONCE_BYTES,
    PEER_VERSION,
    Blocks,
    Hello,
    Open,
    Opened,
    PeerLayout,
    Refusal,
    ToConsumer,
    ToProducer,
    Welcome,
)
from proto.settings.kv_peer import PeerSettings

_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_CODE_BYTES: Final = 32
_MAX_FRAME: Final = 1 << 18
_BATCH_BYTES: Final = 4 << 20
_UCRED: Final = struct.Struct("<3i")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_AREAS: Final = 2

_to_producer: Final = MessageDecoder[ToProducer](ToProducer)
_to_consumer: Final = MessageDecoder[ToConsumer](ToConsumer)
M = TypeVar("M")


class PeerError(Exception):
    """Why the two ends do not go on; the message says it in words."""


class ConnectionLostError(PeerError):
    """The connection has ended or was too slow, so another one may succeed."""


class Channel:
    """One end of a connection. deadline: monotonic second at which calls fail."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline
        self._send_key = self._receive_key = b""
        self._num_sent = self._num_received = 0

    def use_keys(self, secret: bytes, nonces: bytes, *, is_producer: bool) -> None:
        """Protect all later frames."""
        to_consumer = hmac.digest(secret, b"to consumer" + nonces, "sha256")
        to_producer = hmac.digest(secret, b"to producer" + nonces, "sha256")
        self._send_key, self._receive_key = to_producer, to_consumer
        if is_producer:
            self._send_key, self._receive_key = to_consumer, to_producer

    def send(self, message: ToProducer | ToConsumer) -> None:
        payload = encode(message)
        code = b""
        if self._send_key:
            code = _code(self._send_key, self._num_sent, payload)
            self._num_sent += 1
        self.send_bytes(_LENGTH.pack(len(payload)) + payload + code)

    def receive(self, decoder: MessageDecoder[M]) -> M:
        """Return the next message; raises PeerError for one that is not as it was sent."""
        header = bytearray(_LENGTH.size)
        self.receive_bytes(memoryview(header))
        (length,) = _LENGTH.unpack(header)
        if length > _MAX_FRAME:
            raise PeerError(f"the other daemon sent a message of {length} bytes, over {_MAX_FRAME}")
        frame = bytearray(length + (_CODE_BYTES if self._receive_key else 0))
        self.receive_bytes(memoryview(frame))
        payload = bytes(frame[:length])
        if self._receive_key:
            expected = _code(self._receive_key, self._num_received, payload)
            self._num_received += 1
            if not hmac.compare_digest(expected, frame[length:]):
                raise PeerError(
                    "a message is not from the other daemon, or it has another key_file"
                )
        try:
            return decoder.decode(payload)
        except ProtocolError as error:
            raise PeerError(str(error)) from None

    def receive_from_consumer(self) -> ToProducer:
        return self.receive(_to_producer)

    def receive_answer(self, kind: type[M]) -> M:
        """Return the producer's answer, of this kind; raises PeerError for a refusal."""
        answer = self.receive(_to_consumer)
        if isinstance(answer, Refusal):
            raise PeerError(one_line(answer.reason))
        if not isinstance(answer, kind):
            raise PeerError(f"the producer sent {type(answer).__name__}, not {kind.__name__}")
        return answer

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._limit_time()
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise _lost(error) from None

    def receive_bytes(self, memory: memoryview) -> None:
        """Fill the memory; fails if the connection ends before."""
        while memory:
            self._limit_time()
            try:
                num_bytes = self.socket.recv_into(memory)
            except OSError as error:
                raise _lost(error) from None
            if not num_bytes:
                raise ConnectionLostError("the other daemon has closed the connection")
            memory = memory[num_bytes:]

    def _limit_time(self) -> None:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0.0:
            raise ConnectionLostError("there was no answer in time")
        self.socket.settimeout(seconds)


def one_line(text: str) -> str:
    """Return what another daemon has written, for the log."""
    return " ".join(shown(text).split())


def _code(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")


def _lost(error: OSError) -> ConnectionLostError:
    if isinstance(error, TimeoutError):
        return ConnectionLostError("there was no answer in time")
    return ConnectionLostError(error.strerror or str(error))


# The handshake


def greet_producer(channel: Channel, secret: bytes, worker_id: str) -> None:
    """Begin a connection as the consumer; raises PeerError if the other end is not that worker."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(Hello(PEER_VERSION, nonce))
    welcome = channel.receive_answer(Welcome)
    if welcome.version != PEER_VERSION:
        raise PeerError(
            f"the producer has version {welcome.version} of the protocol, not {PEER_VERSION}"
        )
    nonces = nonce + welcome.nonce
    if not hmac.compare_digest(_proof(secret, nonces, welcome.worker_id), welcome.proof):
        raise PeerError("the producer has another key_file")
    if welcome.worker_id != worker_id:
        raise PeerError("unknown engine: another one, or a restarted one, has its address")
    channel.use_keys(secret, nonces, is_producer=False)


def greet_consumer(channel: Channel, secret: bytes, worker_id: str) -> None:
    """Begin a connection as the producer."""
    hello = channel.receive_from_consumer()
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise PeerError("the consumer sent no greeting")
    if hello.version != PEER_VERSION:
        versions = f"version {PEER_VERSION} of the protocol, not {hello.version}"
        channel.send(Refusal(f"the producer has {versions}"))
        raise PeerError(f"this daemon has {versions}")
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = hello.nonce + nonce
    proof = _proof(secret, nonces, worker_id)
    channel.send(Welcome(PEER_VERSION, nonce, worker_id, proof))
    channel.use_keys(secret, nonces, is_producer=True)


def _proof(secret: bytes, nonces: bytes, worker_id: str) -> bytes:
    return hmac.digest(secret, b"producer" + nonces + worker_id.encode(), "sha256")


def open_as_consumer(channel: Channel, layout: PeerLayout) -> None:
    channel.send(Open(layout))
    channel.receive_answer(Opened)


def check_layout(message: ToProducer, layout: PeerLayout) -> None:
    """Raise PeerError for a consumer with another layout of KV, which the error names."""
    if not isinstance(message, Open):
        raise PeerError("the consumer sent no layout")
    if difference := layout.difference(message.layout):
        raise PeerError(f"the consumer has {difference}")


# Transports


def batch_blocks(block_bytes: int) -> int:
    """Return the blocks of a Fetch, of which both ends keep room for two."""
    return max(1, min(MAX_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))


class BlockTransport(Protocol):
    """How the blocks of a Fetch get from the producer's to the consumer's end of a connection.

    Each end has one for a connection. A batch has at most `batch_blocks` blocks.
    """

    def batch_memory(self, area: int) -> memoryview:
        """Return where the producer copies a batch to."""

    def send(self, num_blocks: int, area: int) -> None:
        """Answer a Fetch with the blocks that are in the batch memory."""

    def receive(self, num_blocks: int, area: int) -> Iterator[memoryview]:
        """Yield the blocks of the next answer; raises PeerError for one that is damaged."""

    def close(self) -> None:
        """Release the memory, if it has any of its own."""
        return None


class TcpTransport(BlockTransport):
    """Blocks after the message with their checksums, on the connection itself."""

    def __init__(self, channel: Channel, block_bytes: int) -> None:
        self._channel = channel
        self._size = block_bytes
        self._memory = memoryview(bytearray(batch_blocks(block_bytes) * block_bytes))

    def batch_memory(self, area: int) -> memoryview:
        return self._memory

    def send(self, num_blocks: int, area: int) -> None:
        batch = self._memory[: num_blocks * self._size]
        self._channel.send(Blocks([zlib.crc32(block) for block in _split(batch, self._size)]))
        self._channel.send_bytes(batch)

    def receive(self, num_blocks: int, area: int) -> Iterator[memoryview]:
        checksums = self._channel.receive_answer(Blocks).checksums
        if len(checksums) != num_blocks:
            raise PeerError(f"the producer sent {len(checksums)} blocks in place of {num_blocks}")
        for index, checksum in enumerate(checksums):
            block = self._memory[index * self._size : (index + 1) * self._size]
            self._channel.receive_bytes(block)
            if zlib.crc32(block) != checksum:
                raise ConnectionLostError("a block failed its checksum")
            yield block


class MemoryTransport(BlockTransport):
    """Blocks in a memory file of this connection, which has the blocks of no other request.

    Its length is sealed, so that neither end can make the other read beyond it.
    """

    def __init__(self, channel: Channel, block_bytes: int, *, is_producer: bool) -> None:
        """Make the file and send it, or receive it; raises PeerError for any other file."""
        self._channel = channel
        self._size = block_bytes
        self._area_bytes = batch_blocks(block_bytes) * block_bytes
        num_bytes = _AREAS * self._area_bytes
        file = _make_file(channel, num_bytes) if is_producer else _receive_file(channel, num_bytes)
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if is_producer else 0)
            self._map = mmap.mmap(file, num_bytes, mmap.MAP_SHARED, access)
        finally:
            os.close(file)
        self._memory = memoryview(self._map)

    def batch_memory(self, area: int) -> memoryview:
        if not 0 <= area < _AREAS:
            raise PeerError(f"there is no area {area}")
        return self._memory[area * self._area_bytes : (area + 1) * self._area_bytes]

    def send(self, num_blocks: int, area: int) -> None:
        self._channel.send(Blocks([]))

    def receive(self, num_blocks: int, area: int) -> Iterator[memoryview]:
        self._channel.receive_answer(Blocks)
        yield from _split(self.batch_memory(area)[: num_blocks * self._size], self._size)

    def close(self) -> None:
        self._memory.release()
        with contextlib.suppress(BufferError):  # a block is still read: it ends with its reader
            self._map.close()


def open_transport(
    settings: PeerSettings, channel: Channel, block_bytes: int, *, is_producer: bool
) -> BlockTransport:
    """Return this end's transport of a connection, of the kind that the settings name."""
    if settings.transport == "memory":
        return MemoryTransport(channel, block_bytes, is_producer=is_producer)
    return TcpTransport(channel, block_bytes)


def _split(batch: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(batch), size):
        yield batch[start : start + size]


def _make_file(channel: Channel, num_bytes: int) -> int:
    file = os.memfd_create("tokend-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        socket.send_fds(channel.socket, [b"f"], [file])
    except OSError as error:
        os.close(file)
        raise _lost(error) from None
    return file


def _receive_file(channel: Channel, num_bytes: int) -> int:
    try:
        _, files, _, _ = socket.recv_fds(channel.socket, 1, 1)
    except OSError as error:
        raise _lost(error) from None
    if not files:
        raise PeerError("the producer sent no shared memory")
    (file,) = files
    try:
        found = os.fstat(file).st_size
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        if found != num_bytes or seals & _SEALS != _SEALS:
            raise PeerError(f"the shared memory has {found} bytes, not {num_bytes} sealed ones")
    except (OSError, PeerError) as error:
        os.close(file)
        raise PeerError(str(error)) from None
    return file


def check_user(connection: socket.socket) -> None:
    """Raise PeerError if the other end of a Unix socket is another user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(found)
    if uid != os.geteuid():
        raise PeerError(f"the other end is of user {uid}")
