"""The producer's end: blocks of finished requests under leases, and the consumers that fetch them.

    lease    PeerHold ─▶ lease_seconds ──▶ end: seq_id in finished_sending, blocks are freed
                             └ Heartbeat, Fetch: at least 20 s more, never less than before

A batch of blocks is copied under the lock of the leases, so none is read after its lease has ended,
and a consumer that is slow, or never ends, keeps no block.
"""

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proto.messages.kv_peer import (
    MAX_WATCHED,
    Alive,
    Fetch,
    Heartbeat,
    Opened,
    PeerHold,
    PeerLayout,
    PeerWorkerAddress,
    Refusal,
    Release,
    ToProducer,
)
from proto.runtime.sockets import EventFd
from proto.settings.kv_peer import PeerSettings
from proto.settings.kv_transfer_config import config_key_error
from worker.kv_connector.offload.block_image import BlockBytes
from worker.kv_connector.peer.channel import (
    BlockTransport,
    Channel,
    PeerError,
    batch_blocks,
    check_layout,
    check_user,
    greet_consumer,
    one_line,
    open_transport,
)

logger = logging.getLogger("tokend.kv_peer")

EXTENSION_SECONDS: Final = 20.0
"""A lease lasts at least this long after a heartbeat."""
MAX_LEASE_SECONDS: Final = 900.0
"""After this long a lease ends in spite of heartbeats."""
MAX_PORTS: Final = 64
_MAX_CONNECTIONS: Final = 64
_REGISTER_SECONDS: Final = 2.0
"""How long a request may be unknown: its answer may be here before the step with its lease."""
_RELEASE_SECONDS: Final = 1.0
"""The same for a Release, whose consumer waits 2 s in all."""
_MAX_REMEMBERED: Final = 1024
"""Requests whose leases have ended, which are answered at once."""
_GREETING_SECONDS: Final = 2.0
"""For a greeting and its Open: until then a connection without the key counts like all others."""
_FRAME_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Lease:
    """Blocks of a request. end, last: monotonic seconds; `last` is the latest possible end."""

    seq_id: int
    tenant: int
    blocks: dict[bytes, int]
    end: float
    last: float
    wait_for_steps: Callable[[], None]


