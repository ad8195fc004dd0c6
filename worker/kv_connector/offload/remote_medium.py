"""One value in a Redis server for each offloaded block and rank, for the threads that copy.

Each thread has a connection of its own, made when there is something to copy. While the server
does not answer it is left alone for longer and longer, and every copy fails at once.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from proto.circuit_breaker import CircuitBreaker
from proto.kv_events import DEVICE_MEDIUM
from proto.kv_media import REMOTE, media_folder, remote_name
from proto.kv_transfer_config import RemoteAddress, RemoteSettings, remote_address, remote_settings
from proto.redis_client import (
    MISSING,
    RedisConnection,
    RemoteRefusalError,
    RemoteStoreError,
)
from worker.kv_connector.offload.base import HandlerContext, OffloadingHandler
from worker.kv_connector.offload.block_image import BlockLabel
from worker.kv_connector.offload.transfer_queue import (
    STORE_NICENESS,
    MediumError,
    SecondsLeft,
    TransferQueue,
)

_AHEAD: Final = 16
"""Blocks asked for before the first one is here."""
_MAX_CONNECT_SECONDS: Final = 0.5

_T = TypeVar("_T")

Handlers = dict[tuple[str, str], OffloadingHandler]


class RemoteMedium:
    """folder: of this model's blocks. seconds: for one block to come or go, at most."""

    name = REMOTE

    def __init__(
        self, address: RemoteAddress, folder: str, seconds: float, breaker: CircuitBreaker
    ) -> None:
        self._address = address
        self._folder = folder
        self._seconds = seconds
        self._breaker = breaker
        self._connection: RedisConnection | None = None
        self._unread = 0
        self._unwanted: list[bytes] = []

    def fetch(
        self, labels: Sequence[BlockLabel], image: memoryview, seconds_left: SecondsLeft
    ) -> Iterator[bool]:
        for start in range(0, len(labels), _AHEAD):
            names = [self._name(each) for each in labels[start : start + _AHEAD]]
            connection = self._connected(seconds_left)
            self._unread = len(names)
            try:
                self._tried(lambda: connection.send([(b"GET", each) for each in names]))  # noqa: B023
                for name in names:
                    connection.set_deadline(min(self._seconds, seconds_left()))
                    length = self._tried(lambda: connection.reply_into(image))  # noqa: B023
                    self._unread -= 1
                    self._breaker.record_success()
                    if length not in (MISSING, len(image)):
                        self._unwanted.append(name)
                    yield length == len(image)
            finally:
                if self._unread:
                    self._drop()  # what it still sends belongs to nobody

    def keep(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> None:
        connection = self._connected(seconds_left)
        connection.set_deadline(min(self._seconds, seconds_left()))
        self._tried(lambda: connection.send([(b"SET", self._name(label), image)]))
        self._tried(connection.reply)
        self._breaker.record_success()

    def discard(self, label: BlockLabel) -> None:
        """Removed for everybody, once no answers are on the way."""
        self._unwanted.append(self._name(label))
        if not self._unread and self._connection is not None:
            with contextlib.suppress(MediumError):
                self._remove_unwanted(self._connection)

    def close(self) -> None:
        self._drop()

    def _name(self, label: BlockLabel) -> bytes:
        return remote_name(self._folder, label.key, label.rank)

    def _connected(self, seconds_left: SecondsLeft) -> RedisConnection:
        if self._connection is None:
            if self._breaker.is_open:
                raise MediumError("it is left alone for a while")
            seconds = min(self._seconds, _MAX_CONNECT_SECONDS, seconds_left())
            self._connection = self._tried(lambda: RedisConnection(self._address, seconds))
        self._connection.set_deadline(min(self._seconds, seconds_left()))
        self._remove_unwanted(self._connection)
        return self._connection

    def _remove_unwanted(self, connection: RedisConnection) -> None:
        if self._unwanted:
            names, self._unwanted = self._unwanted, []
            self._tried(lambda: connection.call(self._seconds, b"UNLINK", *names))

    def _tried(self, ask: Callable[[], _T]) -> _T:
        """What it returns; MediumError, and the connection is gone, where nothing comes."""
        try:
            return ask()
        except (RemoteRefusalError, RemoteStoreError) as error:
            self._breaker.record_failure()
            self._drop()
            raise MediumError(str(error)) from None

    def _drop(self) -> None:
        self._unread = 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def make_handlers(extra: Mapping[str, Any], context: HandlerContext) -> Handlers:
    """For the settings in `kv_connector_extra_config`; raises ConfigError naming the key."""
    settings: RemoteSettings = remote_settings(extra)
    folder = media_folder(context.fingerprint, context.num_ranks, context.factor)
    address = remote_address(settings)

    def medium() -> RemoteMedium:
        breaker = CircuitBreaker(settings.remote_retry_seconds)
        return RemoteMedium(address, folder, settings.remote_timeout, breaker)

    return {
        (REMOTE, DEVICE_MEDIUM): TransferQueue(medium(), context, settings.load_timeout),
        (DEVICE_MEDIUM, REMOTE): TransferQueue(
            medium(), context, settings.store_timeout, STORE_NICENESS
        ),
    }
