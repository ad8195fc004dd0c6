"""The integrity check: does everything the KV cache records agree with itself?

Owns no state. Reads the pool, the tables and the prefix index, and names each
contradiction in a sentence that starts with its kind. Takes time in proportion
to the pool: for idle moments, operators and tests, never for a step.

    free queue ─▶ tables ─▶ counts ─▶ prefix index ─▶ groups       a slice at a time
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import BlockPool

SLICE: Final = 4096
"""Blocks that are looked at before somebody else may have a turn: a few milliseconds."""


def check(manager: KVCacheManager) -> list[str]:
    """Every violation in the manager, its groups and its pool; empty when all is well."""
    return list(chain.from_iterable(check_in_slices(manager)))


def check_in_slices(manager: KVCacheManager) -> Iterator[list[str]]:
    """The same in pieces: of SLICE blocks, or of one table.

    Void as soon as anything changes in between: then it is to be begun anew.
    """
    tables = [table for group in manager.groups for table in group.tables().values()]
    yield from check_pool(
        manager.pool, [*tables, *manager.transfer_refs.tables(), *manager.pool.pinned.tables()]
    )
    yield manager.pool.pinned.violations()
    yield from manager.violations()


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> Iterator[list[str]]:
    """In pieces, every violation in a pool whose blocks are referenced by exactly these tables."""
    is_free = bytearray(pool.num_blocks)
    references = [0] * pool.num_blocks
    yield from _walk(pool.free_queue, is_free)
    for table in tables:
        yield _check_table(table, references)
    for blocks in _slices(pool.num_blocks):
        yield _check_counts(pool, blocks, is_free, references)
    yield from _check_index(pool)
    yield _check_null_block(pool)


def _slices(num_blocks: int) -> Iterator[range]:
    """All blocks but the null block."""
    for first in range(1, num_blocks, SLICE):
        yield range(first, min(first + SLICE, num_blocks))


def _walk(queue: FreeQueue, is_free: bytearray) -> Iterator[list[str]]:
    """Follow the ring once, marking the blocks on it: what is wrong with its links."""
    found = []
    num_linked = 0
    before, block = NULL_BLOCK, queue.next_of[NULL_BLOCK]
    while block != NULL_BLOCK:
        if not 0 < block < len(is_free):
            found.append(f"broken link: block {before} is followed by {block}, which is no block")
            break
        if is_free[block]:
            found.append(f"cycle: the free queue comes back to block {block}")
            break
        if queue.prev_of[block] != before:
            found.append(
                f"broken link: block {block} follows {before}, "
                f"but says that it follows {queue.prev_of[block]}"
            )
        is_free[block] = 1
        num_linked += 1
        before, block = block, queue.next_of[block]
        if num_linked % SLICE == 0:
            yield found
            found = []
    else:
        if queue.prev_of[NULL_BLOCK] != before:
            found.append(
                f"broken link: the free queue ends with block {before}, "
                f"but says that it ends with {queue.prev_of[NULL_BLOCK]}"
            )
    if queue.num_free != num_linked:
        found.append(f"free count: {queue.num_free} is recorded, {num_linked} blocks are linked")
    yield found


def _check_table(table: list[int], references: list[int]) -> list[str]:
    """What is wrong with a table by itself; its blocks are counted in `references`."""
    found = []
    for block, number in Counter(table).items():
        if not 0 <= block < len(references):
            found.append(f"unknown block: {block} stands in a table")
        elif block != NULL_BLOCK:
            references[block] += number
            if number > 1:
                found.append(f"duplicate block: {block} stands {number} times in one table")
    return found


def _check_counts(
    pool: BlockPool, blocks: range, is_free: bytearray, references: Sequence[int]
) -> list[str]:
    found = []
    for block in blocks:
        count = pool.ref_counts[block]
        if count != references[block]:
            found.append(
                f"reference count: block {block} counts {count}, "
                f"but stands in {references[block]} tables"
            )
        if is_free[block] and (count or references[block]):
            found.append(f"free and referenced: block {block}")
        if not is_free[block] and count == 0:
            found.append(f"lost block: {block} is neither free nor referenced")
    return found


def _check_index(pool: BlockPool) -> Iterator[list[str]]:
    is_indexed = bytearray(pool.num_blocks)
    items = pool.index.items()
    while entries := list(islice(items, SLICE)):
        yield _check_entries(pool, entries, is_indexed)
    for blocks in _slices(pool.num_blocks):
        yield [
            f"hash not in index: block {block} carries {carried.hex()[:8]}"
            for block in blocks
            if (carried := pool.hashes[block]) is not None and not is_indexed[block]
        ]


def _check_entries(
    pool: BlockPool, entries: Sequence[tuple[bytes, int]], is_indexed: bytearray
) -> list[str]:
    """What is wrong with entries of the prefix index; their blocks are marked."""
    found = []
    for block_hash, block in entries:
        is_block = 0 <= block < pool.num_blocks
        if not is_block or pool.hashes[block] != block_hash:
            name = block_hash.hex()[:8]
            found.append(f"hash not on block: the index has block {block} under {name}")
        if is_block:
            if is_indexed[block]:
                found.append(f"hash: the index has block {block} twice")
            is_indexed[block] = 1
    return found


def _check_null_block(pool: BlockPool) -> list[str]:
    found = []
    if pool.ref_counts[NULL_BLOCK] != 0:
        found.append(f"null block: its reference count is {pool.ref_counts[NULL_BLOCK]}")
    if pool.hashes[NULL_BLOCK] is not None:
        found.append("null block: it carries a hash")
    return found
