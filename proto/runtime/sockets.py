"""Links between processes: ZMQ sockets that carry one union of messages each way.

A `Link` connects exactly two processes. Its path contains the epoch (see lifecycle.py) or the
incarnation, so a restarted process gets a new path and never receives messages for its
predecessor; only the links between front ends outlive a restart. Sending never blocks: messages
that ZMQ does not accept wait in a buffer of limited size, and a peer whose buffer overflows is
reported as stalled.

    worker 0  ── e1.w0 ──  engine  ── e1.a0.0 ──  front end 0  ── p0.1 ──  front end 1
    supervisor  ── s.worker0.0, s.engine_core0.0, s.api_server0.0 ── each process
    supervisor  ── s.standby-worker0.0 ── a standby process, also after it has replaced another
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import Any, Final

import msgspec
import zmq

from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError, TokendError, shown

logger = logging.getLogger("tokend.sockets")

MAX_MESSAGE_BYTES: Final = 256 << 20
MAX_PENDING_BYTES: Final = 64 << 20
MAX_QUEUED_MESSAGES: Final = 1_000
RECONNECT_MILLISECONDS: Final = 20
"""Between two attempts while the path is not bound; adds to the time of every restart."""
SocketError: Final = zmq.ZMQError
"""Raised where the system refuses a socket, for parts that do not import ZMQ themselves."""
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
"""As plain integers: operations on ZMQ's enumerations are slower than the system call."""
MAX_IPC_PATH: Final = 107
"""Bytes of a Unix socket path, without the terminating zero."""


class PeerStalledError(TokendError):
    """The peer reads too slowly: its send buffer is full."""


def worker_path(run_dir: str, worker_epoch: int, rank: int) -> str:
    """Return the socket path between the engine and the worker of a rank."""
    return os.path.join(run_dir, f"e{worker_epoch}.w{rank}")


def front_end_path(run_dir: str, epoch: int, index: int, incarnation: int = 0) -> str:
    """Return the socket path between the engine of an epoch and an incarnation of a front end."""
    return os.path.join(run_dir, f"e{epoch}.a{index}.{incarnation}")


def peer_path(run_dir: str, index: int, peer: int) -> str:
    """Return the socket path between two front ends, also of later incarnations.

    A message for the predecessor of a process that was restarted is harmless there.
    """
    return os.path.join(run_dir, f"p{min(index, peer)}.{max(index, peer)}")


def kv_events_path(run_dir: str, epoch: int, key: str) -> str:
    """Return the default path of an endpoint of KV events. key: endpoint or replay_endpoint."""
    return os.path.join(run_dir, f"e{epoch}.{'kv' if key == 'endpoint' else 'kvr'}")


def supervisor_path(
    run_dir: str, role: str, index: int, incarnation: int, *, has_place: bool = True
) -> str:
    """Return the socket path between the supervisor and an incarnation of a process.

    has_place: whether it has had a place since its start; else it was a standby process.
    """
    kind = role if has_place else f"standby-{role}"
    return os.path.join(run_dir, f"s.{kind}{index}.{incarnation}")