class Leases:
    """The blocks that consumers may fetch, by request. notify: called when a lease has ended."""

    def __init__(self, blocks: BlockBytes, seconds: float, notify: Callable[[], None]) -> None:
        self._copier = blocks
        self._seconds = seconds
        self._notify = notify
        self._changed = threading.Condition()
        self._leases: dict[str, _Lease] = {}
        self._ended: list[int] = []
        self._remembered: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self._is_closed = False

    def add(self, hold: PeerHold) -> None:
        """Begin a lease; called in the worker loop's thread."""
        now = time.monotonic()
        lease = _Lease(
            hold.seq_id,
            hold.tenant,
            dict(zip(hold.keys, hold.block_ids, strict=True)),
            now + self._seconds,
            now + max(self._seconds, MAX_LEASE_SECONDS),
            self._copier.record_steps(),
        )
        with self._changed:
            self._leases[hold.request_id] = lease
            self._changed.notify_all()

    def extend(self, request_ids: Sequence[str]) -> list[str]:
        """Extend leases; return the requests that have one."""
        with self._changed:
            known = [request_id for request_id in request_ids if request_id in self._leases]
            for request_id in known:
                self._extend(self._leases[request_id])
        return known

    def copy_out(self, fetch: Fetch, memory: memoryview) -> None:
        """Copy the blocks of a Fetch one after the other; raises PeerError for any other blocks."""
        size = self._copier.block_bytes
        if not 0 < len(fetch.keys) <= batch_blocks(size):
            raise PeerError(f"the consumer asked for {len(fetch.keys)} blocks at a time")
        self._await(fetch.request_id, _REGISTER_SECONDS)
        with self._changed:
            lease = self._leases.get(fetch.request_id)
            if lease is None or self._is_closed:
                raise PeerError("unknown request: its lease has ended, or it never had one")
            if lease.tenant != fetch.tenant:
                raise PeerError("the KV belongs to another tenant")
            blocks = [lease.blocks.get(key) for key in fetch.keys]
            if None in blocks:
                raise PeerError(
                    "unknown block: the consumer has other tokens, salt, adapter or images"
                )
            self._extend(lease)
            lease.wait_for_steps()
            for index, block in enumerate(blocks):
                assert block is not None
                self._copier.copy_out(block, memory[index * size : (index + 1) * size])

    def release(self, request_id: str) -> None:
        """End the lease of a request, if it has one."""
        self._await(request_id, _RELEASE_SECONDS)
        with self._changed:
            self._end([request_id] if request_id in self._leases else [])

    def drop(self, seq_ids: Sequence[int]) -> None:
        with self._changed:
            wanted = set(seq_ids)
            self._end([name for name, each in self._leases.items() if each.seq_id in wanted])

    def end_overdue(self) -> float:
        """End leases that have not been extended.

        Return the seconds until the next one ends; infinite without any.
        """
        now = time.monotonic()
        with self._changed:
            overdue = [name for name, lease in self._leases.items() if lease.end <= now]
            self._end(overdue)
            left = min((lease.end - now for lease in self._leases.values()), default=math.inf)
        if overdue:
            logger.warning("KV of %d requests was not fetched in time, and is freed", len(overdue))
        return max(0.0, left)

    def pop_ended(self) -> list[int]:
        """Return the seq_ids whose leases have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Refuse all copies from now on; none is being made when this returns."""
        with self._changed:
            self._is_closed = True
            self._leases.clear()
            self._changed.notify_all()

    def _await(self, request_id: str, seconds: float) -> None:
        """Wait until a request has a lease, unless it had one."""
        with self._changed:
            if request_id not in self._remembered:
                self._changed.wait_for(
                    lambda: request_id in self._leases or self._is_closed, seconds
                )

    def _extend(self, lease: _Lease) -> None:
        lease.end = max(lease.end, min(time.monotonic() + EXTENSION_SECONDS, lease.last))

    def _end(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._ended.append(self._leases.pop(request_id).seq_id)
            self._remembered.append(request_id)
        if request_ids:
            self._notify()


class PeerServer:
    """Listens for consumers, with a thread for each of them, and ends leases.

    heartbeat: called when one has arrived.
    """

    def __init__(
        self,
        settings: PeerSettings,
        secret: bytes,
        worker_id: str,
        layout: PeerLayout,
        leases: Leases,
        heartbeat: Callable[[], None],
    ) -> None:
        """Raises ConfigError if the address cannot be listened on."""
        self._settings = settings
        self._secret = secret
        self._layout = layout
        self._leases = leases
        self._heartbeat = heartbeat
        self._path: Path | None = None
        if settings.transport == "memory":
            self._path = socket_path(settings, worker_id)
            self._listener, port = _listen_locally(self._path), 0
        else:
            self._listener = _listen(settings)
            port = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self.address = PeerWorkerAddress(worker_id, port)
        self._wake = EventFd()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept_all, name="kv peer", daemon=True)
        self._thread.start()

    def begin_lease(self, hold: PeerHold) -> None:
        """Let consumers fetch the blocks of a request; in the worker loop's thread."""
        self._leases.add(hold)
        self._wake.notify()

    def close(self) -> None:
        """End all connections; no block is read any more when this returns."""
        self._leases.close()
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._wake.notify()
        self._thread.join(_CLOSE_SECONDS)
        self._wake.close()
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept_all(self) -> None:
        poll = select.poll()
        for each in (self._listener.fileno(), self._wake.descriptor):
            poll.register(each, select.POLLIN)
        while not self._is_closed:
            left = self._leases.end_overdue()
            ready = {each for each, _ in poll.poll(None if left == math.inf else 1 + left * 1000)}
            self._wake.clear()
            if self._listener.fileno() not in ready:
                continue
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the connection has ended already, or too many files are open
                time.sleep(0.01)
                continue
            connection.setblocking(True)
            with self._lock:
                if self._is_closed or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            thread = threading.Thread(
                target=self._serve, args=[connection], name="kv peer", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # too many threads: leases have to end all the same
                logger.warning("a consumer is not served: %s", error)
                self._forget(connection)

    def _serve(self, connection: socket.socket) -> None:
        """Answer one consumer until the connection ends."""
        channel = Channel(connection, time.monotonic() + _GREETING_SECONDS)
        try:
            if self._path is not None:
                check_user(connection)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet_consumer(channel, self._secret, self.address.worker_id)
            self._answer_all(channel)
        except PeerError as error:
            logger.debug("a consumer's connection has ended: %s", error)
        except Exception:
            logger.exception("a consumer's connection has failed")
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _answer_all(self, channel: Channel) -> None:
        transport: BlockTransport | None = None
        try:
            check_layout(channel.receive_from_consumer(), self._layout)
            channel.send(Opened())
            while True:
                channel.deadline = time.monotonic() + _IDLE_SECONDS
                message = channel.receive_from_consumer()
                channel.deadline = time.monotonic() + _FRAME_SECONDS
                if isinstance(message, Fetch):
                    if transport is None:
                        transport = open_transport(
                            self._settings, channel, self._layout.block_bytes, is_producer=True
                        )
                    self._leases.copy_out(message, transport.batch_memory(message.area))
                    transport.send(len(message.keys), message.area)
                else:
                    self._answer(channel, message)
        except PeerError as error:
            with contextlib.suppress(PeerError):
                channel.send(Refusal(str(error)))
            raise
        finally:
            if transport is not None:
                transport.close()

    def _answer(self, channel: Channel, message: ToProducer) -> None:
        if isinstance(message, Heartbeat) and len(message.request_ids) <= MAX_WATCHED:
            known = self._leases.extend(message.request_ids)
            if known:
                self._heartbeat()
        elif isinstance(message, Release):
            if message.failure:
                logger.warning("KV was not handed over: %s", one_line(message.failure))
            self._leases.release(message.request_id)
            known = []
        else:
            raise PeerError(f"the consumer sent an unexpected {type(message).__name__}")
        channel.send(Alive(known))


def socket_path(settings: PeerSettings, worker_id: str) -> Path:
    """Return the Unix socket of a producer's worker."""
    assert settings.socket_folder is not None, "peer_settings() checks it"
    return Path(settings.socket_folder) / f"{worker_id}.kv"


def _listen_locally(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_dead_sockets(path.parent)
        unready = path.with_suffix(".new")  # other workers remove a *.kv that does not listen
        listener.bind(str(unready))
        os.chmod(unready, 0o600)
        listener.listen()
        unready.rename(path)
    except OSError as error:
        listener.close()
        raise config_key_error("socket_folder", f"{path}: {error.strerror or error}") from None
    return listener


def _remove_dead_sockets(folder: Path) -> None:
    """Remove the sockets of killed workers, on which no process listens."""
    for path in folder.glob("*.kv"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.settimeout(0.0)  # a busy listener is no dead one
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def _listen(settings: PeerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    last = min(settings.port + MAX_PORTS, 1 << 16) - 1 if settings.port else 0
    for port in range(settings.port, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, port))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror
    raise config_key_error("host", f"{settings.host}, ports {settings.port} to {last}: {reason}")
