"""The events of the prefix cache since they were last asked for."""

from collections.abc import Sequence

from engine_core.kv_cache.group_keys import GroupKeys, parts
from engine_core.kv_cache.observers import PoolObserver
from engine_core.kv_cache.pool import HashedTokens
from proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class KVEventLog(PoolObserver):
    """Collects events in order; owns them until they are taken."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def stored(
        self, table: Sequence[int], first: int, end: int, keys: GroupKeys, content: HashedTokens
    ) -> None:
        hashes = keys.hashes(content.block_hashes, first, end)
        parent = keys.hashes(content.block_hashes, first - 1, first)[0] if first else None
        tokens = content.all_token_ids[first * keys.block_size : end * keys.block_size]
        self._events.append(BlockStored(hashes, parent, tokens, keys.block_size, keys.number))

    def removed(self, block: int, key: bytes, is_last: bool) -> None:
        if is_last:
            block_hash, group = parts(key)
            self._events.append(BlockRemoved(block_hash, group))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())
