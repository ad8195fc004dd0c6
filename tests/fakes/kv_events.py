"""A subscriber of KV events that tracks the cached blocks, and what tests publish them with."""

import json
from typing import Any

from engine_core.block_hashing import split_key
from engine_core.kv_cache.events import KVEventLog
from engine_core.kv_cache.prefix_index import PrefixIndex
from proto.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    event_hash,
)
from proto.messages.lifecycle import KVCacheGeometry, KVGroup

GroupHash = tuple[int | None, int]
"""KV group, and the name of a block in events."""


def events_config(**keys: Any) -> str:
    """Return a --kv-events-config that publishes in the run directory, unless `keys` say more."""
    return json.dumps({"enable_kv_cache_events": True, "endpoint": "ipc", **keys})


def geometry(*windows: int | None, latent: bool = False) -> KVCacheGeometry:
    """Return that of a cache with a group for each window, None for full attention."""
    groups = tuple(KVGroup(window) for window in windows or (None,))
    return KVCacheGeometry(1, 1, 8, "float32", 64, groups, num_parts=1 if latent else 2)


def event_log(*windows: int | None, latent: bool = False) -> KVEventLog:
    return KVEventLog(geometry(*windows, latent=latent))


def names(block_hashes: list[bytes]) -> list[int]:
    """Return what events call these blocks."""
    return [event_hash(block_hash) for block_hash in block_hashes]


class CachedHashes:
    """The set of cached blocks according to the events so far, and the tokens of each."""

    def __init__(self) -> None:
        self.held: set[GroupHash] = set()
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def apply(self, event: KVEvent) -> None:
        """Apply an event; raise AssertionError if it is inconsistent with earlier ones."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                removed = {(event.group_idx, name) for name in event.block_hashes}
                assert removed <= self.held, "a block was not stored"
                self.held -= removed
            case AllBlocksCleared():
                self.held.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size
        parent = event.parent_block_hash
        before = () if parent is None else self.prefixes.get(parent, ())
        for number, name in enumerate(event.block_hashes):
            before += tuple(event.token_ids[number * size : (number + 1) * size])
            known = self.prefixes.setdefault(name, before)
            assert known[-size:] == before[-size:], "one hash for two contents"
            self.held.add((event.group_idx, name))


def indexed(index: PrefixIndex) -> set[GroupHash]:
    """Return the content of a prefix index in the same form."""
    keys = (split_key(key) for key, _ in index.items())
    return {(group, event_hash(block_hash)) for block_hash, group in keys}
