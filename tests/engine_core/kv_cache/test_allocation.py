"""Allocation and release of blocks by the KV cache manager: number, choice and order.

Blocks of 16 tokens and ten usable blocks unless a test says otherwise.
"""

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_NEW_BLOCKS
from tests.fakes.kv_requests import COMMON


def test_blocks_come_back_last_first_and_shared_ones_with_the_last_user(kv):
    first = kv.requests.make([*COMMON, *[3] * 7])
    second = kv.requests.make([*COMMON, *[4] * 5])
    kv.requests.schedule(first)
    kv.requests.schedule(second)
    kv.manager.free(first)
    kv.manager.free(second)
    assert kv.free_order() == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]

    third = kv.requests.make([*COMMON, *[5] * 5])
    assert kv.requests.schedule(third) == [6]
    kv.manager.free(third)
    assert kv.free_order() == [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]

    whole_pool = kv.requests.make([99] * 160)
    assert kv.requests.schedule(whole_pool) == [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]
    assert kv.free_order() == []
    # Its ten blocks have ten hashes; the common prefix is evicted.
    assert len(kv.pool.index) == 10
    assert kv.pool.index.get(first.block_hashes[0]) is None


def test_eviction_takes_the_end_of_the_least_recently_freed_request_first(kv):
    first, second = kv.requests.make(range(87)), kv.requests.make(range(1000, 1048))
    kv.requests.schedule(first)
    kv.requests.schedule(second)
    assert kv.manager.num_available_blocks == 1
    kv.manager.free(first)
    kv.manager.free(second)
    assert kv.free_order() == [10, 6, 5, 4, 3, 2, 1, 9, 8, 7]
    third = kv.requests.make(range(35))
    assert kv.requests.computed(third).block_ids == ([1, 2],)
    assert kv.requests.schedule(third) == [10]
    assert kv.manager.num_available_blocks == 7


def test_a_decode_inside_its_block_returns_the_shared_empty_allocation(kv):
    request = kv.requests.make(range(10))
    kv.requests.schedule(request)
    answers = []
    for token in range(6):
        request.all_token_ids.append(token)
        answers.append(kv.manager.allocate_slots(request, 1))
        request.num_computed_tokens += 1
    assert all(answer is NO_NEW_BLOCKS for answer in answers)
    assert kv.manager.allocate_slots(request, 1) == [[2]]
    assert NO_NEW_BLOCKS == []


@pytest.mark.parametrize("small", [2], indirect=True)
def test_hits_are_not_overwritten_by_the_same_allocation(small):
    for text in ("AAAA", "BBBB"):
        request = small.requests.make(text)
        small.requests.schedule(request)
        small.manager.free(request)
    assert small.free_order() == [1, 2]
    request = small.requests.make("AAAA|C")
    assert small.requests.schedule(request) == [2]
    assert small.requests.table(request) == [1, 2]
    assert small.pool.hashes[1] == request.block_hashes[0]
    assert small.pool.hashes[2] is None


@pytest.mark.parametrize("small", [1], indirect=True)
def test_a_cached_block_reused_for_a_part_of_a_block_has_no_hash(small):
    request = small.requests.make("ABCD")
    small.requests.schedule(request)
    small.manager.free(request)
    assert len(small.pool.index) == 1
    assert small.requests.schedule(small.requests.make("XYZ")) == [1]
    assert small.pool.hashes[1] is None
    assert len(small.pool.index) == 0


def test_hits_in_the_free_queue_count_against_free_space(kv):
    first, second = kv.requests.make(COMMON), kv.requests.make(COMMON * 2)
    kv.requests.schedule(first)
    kv.requests.schedule(second)
    kv.manager.free(second)
    kv.requests.schedule(kv.requests.make([77] * 32))
    order, counts = kv.free_order(), list(kv.pool.ref_counts)
    assert len(order) == 5

    third = kv.requests.make(COMMON * 3)
    computed = kv.manager.get_computed_blocks(third)
    assert len(computed.block_ids[0]) == 6
    assert kv.manager.allocate_slots(third, 48, computed) is None
    assert kv.free_order() == order
    assert kv.pool.ref_counts == counts
    assert kv.manager.block_ids(third.seq_id) == [[]]
    assert kv.manager.pop_prefix_cache_stats() == (48 + 96 + 32, 48)
    # One new block less: six hits, three of them free, and two new ones fit.
    assert kv.manager.allocate_slots(third, 32, computed) == [order[:2]]


def test_a_failed_allocation_leaves_the_blocks_of_a_running_request(kv):
    first, second = kv.requests.make(range(80)), kv.requests.make(range(500, 580))
    kv.requests.schedule(first)
    kv.requests.schedule(second)
    hashes = list(kv.pool.hashes)
    assert kv.requests.decode(first, 1) is None
    assert kv.requests.table(first) == [1, 2, 3, 4, 5]
    assert kv.pool.hashes == hashes
    assert integrity.check(kv.manager) == []
    kv.manager.free(second)
    assert kv.requests.schedule(first) == [10]


@pytest.mark.parametrize("small", [10], indirect=True)
@pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(0, 1), (1, 1), (2, 2), (4, 2), (6, 3)])
def test_lookahead_allocates_beyond_the_new_tokens(small, num_lookahead, num_blocks):
    request = small.requests.make("ABC")
    new_blocks = small.manager.allocate_slots(request, 3, num_lookahead_tokens=num_lookahead)
    assert new_blocks == [list(range(1, num_blocks + 1))]


@pytest.mark.parametrize("small", [10], indirect=True)
def test_lookahead_of_a_decode_may_need_the_next_block(small):
    request = small.requests.make("ABCDE")
    small.requests.schedule(request)
    request.all_token_ids.append(70)
    assert small.manager.allocate_slots(request, 1, num_lookahead_tokens=2) is NO_NEW_BLOCKS
    assert small.manager.allocate_slots(request, 1, num_lookahead_tokens=3) == [[3]]


def test_freeing_twice_or_before_any_allocation_changes_nothing(kv):
    request = kv.requests.make(range(40))
    kv.manager.free(request)
    kv.requests.schedule(request)
    kv.manager.free(request)
    order = kv.free_order()
    kv.manager.free(request)
    assert kv.free_order() == order
    assert kv.manager.block_ids(request.seq_id) == [[]]


def test_block_ids_are_a_copy(kv):
    request = kv.requests.make(range(40))
    kv.requests.schedule(request)
    kv.manager.block_ids(request.seq_id)[0].append(99)
    assert kv.requests.table(request) == [1, 2, 3]


def test_capacity_equals_the_usable_blocks(kv):
    kv.requests.schedule(kv.requests.make(range(100)))
    assert kv.manager.max_blocks(160) <= kv.manager.num_usable_blocks
    assert kv.manager.max_blocks(161) > kv.manager.num_usable_blocks
