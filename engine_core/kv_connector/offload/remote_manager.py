"""Manager of blocks in a Redis server that several daemons may share.

The server decides what it keeps and for how long. Lookup results are cached for some seconds; if
one is outdated, or the server fails, a load fails and its blocks are recomputed.

    unknown ── lookup ──▶ present or absent ── expires ──▶ unknown
"""

import logging
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine_core.kv_connector.offload.base import (
    MAX_BYTES_IN_FLIGHT,
    ManagerContext,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
)
from engine_core.kv_connector.offload.remote_lookups import RemoteLookups
from proto.runtime.circuit_breaker import CircuitBreaker
from proto.settings.kv_media import HEADER_BYTES, REMOTE
from proto.settings.kv_transfer_config import RemoteSettings, remote_address, remote_settings

logger = logging.getLogger("tokend.kv_media")

PRESENT_SECONDS: Final = 30.0
ABSENT_SECONDS: Final = 5.0
"""Seconds for which a lookup result is cached."""
MAX_CACHED: Final = 1 << 16
MAX_LOOKUP_KEYS: Final = 1024
"""Keys in one lookup; the rest of a longer prompt is looked up after these."""
_FAILURES_ALLOWED: Final = 1


class RemoteOffloadingManager(OffloadingManager):
    """OffloadingManager of a Redis server, whose memory limit and order are its own.

    lookups: thread that queries the server.
    """

    medium = REMOTE

    def __init__(
        self,
        lookups: RemoteLookups,
        block_bytes: int,
        retry_seconds: float,
    ) -> None:
        self._lookups = lookups
        self._block_bytes = block_bytes + HEADER_BYTES
        # whether a block is present, and when the result expires
        self._cache: OrderedDict[OffloadKey, tuple[bool, float]] = OrderedDict()
        self._pending: set[OffloadKey] = set()
        self._storing: set[OffloadKey] = set()
        self._storing_bad: set[OffloadKey] = set()
        self._loading: Counter[OffloadKey] = Counter()
        self.events = []
        self._loads = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED)
        self._stores = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED)

    def lookup(self, keys: Sequence[OffloadKey]) -> int | None:
        self._process_results()
        if self._loads.is_open:
            return 0
        for index, key in enumerate(keys):
            present = self._cached_presence(key)
            if present is None:
                return None if self._request_lookup(keys[index:]) else index
            if not present:
                return index
        return len(keys)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        self._process_results()
        if self._loads.is_open:
            return [False] * len(keys)
        found = [self._cached_presence(key) for key in keys]
        if None in found and self._request_lookup(keys):
            return None
        return [bool(present) for present in found]

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
            self._cache_result(key, False)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self._process_results()
        busy = len(self._storing) * self._block_bytes > MAX_BYTES_IN_FLIGHT
        if busy or self._stores.is_open or not self._lookups.connected:
            return None
        wanted = [
            key
            for key in dict.fromkeys(keys)
            if key not in self._storing
            and not self._cached_presence(key)
            and not self._lookups.is_being_removed(key)
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
            self._cache_result(key, True)
        if stored:
            self.events.append(OffloadingEvent(stored, False, self.medium))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove corrupt blocks; those being stored are removed after the store.

        Until then other daemons can find them.
        """
        self._storing_bad.update(key for key in keys if key in self._storing)
        self._discard(keys)

    def reset_cache(self) -> bool:
        """Remove all blocks of this model, for all daemons that share the server."""
        if self._storing or self._loading:
            return False
        self._cache.clear()
        self._lookups.clear()
        return True

    def on_worker_restart(self) -> None:
        self._discard(list(self._storing_bad))
        self._storing_bad.clear()
        self._storing.clear()
        self._loading.clear()

    def close(self) -> None:
        self._lookups.close()

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        present = [key for key in keys if self._cached_presence(key)]
        for key in keys:
            self._cache_result(key, False)
        if present:
            self.events.append(OffloadingEvent(present, True, self.medium))
        if keys:
            self._lookups.discard(keys)

    def _cached_presence(self, key: OffloadKey) -> bool | None:
        present, expires_at = self._cache.get(key, (False, -math.inf))
        return None if expires_at < time.monotonic() else present

    def _request_lookup(self, keys: Sequence[OffloadKey]) -> bool:
        """Look up unknown keys; False if there is no connection, so no result will follow."""
        if not self._lookups.connected:
            return False
        unknown = [key for key in keys if self._cached_presence(key) is None][:MAX_LOOKUP_KEYS]
        new_keys = [key for key in unknown if key not in self._pending]
        if new_keys:
            self._pending.update(new_keys)
            self._lookups.request(new_keys)
        return True

    def _process_results(self) -> None:
        for key, present in self._lookups.pop_results():
            self._pending.discard(key)
            self._cache_result(key, present)

    def _cache_result(self, key: OffloadKey, present: bool) -> None:
        seconds = PRESENT_SECONDS if present else ABSENT_SECONDS
        self._cache[key] = (present, time.monotonic() + seconds)
        self._cache.move_to_end(key)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> RemoteOffloadingManager:
    """Create the manager and start its lookup thread; raises ConfigError naming the wrong key."""
    settings: RemoteSettings = remote_settings(extra)
    if settings.remote_url_file is not None:
        _warn_if_readable(settings.remote_url_file)
    lookups = RemoteLookups(
        remote_address(settings),
        context.folder,
        context.num_ranks,
        settings.remote_timeout,
        settings.remote_retry_seconds,
        context.notify,
    )
    return RemoteOffloadingManager(lookups, context.block_bytes, settings.remote_retry_seconds)


def _warn_if_readable(file: str) -> None:
    """Warn if other users can read the file, which may contain a password."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return  # remote_address() raises the error
    if mode & 0o077:
        logger.warning(
            "remote: remote_url_file %s may be read by others (mode %04o); 0600 is enough",
            file,
            mode & 0o7777,
        )
