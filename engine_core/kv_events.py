"""Publishing what happens in the prefix cache.

Owns the PUB socket and the numbering of batches. What the events say is decided by
the log, which watches the block pool; without an endpoint there is neither.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import zmq

from engine_core.kv_cache.events import KVEventLog, PoolObserver
from proto.codec import encode
from proto.errors import ConfigError
from proto.kv_events import KVEvent, KVEventBatch
from proto.sockets import MAX_IPC_PATH, kv_events_path

MAX_QUEUED_BATCHES: Final = 10_000
"""For a subscriber that reads slowly; what is more is lost to it."""


LAST_EVENTS_MILLISECONDS: Final = 200
"""How long the end of the engine may wait until subscribers have the last events."""
MAX_SUBSCRIPTION_BYTES: Final = 1024
"""All that a subscriber has to say."""


class KVEventSink(Protocol):
    """observers: to be told by the block pool. endpoint: where to subscribe, or ""."""

    @property
    def observers(self) -> Sequence[PoolObserver]:
        """Of the block pool."""

    @property
    def endpoint(self) -> str:
        """In ZMQ's form, with the port that was taken."""

    def publish(self, elsewhere: Iterable[KVEvent] = ()) -> None:
        """Send what has happened since the last call; nothing if nothing has.

        elsewhere: what has happened on other media.
        """

    def close(self) -> None:
        """Send what is left and close the socket, within LAST_EVENTS_MILLISECONDS."""


class NoKVEvents:
    """Nobody asked for events: no socket, no observer."""

    observers: Sequence[PoolObserver] = ()
    endpoint = ""

    def publish(self, elsewhere: Iterable[KVEvent] = ()) -> None:
        """Take what there is, so that nobody keeps it for a later call."""
        deque(elsewhere, maxlen=0)

    def close(self) -> None: ...


NO_KV_EVENTS: Final = NoKVEvents()


class KVEventPublisher:
    """One epoch's events on a PUB socket; never blocks."""

    def __init__(
        self, endpoint: str, epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError for an endpoint that cannot be bound."""
        self._log = KVEventLog()
        self.observers: Sequence[PoolObserver] = (self._log,)
        self._epoch = epoch
        self._clock = clock
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

    def publish(self, elsewhere: Iterable[KVEvent] = ()) -> None:
        events = [*self._log.pop_events(), *elsewhere]
        if events:
            batch = KVEventBatch(self._epoch, self._sequence, self._clock(), events)
            self._socket.send(encode(batch), zmq.NOBLOCK)
            self._sequence += 1

    def close(self) -> None:
        """Send what is left and close the socket, within LAST_EVENTS_MILLISECONDS."""
        self.publish()
        self._socket.close(linger=LAST_EVENTS_MILLISECONDS)
        self._context.term()  # closing only starts the sending; the process ends with os._exit


def make_kv_events(endpoint: str | None, run_dir: str, epoch: int) -> KVEventSink:
    """The sink for --kv-events-endpoint; `ipc` is a socket in the run directory.

    Raises ConfigError for an endpoint that cannot be bound.
    """
    if endpoint is None:
        return NO_KV_EVENTS
    if endpoint == "ipc":
        endpoint = f"ipc://{kv_events_path(run_dir, epoch)}"
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ConfigError(
            f"--kv-events-endpoint: the path is longer than {MAX_IPC_PATH} bytes: {path}",
            "kv_events_endpoint",
        )
    return KVEventPublisher(endpoint, epoch)
