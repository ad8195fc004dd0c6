"""Publishes KV events, such as stored and removed blocks, on a ZMQ PUB socket.

The events of the KV pool are collected by `KVEventLog`, an observer of the block pool; those of
other media come from the KV connector. The messages are in `proto/kv_events.py`.
"""

import os
import time
from collections.abc import Iterable
from typing import Final

import zmq

from engine_core.kv_cache.events import KVEventLog
from proto.codec import encode
from proto.errors import ConfigError
from proto.kv_events import KVEvent, KVEventBatch
from proto.sockets import MAX_IPC_PATH, kv_events_path

MAX_QUEUED_BATCHES: Final = 10_000
"""Batches that wait for a slow subscriber; it loses further ones."""
LAST_EVENTS_MILLISECONDS: Final = 200
"""Time that a stopping engine waits for subscribers to receive the last events."""
MAX_SUBSCRIPTION_BYTES: Final = 1024
"""Largest message accepted from a subscriber."""


class KVEventPublisher:
    """Publishes the events of one epoch in numbered batches; never blocks.

    observer: of the block pool. endpoint: as bound, in ZMQ's form.
    Raises ConfigError for an endpoint that cannot be bound.
    """

    def __init__(self, endpoint: str, epoch: int) -> None:
        self.observer = KVEventLog()
        self._epoch = epoch
        self._sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_BATCHES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"--kv-events-endpoint {endpoint}: {error}", "kv_events_endpoint"
            ) from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, external_events: Iterable[KVEvent] = ()) -> None:
        """Send the events since the last call as one batch, if there are any.

        external_events: of other media than the KV pool.
        """
        events = [*self.observer.pop_events(), *external_events]
        if events:
            batch = KVEventBatch(self._epoch, self._sequence, time.monotonic(), events)
            self._socket.send(encode(batch), zmq.NOBLOCK)
            self._sequence += 1

    def close(self) -> None:
        """Send the last events and close the socket, within LAST_EVENTS_MILLISECONDS."""
        self.publish()
        self._socket.close(linger=LAST_EVENTS_MILLISECONDS)
        self._context.term()  # waits for the last events; the process ends with os._exit


def start_kv_events(endpoint: str | None, run_dir: str, epoch: int) -> KVEventPublisher | None:
    """Create the publisher of --kv-events-endpoint; None without the flag.

    The endpoint `ipc` stands for a socket in the run directory. Raises ConfigError for an endpoint
    that cannot be bound.
    """
    if endpoint is None:
        return None
    if endpoint == "ipc":
        endpoint = f"ipc://{kv_events_path(run_dir, epoch)}"
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ConfigError(
            f"--kv-events-endpoint: the path is longer than {MAX_IPC_PATH} bytes: {path}",
            "kv_events_endpoint",
        )
    return KVEventPublisher(endpoint, epoch)
