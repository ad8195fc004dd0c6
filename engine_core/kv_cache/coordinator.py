"""The coordinator: what all KV cache groups of a request do together.

It asks every group for blocks and finds the longest prefix that all of them still hold. Groups own
the block tables, the pool owns the blocks. This file does not know requests, nor what the blocks of
a group hold.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from engine_core.block_hashing import GroupKeys
from engine_core.kv_cache.events import PoolObserver, make_pool
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.groups import CacheGroup, RecurrentStateGroup, group_class
from engine_core.kv_cache.pool import BlockPool
from engine_core.request import Request
from proto.messages.lifecycle import KVGroup as KVGroupSpec
from proto.messages.scheduler_output import BlockIds


def max_blocks_of_request(
    groups: Sequence[KVGroupSpec], num_tokens: int, block_size: int, longest_chunk: int | None
) -> int:
    """Return the most blocks that a request holds at once while its tokens are computed.

    longest_chunk: maximum tokens of the request in one step; None: all of them.
    """
    return sum(
        [
            group_class(spec).max_blocks(spec, num_tokens, block_size, longest_chunk)
            for spec in groups
        ]
    )


def longest_request(
    groups: Sequence[KVGroupSpec],
    num_usable_blocks: int,
    block_size: int,
    longest_chunk: int | None,
    limit: int,
) -> int:
    """Return the most tokens, up to `limit`, of a request that has the whole pool to itself."""
    counts = range(-(-limit // block_size) + 1)
    num_fitting = bisect_right(
        counts,
        num_usable_blocks,
        key=lambda count: max_blocks_of_request(
            groups, count * block_size, block_size, longest_chunk
        ),
    )
    return min((num_fitting - 1) * block_size, limit)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks with the KV of a prefix from which a request may start: cached, or of a fork's source.

    block_ids: per group; empty for no prefix. num_tokens: tokens that the request need not compute.
    tails: for a fork, per group the block in which the prefix ends, which the worker copies; the
        null block where it ends with a block. Empty for cached blocks.
    num_with_kv: tokens whose KV is cached, if they are more, because a recurrent state is missing.
    kv_after: per group the blocks of these further tokens, if no group has a window.
    Valid until the pool changes: pass it to allocate_slots in the same step.
    """

    block_ids: tuple[list[int], ...]
    num_tokens: int
    tails: tuple[int, ...] = ()
    num_with_kv: int = 0
    kv_after: tuple[list[int], ...] = ()


NO_PREFIX: Final = CachedPrefix((), 0)


