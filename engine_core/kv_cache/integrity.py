"""The integrity check: whether the records of the KV cache agree with each other.

Compares the free queue, block tables, reference counts and prefix index, and describes each
contradiction in a sentence that starts with its kind. It takes time in proportion to the pool, so
it runs when the engine is idle, on an operator's request and in tests, never within a step.

    free queue ─▶ tables ─▶ counts ─▶ prefix index ─▶ groups       a slice at a time
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from engine_core.kv_cache.free_queue import NULL_BLOCK, FreeBlockQueue
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import BlockPool

SLICE: Final = 4096
"""Blocks that are checked at once: a few milliseconds."""


def check(manager: KVCacheManager) -> list[str]:
    """Return every violation in the manager, its groups and its pool; empty if there is none."""
    return list(chain.from_iterable(check_in_slices(manager)))


def check_in_slices(manager: KVCacheManager) -> Iterator[list[str]]:
    """Yield the violations of SLICE blocks, or of one block table, at a time.

    After any change of the cache the check has to start again.
    """
    tables = [table for group in manager.block_groups for table in group.block_tables().values()]
    references = manager.transfer_refs.reference_tables(), manager.pool.retained.reference_tables()
    yield from check_pool(manager.pool, [*tables, *references[0], *references[1]])
    yield manager.pool.retained.violations()
    for group in manager.state_groups:
        tables = list(group.block_tables().values())
        yield from check_pool(group.pool, [*tables, *group.transfer_refs.reference_tables()])
    yield from manager.violations()


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> Iterator[list[str]]:
    """Yield, in slices, every violation of a pool; tables: all references on its blocks."""
    is_free = bytearray(pool.num_blocks)
    references = [0] * pool.num_blocks
    yield from _check_queue(pool.free_queue, is_free)
    for table in tables:
        yield _check_table(table, references)
    for blocks in _slices(pool.num_blocks):
        yield _check_counts(pool, blocks, is_free, references)
    yield from _check_index(pool)
    yield _check_null_block(pool)


def _slices(num_blocks: int) -> Iterator[range]:
    for first in range(1, num_blocks, SLICE):
        yield range(first, min(first + SLICE, num_blocks))


def _check_queue(queue: FreeBlockQueue, is_free: bytearray) -> Iterator[list[str]]:
    """Follow the free queue once and mark its blocks; yield what is wrong with it, in slices."""
    found = []
    num_queued = 0
    for block, sentence in queue.check_order():
        if sentence:
            found.append(sentence)
        if block != NULL_BLOCK:
            is_free[block] = 1
            num_queued += 1
        if num_queued % SLICE == 0:
            yield found
            found = []
    if queue.num_free != num_queued:
        found.append(f"free count: {queue.num_free} is recorded, {num_queued} blocks are queued")
    yield found


def _check_table(table: list[int], references: list[int]) -> list[str]:
    """Return what is wrong with one block table; count its blocks in `references`."""
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
    """Return what is wrong with entries of the prefix index; mark their blocks in `is_indexed`."""
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
