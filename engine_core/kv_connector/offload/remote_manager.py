"""The ledger of a remote store that daemons share: what is known of it, for a while.

The store itself decides what it keeps and for how long. An answer is believed for some seconds;
where it was wrong, or the store has gone in between, a load fails and its blocks are computed.

    unknown ── asked ──▶ present or absent ── its time is over ──▶ unknown
"""

import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from engine_core.kv_connector.offload.base import (
    MAX_BYTES_IN_FLIGHT,
    ManagerContext,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
)
from engine_core.kv_connector.offload.remote_lookups import RemoteLookups
from proto.circuit_breaker import CircuitBreaker
from proto.kv_media import HEADER_BYTES, REMOTE, media_folder
from proto.kv_transfer_config import RemoteSettings, remote_address, remote_settings

logger = logging.getLogger("tokend.kv_media")

PRESENT_SECONDS: Final = 30.0
ABSENT_SECONDS: Final = 5.0
"""For which an answer is believed; a request that waits looks again in this time."""
MAX_KNOWN: Final = 1 << 16
MAX_ASKED: Final = 1024
"""Keys in one question; a longer prompt asks for its rest when it gets there."""
_FAILURES_ALLOWED: Final = 1


class _Known(NamedTuple):
    present: bool
    until: float


class RemoteOffloadingManager:
    """An OffloadingManager; lookups asks the server."""

    medium = REMOTE

    def __init__(
        self,
        lookups: RemoteLookups,
        block_bytes: int,
        retry_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookups = lookups
        self._block_bytes = block_bytes + HEADER_BYTES
        self._clock = clock
        self._known: OrderedDict[OffloadKey, _Known] = OrderedDict()
        self._asked: set[OffloadKey] = set()
        self._storing: set[OffloadKey] = set()
        self._storing_bad: set[OffloadKey] = set()
        self._loading: Counter[OffloadKey] = Counter()
        self._events: deque[OffloadingEvent] = deque()
        self._loads = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED, clock)
        self._stores = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED, clock)

    @property
    def usage(self) -> float:
        """Nobody here knows."""
        return 0.0

    def lookup(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> int | None:
        self._hear()
        if self._loads.is_open:
            return 0
        for index, key in enumerate(keys):
            present = self._present(key)
            if present is None:
                return None if self._ask(keys[index:]) else index
            if not present:
                return index
        return len(keys)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        self._hear()
        if self._loads.is_open:
            return [False] * len(keys)
        found = [self._present(each) for each in keys]
        if None in found and self._ask(keys):
            return None
        return [bool(each) for each in found]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        self._loading.update(keys)
        return []

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        for key in keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        if success:
            self._loads.record_success()
            return
        self._loads.record_failure()
        for key in keys:
            self._learn(key, False)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self._hear()
        busy = len(self._storing) * self._block_bytes > MAX_BYTES_IN_FLIGHT
        if busy or self._stores.is_open or not self._lookups.connected:
            return None
        wanted = [
            key
            for key in dict.fromkeys(keys)
            if key not in self._storing
            and not self._present(key)
            and not self._lookups.is_leaving(key)
        ]
        self._storing.update(wanted)
        return PrepareStoreOutput(wanted, [], [])

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        stored = [key for key in keys if key in self._storing]
        self._storing.difference_update(stored)
        if bad := self._storing_bad.intersection(stored):
            self._storing_bad -= bad
            stored = [key for key in stored if key not in bad]
            self._discard(list(bad))
        if not success:
            if not cancelled:
                self._stores.record_failure()
            return
        self._stores.record_success()
        for key in stored:
            self._learn(key, True)
        if stored:
            self._events.append(OffloadingEvent(stored, False, self.medium))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """What is being stored is removed when that is over; another may find it until then."""
        self._storing_bad.update(key for key in keys if key in self._storing)
        self._discard(keys)

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        """The store has an order of its own."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, deque()
        return events

    def reset(self) -> bool:
        """Also for all others who share the store."""
        if self._storing or self._loading:
            return False
        self._known.clear()
        self._lookups.clear()
        return True

    def start_over(self) -> None:
        self._discard(list(self._storing_bad))
        self._storing_bad.clear()
        self._storing.clear()
        self._loading.clear()

    def close(self) -> None:
        self._lookups.close()

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        present = [key for key in keys if self._present(key)]
        for key in keys:
            self._learn(key, False)
        if present:
            self._events.append(OffloadingEvent(present, True, self.medium))
        if keys:
            self._lookups.discard(keys)

    def _present(self, key: OffloadKey) -> bool | None:
        known = self._known.get(key)
        if known is None or known.until < self._clock():
            return None
        return known.present

    def _ask(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether an answer will come for what is unknown of these."""
        if not self._lookups.connected:
            return False
        unknown = [key for key in keys if self._present(key) is None][:MAX_ASKED]
        news = [key for key in unknown if key not in self._asked]
        if news:
            self._asked.update(news)
            self._lookups.ask(news)
        return True

    def _hear(self) -> None:
        for key, present in self._lookups.take_answers():
            self._asked.discard(key)
            self._learn(key, present)

    def _learn(self, key: OffloadKey, present: bool) -> None:
        seconds = PRESENT_SECONDS if present else ABSENT_SECONDS
        self._known[key] = _Known(present, self._clock() + seconds)
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> RemoteOffloadingManager:
    """For the settings in `kv_connector_extra_config`; raises ConfigError naming the key."""
    settings: RemoteSettings = remote_settings(extra)
    if settings.remote_url_file is not None:
        _warn_of_readers(settings.remote_url_file)
    lookups = RemoteLookups(
        remote_address(settings),
        media_folder(context.fingerprint, context.num_ranks, context.factor),
        context.num_ranks,
        settings.remote_timeout,
        settings.remote_retry_seconds,
        context.ring,
    )
    return RemoteOffloadingManager(lookups, context.block_bytes, settings.remote_retry_seconds)


def _warn_of_readers(file: str) -> None:
    """What is in it may be a password."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return  # whoever reads it says so
    if mode & 0o077:
        logger.warning(
            "remote: remote_url_file %s may be read by others (mode %04o); 0600 is enough",
            file,
            mode & 0o7777,
        )
