"""Publishes KV events, such as stored and removed blocks, for routers of several daemons.

The events of the KV pool are collected by `KVEventLog`, an observer of the block pool; those of
other media come from the KV connector. The messages are in `proto/messages/kv_events.py`.

    busy loop  ──publish──▶ PUB socket ──▶ subscribers
         │
         └─▶ the last batches ──▶ thread of the ROUTER socket ──▶ subscribers that missed some
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import zmq

from engine_core.kv_cache.events import KVEventLog
from proto.codec import encode
from proto.errors import ConfigError
from proto.messages.kv_events import (
    LAST_SEQUENCE,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
)
from proto.messages.lifecycle import KVCacheGeometry
from proto.runtime.sockets import MAX_IPC_PATH, kv_events_path
from proto.settings.kv_events_config import KVEventsConfig

MAX_KEPT_BYTES: Final = 64 << 20
"""Bytes of batches that are kept for replays, besides their number."""
LAST_EVENTS_MILLISECONDS: Final = 200
"""Time that a stopping engine waits for subscribers to receive the last events."""
MAX_REQUEST_BYTES: Final = 1024
"""Largest message accepted from a subscriber."""
_POLL_MILLISECONDS: Final = 100
_EPOCH_SHIFT: Final = 40


class KVEventPublisher:
    """Publishes the events of one epoch in numbered batches; never blocks.

    The sequence counts on from one incarnation of an engine to the next, because the epoch is its
    upper part, so a subscriber sees the restart of an engine as a gap. The first batch of the first
    one, number 0, says that nothing is cached.

    config: with endpoints as they are bound, in ZMQ's form. engine: its index.
    observer: of the block pool.
    Raises ConfigError for an endpoint that cannot be bound.
    """

    def __init__(
        self, config: KVEventsConfig, epoch: int, geometry: KVCacheGeometry, engine: int = 0
    ) -> None:
        self.observer = KVEventLog(geometry)
        self._engine = engine
        self._sequence = (epoch - 1 - engine) << _EPOCH_SHIFT  # the first epoch is 1 + engine
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = 0
        self._max_kept = config.buffer_steps
        self._lock = threading.Lock()  # of what is kept
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stops = False
        self._replays: threading.Thread | None = None
        try:
            self._socket = self._bind(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            self.config = msgspec.structs.replace(config, endpoint=_bound(self._socket))
            if config.replay_endpoint is not None:
                # A replay and its end fit: ZMQ counts what the other side has not confirmed yet.
                replay = self._bind(
                    zmq.ROUTER,
                    "replay_endpoint",
                    config.replay_endpoint,
                    2 * (config.buffer_steps + 1),
                )
                self.config = msgspec.structs.replace(self.config, replay_endpoint=_bound(replay))
                self._replays = threading.Thread(
                    target=self._serve_replays, args=(replay,), name="kv-replay", daemon=True
                )
        except ConfigError:
            self._context.destroy()
            raise
        self._send([AllBlocksCleared()])
        if self._replays is not None:
            self._replays.start()

    def publish(self, external_events: Iterable[KVEvent] = ()) -> None:
        """Send the events since the last call as one batch, if there are any.

        external_events: of other media than the KV pool.
        """
        events = [*self.observer.pop_events(), *external_events]
        if events:
            self._send(events)

    def close(self) -> None:
        """Send the last events and close the sockets, within LAST_EVENTS_MILLISECONDS."""
        self.publish()
        self._stops = True
        if self._replays is not None:
            self._replays.join()
        self._socket.close(linger=LAST_EVENTS_MILLISECONDS)
        self._context.term()  # waits for the last events; the process ends with os._exit

    def _bind(self, kind: int, key: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {key} {endpoint}: {error}") from None
        return socket

    def _send(self, events: list[KVEvent]) -> None:
        batch = encode(KVEventBatch(time.time(), events, self._engine))
        sequence = self._sequence
        self._sequence += 1
        if self._replays is not None:
            with self._lock:
                self._kept.append((sequence, batch))
                self._num_kept_bytes += len(batch)
                while len(self._kept) > self._max_kept or self._num_kept_bytes > MAX_KEPT_BYTES:
                    self._num_kept_bytes -= len(self._kept.popleft()[1])
        self._socket.send_multipart(self._message(sequence, batch), zmq.NOBLOCK)

    def _message(self, sequence: int, batch: bytes) -> list[bytes]:
        return [self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), batch]

    def _serve_replays(self, socket: zmq.Socket[bytes]) -> None:
        """Answer replay requests until the publisher closes; other messages are ignored."""
        while not self._stops:
            if not socket.poll(_POLL_MILLISECONDS):
                continue
            with contextlib.suppress(zmq.ZMQError):  # of a subscriber that has gone
                self._replay(socket, socket.recv_multipart(zmq.NOBLOCK))
        socket.close()

    def _replay(self, socket: zmq.Socket[bytes], request: Sequence[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != SEQUENCE_BYTES:
            return
        identity, first = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            kept = [each for each in self._kept if each[0] >= first]
        # Not copied: a subscriber that does not read its answer costs no memory for batches.
        for sequence, batch in kept:
            message = [identity, b"", *self._message(sequence, batch)]
            socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        socket.send_multipart([identity, b"", b"", LAST_SEQUENCE, b""], zmq.NOBLOCK)


def start_kv_events(
    config: KVEventsConfig | None,
    run_dir: str,
    epoch: int,
    geometry: KVCacheGeometry,
    engine: int = 0,
) -> KVEventPublisher | None:
    """Create the publisher of --kv-events-config for the engine of this index; None without one.

    The endpoint `ipc` stands for a socket in the run directory. Raises ConfigError for an endpoint
    that cannot be bound.
    """
    if config is None:
        return None
    config = config.of_engine(engine)
    for key, given in config.endpoints:
        endpoint = given
        if endpoint == "ipc":
            endpoint = f"ipc://{kv_events_path(run_dir, epoch, key)}"
        path = endpoint.removeprefix("ipc://")
        if path != endpoint and len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ConfigError(
                f"--kv-events-config: the path of {key} is longer than {MAX_IPC_PATH} bytes: {path}"
            )
        config = msgspec.structs.replace(config, **{key: endpoint})
    return KVEventPublisher(config, epoch, geometry, engine)


def _bound(socket: zmq.Socket[bytes]) -> str:
    endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint
