"""The integrity check: does everything the KV cache records agree with itself?

Owns no state. Reads the pool, the tables and the prefix index, and names each
contradiction in a sentence that starts with its kind. Takes time in proportion
to the pool: for idle moments, operators and tests, never for a step.
"""

from collections import Counter
from collections.abc import Iterable

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import BlockPool


def check(manager: KVCacheManager) -> list[str]:
    """Every violation in the manager, its groups and its pool; empty when all is well."""
    tables = [table for group in manager.groups for table in group.tables().values()]
    return check_pool(manager.pool, tables) + manager.violations()


def check_pool(pool: BlockPool, tables: Iterable[list[int]]) -> list[str]:
    """Every violation in a pool whose blocks are referenced by exactly these tables."""
    free, found = _walk(pool.free_queue, pool.num_blocks)
    references: Counter[int] = Counter()
    for table in tables:
        found += _check_table(table, pool.num_blocks)
        references.update(block for block in table if block != NULL_BLOCK)
    found += _check_counts(pool, free, references)
    found += _check_index(pool)
    found += _check_null_block(pool)
    return found


def _walk(queue: FreeQueue, num_blocks: int) -> tuple[set[int], list[str]]:
    """Follow the ring once: the blocks on it, and what is wrong with its links."""
    free: set[int] = set()
    found = []
    before, block = NULL_BLOCK, queue.next_of[NULL_BLOCK]
    while block != NULL_BLOCK:
        if not 0 < block < num_blocks:
            found.append(f"broken link: block {before} is followed by {block}, which is no block")
            break
        if block in free:
            found.append(f"cycle: the free queue comes back to block {block}")
            break
        if queue.prev_of[block] != before:
            found.append(
                f"broken link: block {block} follows {before}, "
                f"but says that it follows {queue.prev_of[block]}"
            )
        free.add(block)
        before, block = block, queue.next_of[block]
    else:
        if queue.prev_of[NULL_BLOCK] != before:
            found.append(
                f"broken link: the free queue ends with block {before}, "
                f"but says that it ends with {queue.prev_of[NULL_BLOCK]}"
            )
    if queue.num_free != len(free):
        found.append(f"free count: {queue.num_free} is recorded, {len(free)} blocks are linked")
    return free, found


def _check_table(table: list[int], num_blocks: int) -> list[str]:
    found = []
    times = Counter(table)
    for block, number in times.items():
        if not 0 <= block < num_blocks:
            found.append(f"unknown block: {block} stands in a table")
        elif number > 1 and block != NULL_BLOCK:
            found.append(f"duplicate block: {block} stands {number} times in one table")
    return found


def _check_counts(pool: BlockPool, free: set[int], references: Counter[int]) -> list[str]:
    found = []
    for block in range(1, pool.num_blocks):
        count = pool.ref_counts[block]
        if count != references[block]:
            found.append(
                f"reference count: block {block} counts {count}, "
                f"but stands in {references[block]} tables"
            )
        if block in free and (count or references[block]):
            found.append(f"free and referenced: block {block}")
        if block not in free and count == 0:
            found.append(f"lost block: {block} is neither free nor referenced")
    return found


def _check_index(pool: BlockPool) -> list[str]:
    found = []
    indexed = set()
    for block_hash, block in pool.index.items():
        name = block_hash.hex()[:8]
        if block in indexed:
            found.append(f"hash: the index has block {block} twice")
        indexed.add(block)
        if not 0 <= block < pool.num_blocks or pool.hashes[block] != block_hash:
            found.append(f"hash not on block: the index has block {block} under {name}")
    for block, carried in enumerate(pool.hashes):
        if carried is not None and block not in indexed:
            found.append(f"hash not in index: block {block} carries {carried.hex()[:8]}")
    return found


def _check_null_block(pool: BlockPool) -> list[str]:
    found = []
    if pool.ref_counts[NULL_BLOCK] != 0:
        found.append(f"null block: its reference count is {pool.ref_counts[NULL_BLOCK]}")
    if pool.hashes[NULL_BLOCK] is not None:
        found.append("null block: it carries a hash")
    return found
