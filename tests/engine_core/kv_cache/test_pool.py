"""The block pool: references, eviction, caching, the null block."""

import pytest

from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.integrity import check_pool
from engine_core.kv_cache.pool import BlockPool


def make_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks, enable_caching=True)


def test_a_new_pool_has_only_free_blocks_without_content():
    pool = make_pool()
    assert pool.num_free == 5
    assert pool.usage == 0.0
    assert set(pool.ref_counts) == {0}
    assert set(pool.hashes) == {None}


def test_a_pool_needs_a_usable_block():
    with pytest.raises(ValueError, match="null block"):
        make_pool(1)


def test_new_blocks_are_referenced_once_and_never_the_null_block():
    pool = make_pool()
    assert pool.get_new_blocks(5) == [1, 2, 3, 4, 5]
    assert pool.ref_counts == [0, 1, 1, 1, 1, 1]
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_too_few_free_blocks_is_an_error_and_takes_none():
    pool = make_pool()
    with pytest.raises(ValueError, match="No free blocks"):
        pool.get_new_blocks(6)
    assert pool.num_free == 5
    assert not any(check_pool(pool, []))


def test_a_shared_block_is_free_when_its_last_user_leaves():
    pool = make_pool()
    pool.get_new_blocks(3)
    pool.touch([2])
    pool.free_blocks([3, 2, 1])
    assert list(pool.free_queue) == [4, 5, 3, 1]
    pool.free_blocks([2])
    assert list(pool.free_queue) == [4, 5, 3, 1, 2]


def test_touch_takes_a_cached_block_out_of_the_free_queue():
    pool = make_pool()
    pool.get_new_blocks(2)
    pool.cache_full_block(1, b"one")
    pool.free_blocks([2, 1])
    assert pool.num_evictable([1, 2, NULL_BLOCK]) == 2
    pool.touch([1])
    assert list(pool.free_queue) == [3, 4, 5, 2]
    assert pool.ref_counts[1] == 1
    assert pool.index.get(b"one") == 1
    assert pool.num_evictable([1, 2]) == 1


def test_evict_first_blocks_are_findable_until_overwritten():
    pool = make_pool()
    blocks = pool.get_new_blocks(5)
    for block in blocks:
        pool.cache_full_block(block, bytes([block]))
    pool.free_blocks([2, 1])
    pool.free_blocks([5, 4])
    pool.evict_first([3, 4, 5])  # 3 is in use
    assert list(pool.free_queue) == [5, 4, 2, 1]
    assert pool.index.get(bytes([5])) == 5
    assert not any(check_pool(pool, [[3]]))


def test_nothing_is_evicted_early_while_empty_blocks_are_free():
    pool = make_pool()
    pool.get_new_blocks(3)
    for block in (1, 2, 3):
        pool.cache_full_block(block, bytes([block]))
    pool.free_blocks([3, 2, 1])
    pool.evict_first([1, 2])
    assert list(pool.free_queue) == [4, 5, 3, 2, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_reused_block_loses_its_hash(count):
    pool = make_pool(3)
    pool.get_new_blocks(2)
    pool.cache_full_block(1, b"one")
    pool.cache_full_block(2, b"two")
    pool.free_blocks([1, 2])
    assert pool.get_new_blocks(count) == [1, 2][:count]
    assert pool.index.get(b"one") is None
    assert pool.hashes[1] is None
    assert len(pool.index) == 2 - count


def test_of_two_blocks_with_the_same_content_one_survives_the_other():
    pool = make_pool(3)
    pool.get_new_blocks(2)
    pool.cache_full_block(1, b"same")
    pool.cache_full_block(2, b"same")
    assert pool.index.get(b"same") == 1
    pool.free_blocks([1, 2])
    pool.get_new_blocks(1)
    assert pool.index.get(b"same") == 2
    pool.get_new_blocks(1)
    assert len(pool.index) == 0


def test_a_block_is_cached_once():
    pool = make_pool()
    pool.get_new_blocks(1)
    pool.cache_full_block(1, b"one")
    with pytest.raises(AssertionError, match="has a hash already"):
        pool.cache_full_block(1, b"one")


def test_freeing_an_unreferenced_block_is_caught():
    pool = make_pool()
    with pytest.raises(AssertionError, match="block 3 is freed but not referenced"):
        pool.free_blocks([3])


def test_the_null_block_is_neither_counted_nor_freed_nor_cached():
    pool = make_pool()
    pool.touch([NULL_BLOCK])
    pool.free_blocks([NULL_BLOCK, NULL_BLOCK])
    assert pool.ref_counts[NULL_BLOCK] == 0
    assert pool.num_free == 5
    with pytest.raises(AssertionError, match="null block"):
        pool.cache_full_block(NULL_BLOCK, b"nothing")
    assert not any(check_pool(pool, []))


def test_the_cache_is_reset_only_when_nothing_is_in_use():
    pool = make_pool()
    pool.get_new_blocks(2)
    pool.cache_full_block(1, b"one")
    pool.cache_full_block(2, b"two")
    pool.free_blocks([2])
    assert not pool.reset_prefix_cache()
    assert len(pool.index) == 2
    pool.free_blocks([1])
    assert pool.reset_prefix_cache()
    assert len(pool.index) == 0
    assert set(pool.hashes) == {None}
    assert not any(check_pool(pool, []))