class KVCacheCoordinator:
    """All groups of a model. Each gets blocks for the same tokens, the first group first."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self._block_size = groups[0].block_size
        self._skipping = tuple(group for group in groups if not group.caches_all_prefixes)
        self.state_groups = tuple(
            group for group in groups if isinstance(group, RecurrentStateGroup)
        )

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> CachedPrefix:
        """Return the longest prefix of at most `max_tokens` tokens that every group has cached.

        The length is lowered until every group accepts it. A group that caches all prefixes is
        asked once, because any shorter part of its hit is a hit. Other groups may have a shorter
        prefix and not a longer one, so such a group is asked again whenever another one lowered the
        length.
        """
        block_size = self._block_size
        found: dict[CacheGroup, list[int]] = {}
        length = max_tokens - max_tokens % block_size
        for group in self.groups:
            if group.caches_all_prefixes:
                found[group] = group.find_longest_hit(block_hashes, length)
                length = len(found[group]) * block_size
        num_with_kv = length if self.state_groups and found else 0
        num_accepted = turn = 0
        while num_accepted < len(self._skipping) and length > 0:
            group = self._skipping[turn % len(self._skipping)]
            found[group] = group.find_longest_hit(block_hashes, length)
            lowered = len(found[group]) * block_size
            num_accepted = num_accepted + 1 if lowered == length else 1
            length = lowered
            turn += 1
        kv_after: tuple[list[int], ...] = ()
        if num_with_kv == length:
            num_with_kv = 0
        elif num_with_kv and len(self._skipping) == len(self.state_groups):
            first, end = length // block_size, num_with_kv // block_size
            kv_after = tuple([found[group][first:end] for group in self.groups])
        if length == 0:
            return CachedPrefix((), 0, (), num_with_kv, kv_after) if num_with_kv else NO_PREFIX
        block_ids = tuple([found[group][: length // block_size] for group in self.groups])
        return CachedPrefix(block_ids, length, (), num_with_kv, kv_after)

    def with_loaded(
        self, computed: CachedPrefix, block_hashes: Sequence[bytes], num_tokens: int
    ) -> CachedPrefix:
        """Return what a request holds when a connector loads the rest of its first tokens.

        Cached KV that has no state in `computed` is used, and so is the state after `num_tokens` if
        it is cached; the state with which `computed` ends is not needed.

            cached KV        | 7 | 3 | 9 |         cached states  | 0 | 5 |
            computed         | 7 | 3 |                            | 0 | 5 |
            with 5 blocks    | 7 | 3 | 9 |                        |           the rest is loaded
        """
        num_more = (num_tokens - computed.num_tokens) // self._block_size
        blocks = []
        for number, group in enumerate(self.groups):
            held = computed.block_ids[number] if computed.block_ids else []
            if isinstance(group, RecurrentStateGroup):
                state = group.find_longest_hit(block_hashes, num_tokens)
                held = state if len(state) * self._block_size == num_tokens else []
            elif computed.kv_after:
                held = held + computed.kv_after[number][:num_more]
            blocks.append(held)
        num_with_kv = computed.num_with_kv if computed.num_with_kv > num_tokens else 0
        return replace(computed, block_ids=tuple(blocks), num_with_kv=num_with_kv, kv_after=())

    def find_fork(self, seq_id: int, num_tokens: int) -> CachedPrefix:
        """Return what a new sequence can share of the first `num_tokens` tokens of a sequence.

        NO_PREFIX if a group has freed what the next token needs. Blocks that the tokens
        fill are shared; the block in which they end is copied, because each sequence will write
        other tokens to it:

            source   | 7 | 3 | 9 | 5 |      the shared tokens end within block 9
            fork     | 7 | 3 | 12 |         7 and 3 are shared, 9 is copied to 12
        """
        if not num_tokens:
            return NO_PREFIX
        shared, tails = [], []
        for group in self.groups:
            found = group.find_fork(seq_id, num_tokens)
            if found is None:
                return NO_PREFIX
            shared.append(found[0])
            tails.append(found[1])
        return CachedPrefix(tuple(shared), num_tokens, tuple(tails))

    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        for group in self._skipping:
            group.remove_skipped_blocks(seq_id, num_computed)

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, computed: CachedPrefix, num_computed: int = 0
    ) -> int:
        """Return how many blocks `allocate_blocks` would take after `attach_blocks`.

        Changes nothing. num_computed: the position given to `remove_skipped_blocks` in between;
        0: it is not called.
        """
        num_new = 0
        for number, group in enumerate(self.groups):
            num_hits = len(computed.block_ids[number]) if computed.block_ids else 0
            num_new += group.num_new_blocks(seq_id, num_tokens, num_hits, num_computed)
        return num_new

    def attach_blocks(self, seq_id: int, computed: CachedPrefix, num_loaded: int = 0) -> None:
        """Start the block tables of a sequence.

        num_loaded: its first tokens, in part loaded by a connector; 0: nothing is loaded.
        """
        for number, group in enumerate(self.groups):
            hits = computed.block_ids[number] if computed.block_ids else ()
            group.attach_blocks(seq_id, hits)
            if isinstance(group, RecurrentStateGroup):
                if computed.tails:
                    group.receive_state(seq_id, computed.num_tokens, is_loaded=False)
                elif num_loaded and not hits:
                    group.receive_state(seq_id, num_loaded, is_loaded=True)
                if computed.num_with_kv:
                    group.want_state(seq_id, computed.num_with_kv)

    def can_start(self, computed: CachedPrefix, num_loaded: int) -> bool:
        """Return whether there are slots for the states of one more sequence."""
        for number, group in enumerate(self.groups):
            if isinstance(group, RecurrentStateGroup):
                hits = computed.block_ids[number] if computed.block_ids else ()
                if not group.can_start(hits, bool(num_loaded and not hits)):
                    return False
        return True

    def allocate_blocks(self, seq_id: int, num_tokens: int) -> BlockIds:
        return [group.allocate_blocks(seq_id, num_tokens) for group in self.groups]

    def cache_full_blocks(self, seq_id: int, content: Request, num_tokens: int) -> int:
        """Make the blocks that the first `num_tokens` tokens fill findable, in every group.

        Returns a number of tokens: while the sequence has fewer, no group has work.
        """
        return min([group.cache_full_blocks(seq_id, content, num_tokens) for group in self.groups])

    def rename_sequence(self, seq_id: int, new_seq_id: int) -> None:
        for group in self.groups:
            group.rename_sequence(seq_id, new_seq_id)

    def free_sequence(self, seq_id: int) -> None:
        for group in self.groups:
            group.free_sequence(seq_id)


def make_groups(
    pool: BlockPool,
    specs: Sequence[KVGroupSpec],
    block_size: int,
    num_state_slots: int,
    eviction_policy: str,
    num_dropped: int,
    observers: Sequence[PoolObserver],
) -> list[CacheGroup]:
    """Return the groups of a model.

    num_state_slots: of the pool of states, with the null slot; 0 without such layers.
    eviction_policy: of that pool. num_dropped: as in `CacheGroup`. observers: of that pool.
    """
    groups: list[CacheGroup] = []
    for number, spec in enumerate(specs):
        kind = group_class(spec)
        own = pool
        if kind is RecurrentStateGroup:
            own = make_pool(num_state_slots, pool.enable_caching, eviction_policy, observers)
        groups.append(kind(own, GroupKeys(number, block_size), spec, num_dropped))
    return groups


class PendingCopies:
    """Copies within one pool that the worker has to make before the next step.

    A fork takes a block of its own for the block in which the shared tokens end, and a slot for the
    state after them; the worker copies the content before it computes anything of the step.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._source_of)

    def add_fork(self, tail: int, new_blocks: Sequence[int]) -> None:
        """Copy the tail of a group into the first new block that the fork was given there.

        If the source is freed before the step, the copy still reads the old content: another
        request writes to the block within that step at the earliest. A block that is itself a
        pending copy has no content yet, so a fork of it copies from its source.
        """
        if tail != NULL_BLOCK:
            target = next(block for block in new_blocks if block != NULL_BLOCK)
            self._source_of[target] = self._source_of.get(tail, tail)

    def cancel(self, blocks: Iterable[int]) -> None:
        """Cancel copies into blocks that their fork has freed."""
        for block in blocks:
            self._source_of.pop(block, None)

    def pop_all(self) -> list[int]:
        """Return source, target, source, target …, since the last call."""
        if not self._source_of:
            return []
        pairs = [block for target, source in self._source_of.items() for block in (source, target)]
        self._source_of.clear()
        return pairs
