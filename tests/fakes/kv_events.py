"""A subscriber of KV events that tracks the cached blocks."""

from engine_core.kv_cache.hashing import split_key
from engine_core.kv_cache.prefix_index import PrefixIndex
from proto.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

GroupHash = tuple[int, bytes]
"""KV group and block hash."""


class CachedHashes:
    """The set of cached hashes according to the events so far, and the tokens of each hash."""

    def __init__(self) -> None:
        self.held: set[GroupHash] = set()
        self.prefixes: dict[bytes, tuple[int, ...]] = {}

    def apply(self, event: KVEvent) -> None:
        """Apply an event; raise AssertionError if it is inconsistent with earlier ones."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                assert (event.group, event.block_hash) in self.held, "it was not stored"
                self.held.remove((event.group, event.block_hash))
            case AllBlocksCleared():
                self.held.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size
        parent = event.parent_block_hash
        before = () if parent is None else self.prefixes.get(parent, ())
        for number, block_hash in enumerate(event.block_hashes):
            before += tuple(event.token_ids[number * size : (number + 1) * size])
            known = self.prefixes.setdefault(block_hash, before)
            assert known[-size:] == before[-size:], "one hash for two contents"
            self.held.add((event.group, block_hash))


def indexed(index: PrefixIndex) -> set[GroupHash]:
    """Return the content of a prefix index in the same form."""
    return {split_key(key)[::-1] for key, _ in index.items()}
