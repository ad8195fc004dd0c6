"""A thread that asks a Redis server which blocks it has, so that the engine never blocks on it.

    engine    request(keys) ─▶ thread ── EXISTS, pipelined ──▶ server
              pop_results() ◀── results, notify() ◀──────────────┘

Every lookup gets a result within about one reply timeout: "absent" if the server does not reply,
immediately while there is no connection, also while the thread resolves a host name.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from engine_core.kv_connector.offload.base import OffloadKey
from proto.errors import TokendError
from proto.runtime.circuit_breaker import CircuitBreaker
from proto.runtime.redis_client import RedisConnection
from proto.settings.kv_media import remote_name
from proto.settings.kv_transfer_config import RemoteAddress

logger = logging.getLogger("tokend.kv_media")

_KEEPALIVE_SECONDS: Final = 15.0
_FAILURES_ALLOWED: Final = 1
_SCAN_COUNT: Final = b"1000"
_UNLINK_COUNT: Final = 1000
MAX_DISCARDED: Final = 1 << 16
"""Limit for keys that wait to be removed; beyond it, all blocks of the model are removed."""
_STOP_SECONDS: Final = 0.5


LookupResult = tuple[OffloadKey, bool]
"""A key, and whether its block is present on all ranks."""


class RemoteLookups:
    """Thread that asks a Redis server which blocks it has, and removes blocks from it.

    folder: media folder of this model. seconds: reply timeout. retry_seconds: see CircuitBreaker.
    notify: called after results were added, from any thread.
    """

    def __init__(
        self,
        address: RemoteAddress,
        folder: str,
        num_ranks: int,
        seconds: float,
        retry_seconds: float,
        notify: Callable[[], None],
    ) -> None:
        self._address = address
        self._folder = folder
        self._num_ranks = num_ranks
        self._seconds = seconds
        self._notify = notify
        self._breaker = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED)
        self._changed = threading.Condition()
        self._requested: list[OffloadKey] = []
        self._results: list[LookupResult] = []
        self._discarded: dict[OffloadKey, None] = {}
        self._clearing = False
        self._stopping = False
        self.connected = False
        self._failure_logged = False
        self._thread = threading.Thread(target=self._run, name="kv remote", daemon=True)
        self._thread.start()

    def request(self, keys: Sequence[OffloadKey]) -> None:
        """Look up keys; results and a notification follow."""
        with self._changed:
            if self.connected:
                self._requested += keys
                self._changed.notify()
                return
            self._results += [(key, False) for key in keys]
        self._notify()

    def pop_results(self) -> list[LookupResult]:
        with self._changed:
            results, self._results = self._results, []
        return results

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks from the server, before any later lookup."""
        with self._changed:
            self._discarded.update(dict.fromkeys(keys))
            if len(self._discarded) > MAX_DISCARDED:
                self._discarded.clear()
                self._clearing = True
            self._changed.notify()

    def is_being_removed(self, key: OffloadKey) -> bool:
        """Whether a discarded block may still be on the server."""
        return key in self._discarded

    def clear(self) -> None:
        """Remove all blocks of this model from the server, once it is reachable."""
        with self._changed:
            self._clearing = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping:
            if self._breaker.is_open:
                self._sleep(self._breaker.seconds_left)
                continue
            try:
                connection = RedisConnection(self._address, self._seconds)
            except Exception as error:  # pending lookups must get a result
                self._on_connection_lost(error)
                continue
            self.connected = True
            self._log_recovery()
            try:
                self._serve(connection)
            except Exception as error:
                self._on_connection_lost(error)
            finally:
                connection.close()

    def _serve(self, connection: RedisConnection) -> None:
        """Process lookups and removals until `close`; raises if the server does not reply."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, _KEEPALIVE_SECONDS)
                if self._stopping:
                    return
                requested = list(dict.fromkeys(self._requested))
                clearing, self._clearing = self._clearing, False
                discarded = list(self._discarded)
            if clearing:
                self._remove_all(connection)
            if discarded:
                self._remove(connection, discarded)
            if requested:
                self._add_results(self._query(connection, requested))
            elif not clearing and not discarded:
                connection.call(self._seconds, b"PING")
            self._breaker.record_success()

    def _has_work(self) -> bool:
        return bool(self._requested or self._discarded) or self._clearing or self._stopping

    def _query(self, connection: RedisConnection, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        connection.set_deadline(self._seconds)
        connection.send([[b"EXISTS", *self._names(key)] for key in keys])
        return [(key, connection.reply() == self._num_ranks) for key in keys]

    def _names(self, key: OffloadKey) -> list[bytes]:
        return [remote_name(self._folder, key, rank) for rank in range(self._num_ranks)]

    def _remove(self, connection: RedisConnection, keys: Sequence[OffloadKey]) -> None:
        names = [name for key in keys for name in self._names(key)]
        for start in range(0, len(names), _UNLINK_COUNT):
            connection.call(self._seconds, b"UNLINK", *names[start : start + _UNLINK_COUNT])
        with self._changed:
            for key in keys:
                self._discarded.pop(key, None)

    def _remove_all(self, connection: RedisConnection) -> None:
        try:
            self._scan_and_unlink(connection)
        except TokendError:  # no reply, or a refusal, for example while the server loads its data
            self._clearing = True  # try again after reconnecting
            raise

    def _scan_and_unlink(self, connection: RedisConnection) -> None:
        pattern = remote_name(self._folder, b"", 0).split(b"::")[0] + b":*"
        cursor = b"0"
        while True:
            reply = connection.call(
                self._seconds, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT
            )
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                raise TokendError("unexpected reply to SCAN")
            names = [name for name in reply[1] if isinstance(name, bytes)]
            if names:
                connection.call(self._seconds, b"UNLINK", *names)
            cursor = reply[0] if isinstance(reply[0], bytes) else b"0"
            if cursor == b"0":
                return

    def _add_results(self, results: Sequence[LookupResult]) -> None:
        with self._changed:
            answered = {key for key, _ in results}
            self._requested = [key for key in self._requested if key not in answered]
            self._results += results
        self._notify()

    def _on_connection_lost(self, error: Exception) -> None:
        """Pause, and answer all pending lookups with "absent"."""
        self._breaker.record_failure()
        if not self._failure_logged:
            self._failure_logged = True
            unexpected = not isinstance(error, TokendError)
            logger.warning(
                "remote %s: %s; not used for a while", self._address, error, exc_info=unexpected
            )
        with self._changed:
            self.connected = False
            requested = list(dict.fromkeys(self._requested))
        self._add_results([(key, False) for key in requested])

    def _log_recovery(self) -> None:
        if self._failure_logged:
            self._failure_logged = False
            logger.info("remote %s: connected", self._address)

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)