class Link:
    """One end of a connection between two processes.

    `receives` is the union of message types that may arrive; `num_undecodable` counts messages
    that were none of them.
    """

    def __init__(
        self, path: str, receives: Any, *, bind: bool, context: "zmq.Context[Any] | None" = None
    ) -> None:
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise TokendError(f"socket path is longer than {MAX_IPC_PATH} bytes: {path}")
        self.path = path
        self._owns_path = bind
        self.num_undecodable = 0
        self._decoder: MessageDecoder[Any] = MessageDecoder(receives)
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        if bind:
            self._socket.bind(f"ipc://{path}")
        else:
            self._socket.connect(f"ipc://{path}")

    @classmethod
    def bind(cls, path: str, receives: Any, context: "zmq.Context[Any] | None" = None) -> "Link":
        """Create the end that binds and owns the path. context: as for `connect`."""
        return cls(path, receives, bind=True, context=context)

    @classmethod
    def connect(cls, path: str, receives: Any, context: "zmq.Context[Any] | None" = None) -> "Link":
        """Create the other end; the path need not exist yet.

        context: a ZMQ context that the caller terminates; by default the process-wide one.
        """
        return cls(path, receives, bind=False, context=context)

    def fileno(self) -> int:
        """Return ZMQ's descriptor, for an event loop.

        It is edge-triggered: after it becomes readable, and after every send, call
        `receive()` until it returns nothing.
        """
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; raises PeerStalledError if the peer's buffer overflows.

        The message is queued in that case, too; check `is_stalled` before sending more.
        """
        frame = encode(message)
        if self._pending or not self._try_send(frame):
            self._pending.append(frame)
            self._pending_bytes += len(frame)
            self.flush()
            if self.is_stalled:
                raise PeerStalledError(f"{self.path}: {self._pending_bytes} bytes wait unread")

    def flush(self) -> bool:
        """Send buffered messages; return whether the buffer is empty."""
        while self._pending:
            if not self._try_send(self._pending[0]):
                return False
            self._pending_bytes -= len(self._pending.popleft())
        return True

    def receive(self, most: int | None = None) -> list[Any]:
        """Return all messages that have arrived; undecodable ones are counted and dropped.

        ZMQ closes the connection of a peer that sends a frame above MAX_MESSAGE_BYTES.
        most: how many to return at most; the others stay for later calls.
        """
        messages: list[Any] = []
        # Check first: the exception for "no message" is slower than receiving one.
        while len(messages) != most and int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except ProtocolError as error:
                self._count_undecodable(error)
        return messages

    def _count_undecodable(self, error: ProtocolError) -> None:
        """Log the 1st, 2nd, 4th, 8th … one, as ASCII without control characters."""
        self.num_undecodable += 1
        if self.num_undecodable & (self.num_undecodable - 1) == 0:
            count, what = self.num_undecodable, ascii(shown(error))
            logger.warning("%s: undecodable message %d was dropped: %s", self.path, count, what)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close the socket, after at most `linger_seconds` for sending the last messages.

        The end that bound the path removes its file, which ZMQ does not do.
        """
        self._socket.close(linger=int(linger_seconds * 1000))
        if self._owns_path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    @property
    def is_stalled(self) -> bool:
        """Whether the buffer of messages for the peer exceeds its limit."""
        return self._pending_bytes > MAX_PENDING_BYTES

    @property
    def zmq_socket(self) -> "zmq.Socket[bytes]":
        """For Poller only."""
        return self._socket

    def _try_send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Poller:
    """Waits for links and plain descriptors to become readable."""

    def __init__(self, links: Iterable[Link] = (), descriptors: Iterable[int] = ()) -> None:
        self._poller = zmq.Poller()
        self._links: dict[zmq.Socket[bytes], Link] = {}
        for link in links:
            self.add(link)
        for descriptor in descriptors:
            self.add(descriptor)

    def add(self, source: Link | int) -> None:
        if isinstance(source, Link):
            self._links[source.zmq_socket] = source
            self._poller.register(source.zmq_socket, zmq.POLLIN)
        else:
            self._poller.register(source, zmq.POLLIN)

    def remove(self, source: Link | int) -> None:
        if isinstance(source, Link):
            del self._links[source.zmq_socket]
            self._poller.unregister(source.zmq_socket)
        else:
            self._poller.unregister(source)

    def wait(self, timeout_seconds: float | None = None) -> list[Link | int]:
        """Return the readable links and descriptors; empty after `timeout_seconds`.

        Sends buffered messages of the registered links meanwhile.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poll(left)
            readable = [
                self._links.get(source, source) for source, mask in events if mask & ~zmq.POLLOUT
            ]
            if readable or not events:
                return readable

    def _poll(self, timeout_seconds: float | None) -> list[tuple[Any, int]]:
        """Poll once, also for writability of links with buffered messages."""
        blocked = [link for link in self._links.values() if not link.flush()]
        for link in blocked:
            self._poller.modify(link.zmq_socket, zmq.POLLIN | zmq.POLLOUT)
        try:
            timeout = None if timeout_seconds is None else round(timeout_seconds * 1000)
            return self._poller.poll(timeout)
        finally:
            for link in blocked:
                self._poller.modify(link.zmq_socket, zmq.POLLIN)


# ---- Wake-ups between threads ----

NO_DESCRIPTOR: Final = -1
"""Instead of a descriptor, for a component that never signals."""


class EventFd:
    """An eventfd, with which a thread interrupts the poll of another thread's loop.

    Its descriptor is readable between a call of `notify` and the next of `clear`.

    After `close`, `notify` does nothing: the number of the descriptor may belong to another file.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._closed = False

    def notify(self) -> None:
        """Make the descriptor readable; may be called from any thread, at any time."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable; call it before reading what was signalled."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.descriptor)
