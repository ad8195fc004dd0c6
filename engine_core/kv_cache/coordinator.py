"""Coordinators: what all KV groups of a request do together.

A coordinator asks every group for blocks and finds the prefix that all of them
still hold. Which one is wired depends on the model and on the configuration:

    NoCacheCoordinator    prefixes are not cached
    UnitaryCoordinator    one group: its hit is the hit
    HybridCoordinator     several groups: the longest hit that all of them accept

The tables are the groups', the blocks are the pool's; requests are unknown here.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from engine_core.kv_cache.block import BlockIds
from engine_core.kv_cache.groups import FullAttentionGroup, SlidingWindowGroup
from engine_core.kv_cache.hashing import GroupKeys
from engine_core.kv_cache.pool import BlockPool, HashedTokens
from proto.lifecycle import KVGroup as KVGroupSpec

# How many blocks a request holds at most, and the longest request for which a pool has room.
#
# Pure functions of the model's KV groups.


def blocks_of_request(
    groups: Sequence[KVGroupSpec], num_tokens: int, block_size: int, longest_chunk: int | None
) -> int:
    """Most blocks that a request holds while its `num_tokens` tokens are computed.

    longest_chunk: most tokens of it in one step; None for all of them.

    A window group holds what the first token of a step sees and what the step
    computes. It touches most blocks where the first of these tokens ends a block:

            |<- window - 1 ->|<- chunk ->|
      | . . . . | . . . . | . . . . | . . . . |
    """
    num_whole = -(-num_tokens // block_size)
    chunk = num_tokens if longest_chunk is None else min(longest_chunk, num_tokens)
    total = 0
    for group in groups:
        if group.sliding_window is None:
            total += num_whole
        else:
            num_near = group.sliding_window - 1 + chunk
            total += min(num_whole, 1 + -(-(num_near - 1) // block_size))
    return total


def longest_request(
    groups: Sequence[KVGroupSpec],
    num_usable_blocks: int,
    block_size: int,
    longest_chunk: int | None,
    most: int,
) -> int:
    """Most tokens, up to `most`, of a request that has the whole pool to itself."""
    counts = range(-(-most // block_size) + 1)
    num_fitting = bisect_right(
        counts,
        num_usable_blocks,
        key=lambda count: blocks_of_request(groups, count * block_size, block_size, longest_chunk),
    )
    return min((num_fitting - 1) * block_size, most)


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """Blocks with the KV of a prefix that a request may start from: cached, or another's.

    block_ids: per group, empty for none; num_tokens: what the request need not compute.
    tails: of a fork, per group the block in which these tokens end, which is to be
        copied; the null block where they end with a block. Empty for cached blocks.
    Valid until the pool changes: pass it to allocate_slots in the same step.
    """

    block_ids: tuple[list[int], ...]
    num_tokens: int
    tails: tuple[int, ...] = ()


NOTHING_COMPUTED: Final = ComputedBlocks((), 0)


class NoCacheCoordinator:
    """Groups in the order in which they are given blocks; nothing is ever found."""

    def __init__(self, groups: Sequence[FullAttentionGroup]) -> None:
        self.groups = tuple(groups)
        self._windows = tuple(group for group in groups if not group.has_prefixes)

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        """The longest prefix of at most `max_tokens` tokens that every group holds."""
        return NOTHING_COMPUTED

    def release_passed(self, seq_id: int, num_computed: int) -> None:
        """Give back what tokens from position `num_computed` on do not need."""
        for group in self._windows:
            group.release_passed(seq_id, num_computed)

    def num_new_blocks(
        self, seq_id: int, num_slots: int, computed: ComputedBlocks, num_computed: int = 0
    ) -> int:
        """Blocks that `extend` would append after `attach`; changes nothing.

        num_computed: position with which `release_passed` is called in between, if it is.
        """
        num_new = 0
        for number, group in enumerate(self.groups):
            num_hits = len(computed.block_ids[number]) if computed.num_tokens else 0
            num_new += group.num_new_blocks(seq_id, num_slots, num_hits, num_computed)
        return num_new

    def attach(self, seq_id: int, computed: ComputedBlocks) -> None:
        """Start the tables of a sequence with blocks that hold its prefix, referencing them."""
        for number, group in enumerate(self.groups):
            group.attach(seq_id, computed.block_ids[number] if computed.num_tokens else ())

    def extend(self, seq_id: int, num_slots: int) -> BlockIds:
        """Append new blocks until every table has room; returns them per group."""
        return [group.extend(seq_id, num_slots) for group in self.groups]

    def register_full_blocks(self, seq_id: int, content: HashedTokens, num_tokens: int) -> int:
        """Make what the first `num_tokens` tokens filled findable.

        Returns a number of slots: as long as fewer are wanted, no group has work.
        """
        return min(
            [group.register_full_blocks(seq_id, content, num_tokens) for group in self.groups]
        )

    def rename(self, seq_id: int, new_seq_id: int) -> None:
        """The sequence, which has tables, has another seq_id from now on."""
        for group in self.groups:
            group.rename(seq_id, new_seq_id)

    def free(self, seq_id: int) -> None:
        """Give back all blocks of a sequence, group by group, last block first."""
        for group in self.groups:
            group.free(seq_id)


class UnitaryCoordinator(NoCacheCoordinator):
    """One group; what it finds is found, and nothing has to be gone through."""

    def __init__(self, groups: Sequence[FullAttentionGroup]) -> None:
        super().__init__(groups)
        (self._only,) = self.groups

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        hits = self._only.find_hit(block_hashes, max_tokens)
        if not hits:
            return NOTHING_COMPUTED
        return ComputedBlocks((hits,), len(hits) * self._only.block_size)

    def num_new_blocks(
        self, seq_id: int, num_slots: int, computed: ComputedBlocks, num_computed: int = 0
    ) -> int:
        num_hits = len(computed.block_ids[0]) if computed.num_tokens else 0
        return self._only.num_new_blocks(seq_id, num_slots, num_hits, num_computed)

    def register_full_blocks(self, seq_id: int, content: HashedTokens, num_tokens: int) -> int:
        return self._only.register_full_blocks(seq_id, content, num_tokens)


class HybridCoordinator(NoCacheCoordinator):
    """Several groups, also with blocks of different sizes.

    The end of a hit is the end of a block in every group: a multiple of `_alignment`.
    """

    def __init__(self, groups: Sequence[FullAttentionGroup]) -> None:
        super().__init__(groups)
        self._alignment = lcm(*(group.block_size for group in groups))

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> ComputedBlocks:
        """The fixed point: lower the candidate until every group accepts it.

        A group that keeps all its blocks is asked once, since what is left of its
        hit is a hit. A window group may hold a shorter prefix and not a longer one, so
        it is asked again whenever another lowered the candidate after it.
        """
        found: dict[FullAttentionGroup, list[int]] = {}
        length = self._aligned(max_tokens)
        for group in self.groups:
            if group.has_prefixes:
                found[group] = group.find_hit(block_hashes, length)
                length = self._aligned(len(found[group]) * group.block_size)
        num_accepted = turn = 0
        while num_accepted < len(self._windows) and length > 0:
            group = self._windows[turn % len(self._windows)]
            found[group] = group.find_hit(block_hashes, length)
            held = len(found[group]) * group.block_size
            lowered = self._aligned(held)
            # It accepts what it found itself, unless that had to be cut.
            num_accepted = num_accepted + 1 if held == length else int(held == lowered)
            length = lowered
            turn += 1
        if length == 0:
            return NOTHING_COMPUTED
        block_ids = tuple(found[group][: length // group.block_size] for group in self.groups)
        return ComputedBlocks(block_ids, length)

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._alignment


def make_coordinator(
    pool: BlockPool, specs: Sequence[KVGroupSpec], block_size: int
) -> NoCacheCoordinator:
    """The coordinator of a model whose layers form these groups."""
    groups = [
        _make_group(pool, spec, GroupKeys(number, block_size, block_size))
        for number, spec in enumerate(specs)
    ]
    if not pool.enable_caching:
        return NoCacheCoordinator(groups)
    if len(groups) == 1:
        return UnitaryCoordinator(groups)
    return HybridCoordinator(groups)


def _make_group(pool: BlockPool, spec: KVGroupSpec, keys: GroupKeys) -> FullAttentionGroup:
    if spec.sliding_window is None:
        return FullAttentionGroup(pool, keys)
    return SlidingWindowGroup(pool, keys, spec.sliding_window)
