"""The Redis medium in a worker: one value for each offloaded block and rank.

Each copying thread has its own connection, opened for the first copy. After a failure the server is
not used for a growing pause, in which every copy fails at once.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from proto.messages.kv_events import DEVICE_MEDIUM
from proto.runtime.circuit_breaker import CircuitBreaker
from proto.runtime.redis_client import (
    MISSING,
    RedisConnection,
    RemoteRefusalError,
    RemoteStoreError,
)
from proto.settings.kv_media import REMOTE, remote_name
from proto.settings.kv_transfer_config import (
    RemoteAddress,
    RemoteSettings,
    remote_address,
    remote_settings,
)
from worker.kv_connector.offload.base import STORE_NICENESS, HandlerContext, OffloadingHandler
from worker.kv_connector.offload.block_image import BlockLabel
from worker.kv_connector.offload.transfer_queue import MediumError, SecondsLeft, TransferQueue

_PIPELINE_BLOCKS: Final = 16
"""Blocks requested in one pipeline."""
_MAX_CONNECT_SECONDS: Final = 0.5

_T = TypeVar("_T")
_P = ParamSpec("_P")

Handlers = dict[tuple[str, str], OffloadingHandler]


class RemoteMedium:
    """Medium that reads and writes values of a Redis server.

    folder: media folder of this model. seconds: time limit for one block.
    """

    name = REMOTE

    def __init__(
        self, address: RemoteAddress, folder: str, seconds: float, breaker: CircuitBreaker
    ) -> None:
        self.place = repr(address)
        self._address = address
        self._folder = folder
        self._seconds = seconds
        self._breaker = breaker
        self._connection: RedisConnection | None = None
        self._num_pending = 0
        self._to_remove: list[bytes] = []

    def read_blocks(
        self, labels: Sequence[BlockLabel], image: memoryview, seconds_left: SecondsLeft
    ) -> Iterator[bool]:
        for start in range(0, len(labels), _PIPELINE_BLOCKS):
            names = [self._name(label) for label in labels[start : start + _PIPELINE_BLOCKS]]
            connection = self._connected(seconds_left)
            self._num_pending = len(names)
            try:
                self._call(connection.send, [(b"GET", name) for name in names])
                for name in names:
                    connection.set_deadline(min(self._seconds, seconds_left()))
                    length = self._call(connection.reply_into, image)
                    self._num_pending -= 1
                    self._breaker.record_success()
                    if length not in (MISSING, len(image)):
                        self._to_remove.append(name)
                    yield length == len(image)
            finally:
                if self._num_pending:
                    self._drop()  # pending replies would be taken for later ones

    def write_block(self, label: BlockLabel, image: memoryview, seconds_left: SecondsLeft) -> None:
        connection = self._connected(seconds_left)
        connection.set_deadline(min(self._seconds, seconds_left()))
        self._call(connection.send, [(b"SET", self._name(label), image)])
        self._call(connection.reply)
        self._breaker.record_success()

    def discard(self, label: BlockLabel) -> None:
        """Remove an invalid block from the server, once no replies are pending."""
        self._to_remove.append(self._name(label))
        if not self._num_pending and self._connection is not None:
            with contextlib.suppress(MediumError):
                self._remove_discarded(self._connection)

    def close(self) -> None:
        self._drop()

    def _name(self, label: BlockLabel) -> bytes:
        return remote_name(self._folder, label.key, label.rank)

    def _connected(self, seconds_left: SecondsLeft) -> RedisConnection:
        if self._connection is None:
            if self._breaker.is_open:
                raise MediumError("not used for a while after a failure")
            seconds = min(self._seconds, _MAX_CONNECT_SECONDS, seconds_left())
            self._connection = self._call(RedisConnection, self._address, seconds)
        self._connection.set_deadline(min(self._seconds, seconds_left()))
        self._remove_discarded(self._connection)
        return self._connection

    def _remove_discarded(self, connection: RedisConnection) -> None:
        if self._to_remove:
            names, self._to_remove = self._to_remove, []
            self._call(connection.call, self._seconds, b"UNLINK", *names)

    def _call(self, command: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a command; on an error close the connection and raise MediumError."""
        try:
            return command(*args, **kwargs)
        except (RemoteRefusalError, RemoteStoreError) as error:
            self._breaker.record_failure()
            self._drop()
            raise MediumError(str(error)) from None

    def _drop(self) -> None:
        self._num_pending = 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def make_handlers(extra: Mapping[str, Any], context: HandlerContext) -> Handlers:
    """Create the handlers of both directions; raises ConfigError naming the wrong key."""
    settings: RemoteSettings = remote_settings(extra)
    address = remote_address(settings)

    def medium() -> RemoteMedium:
        breaker = CircuitBreaker(settings.remote_retry_seconds)
        return RemoteMedium(address, context.folder, settings.remote_timeout, breaker)

    return {
        (REMOTE, DEVICE_MEDIUM): TransferQueue(medium(), context, settings.load_timeout),
        (DEVICE_MEDIUM, REMOTE): TransferQueue(
            medium(), context, settings.store_timeout, STORE_NICENESS
        ),
    }
