"""The KV cache manager: hits, allocation, caching, freeing, statistics.

Blocks of 16 tokens and ten usable blocks unless a test says otherwise.
"""

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NOTHING_COMPUTED, KVCacheManager
from tests.fakes.kv_requests import Requests, make_manager

COMMON = [token for block in range(3) for token in [block] * 16]
"""Three full blocks that requests share."""


class Setup:
    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pool = manager.pool
        self.requests = Requests(manager)

    def free_order(self) -> list[int]:
        return list(self.pool.free_queue)


@pytest.fixture
def kv():
    """Ten usable blocks of 16 tokens; checked for integrity after the test."""
    setup = Setup(make_manager(11))
    yield setup
    assert integrity.check(setup.manager) == []


@pytest.fixture
def small(request):
    """Blocks of 4 tokens; the number of usable ones is the parameter."""
    setup = Setup(make_manager(request.param + 1, block_size=4))
    yield setup
    assert integrity.check(setup.manager) == []


def test_a_cold_request_gets_new_blocks_and_its_full_ones_are_cached(kv):
    request = kv.requests.make([*COMMON, *[3] * 7])
    assert kv.manager.get_computed_blocks(request) is NOTHING_COMPUTED
    assert kv.requests.schedule(request) == [1, 2, 3, 4]
    assert kv.pool.hashes[1:5] == [*request.block_hashes, None]
    assert len(request.block_hashes) == 3
    assert kv.pool.ref_counts[1:5] == [1, 1, 1, 1]


def test_a_second_request_shares_the_common_blocks(kv):
    kv.requests.schedule(kv.requests.make([*COMMON, *[3] * 7]))
    request = kv.requests.make([*COMMON, *[4] * 5])
    computed = kv.manager.get_computed_blocks(request)
    assert (computed.block_ids, computed.num_tokens) == (([1, 2, 3],), 48)
    assert kv.requests.schedule(request) == [5]
    assert kv.requests.table(request) == [1, 2, 3, 5]
    assert kv.pool.ref_counts[1:6] == [2, 2, 2, 1, 1]
    assert kv.manager.num_free_blocks == 5
    assert kv.manager.usage == 0.5


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
    # Its ten blocks have ten hashes; nothing of the common prefix is left.
    assert len(kv.pool.index) == 10
    assert kv.pool.index.get(first.block_hashes[0]) is None


def test_eviction_takes_the_end_of_the_least_recently_freed_request_first(kv):
    first, second = kv.requests.make(range(87)), kv.requests.make(range(1000, 1048))
    kv.requests.schedule(first)
    kv.requests.schedule(second)
    assert kv.manager.num_free_blocks == 1
    kv.manager.free(first)
    kv.manager.free(second)
    assert kv.free_order() == [10, 6, 5, 4, 3, 2, 1, 9, 8, 7]
    third = kv.requests.make(range(35))
    assert kv.requests.computed(third).block_ids == ([1, 2],)
    assert kv.requests.schedule(third) == [10]
    assert kv.manager.num_free_blocks == 7


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48)]
)
def test_the_last_token_is_always_computed(kv, num_tokens, num_hit):
    kv.requests.schedule(kv.requests.make(range(60)))
    request = kv.requests.make(range(num_tokens))
    assert kv.manager.get_computed_blocks(request).num_tokens == num_hit


def test_a_recomputed_last_block_is_a_duplicate_and_the_first_copy_is_found(kv):
    kv.requests.schedule(kv.requests.make(COMMON))
    second = kv.requests.make(COMMON)
    assert kv.requests.schedule(second) == [4]
    assert kv.pool.hashes[4] == kv.pool.hashes[3]
    third = kv.requests.make([*COMMON, 7])
    assert kv.requests.computed(third).block_ids == ([1, 2, 3],)


def test_prompt_logprobs_skip_reading_but_not_writing(kv):
    first = kv.requests.make([*COMMON, 9])
    kv.requests.schedule(first)
    asking = kv.requests.make([*COMMON, 9], prompt_logprobs=0)
    assert kv.manager.get_computed_blocks(asking) is NOTHING_COMPUTED
    assert kv.requests.schedule(asking) == [5, 6, 7, 8]
    assert kv.pool.hashes[5:8] == kv.pool.hashes[1:4]
    assert set(kv.pool.ref_counts[1:9]) == {1}
    assert kv.requests.computed(kv.requests.make([*COMMON, 9])).num_tokens == 48
    assert kv.manager.take_prefix_cache_stats() == (49, 0)


def test_a_salt_separates_prefixes(kv):
    salted = kv.requests.make([*COMMON, 9], cache_salt="one")
    kv.requests.schedule(salted)
    assert kv.requests.computed(kv.requests.make([*COMMON, 8], cache_salt="one")).num_tokens == 48
    assert kv.requests.computed(kv.requests.make([*COMMON, 8], cache_salt="two")).num_tokens == 0
    assert kv.requests.computed(kv.requests.make([*COMMON, 8])).num_tokens == 0


def test_decoding_caches_each_block_as_it_fills(kv):
    request = kv.requests.make([*COMMON, *[3] * 7])
    kv.requests.schedule(request)
    for _ in range(8):
        assert kv.requests.decode(request, 8) == []
        assert kv.pool.hashes[4] is None
    assert kv.requests.decode(request, 8) == []
    assert kv.pool.hashes[4] == request.block_hashes[3]
    assert kv.requests.decode(request, 8) == [5]
    longer = kv.requests.make([*request.all_token_ids, 1])
    assert kv.requests.computed(longer).block_ids == ([1, 2, 3, 4],)


def test_a_decode_inside_its_block_gets_the_shared_empty_answer(kv):
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


def test_a_prompt_in_chunks_grows_its_table_and_is_found_only_once_filled(kv):
    request = kv.requests.make(range(60))
    assert kv.requests.schedule(request, 20) == [1, 2]
    twin = kv.requests.make(range(60))
    assert kv.requests.computed(twin).num_tokens == 16
    assert kv.requests.schedule(request, 12) == []
    assert kv.requests.computed(twin).num_tokens == 32
    assert kv.requests.schedule(request, 28) == [3, 4]
    assert kv.requests.computed(twin).num_tokens == 48
    assert kv.requests.table(request) == [1, 2, 3, 4]


@pytest.mark.parametrize("small", [10], indirect=True)
def test_tables_are_append_only_when_a_running_request_meets_a_known_prefix(small):
    """The chunk that completes EFGH keeps its own block; the cached one stays beside it."""
    small.requests.schedule(small.requests.make("ABCD|EFGH|X"))
    request = small.requests.make("ABCD|EFGH|IJ")
    computed = small.manager.get_computed_blocks(request)
    hit_one = type(computed)(([computed.block_ids[0][0]],), 4)
    assert small.manager.allocate_slots(request, 2, hit_one) == [[4]]
    request.num_computed_tokens = 6
    assert small.requests.schedule(request) == [5]
    assert small.requests.table(request) == [1, 4, 5]
    assert small.pool.hashes[4] == small.pool.hashes[2]


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
    assert kv.manager.block_ids(third.handle) == [[]]
    assert kv.manager.take_prefix_cache_stats() == (48 + 96 + 32, 48)
    # One new block less: six hits, three of them free, and two new ones fit.
    assert kv.manager.allocate_slots(third, 32, computed) == [order[:2]]


def test_a_running_request_that_does_not_fit_keeps_what_it_has(kv):
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


def test_a_preempted_request_finds_its_own_blocks_again(kv):
    request = kv.requests.make(range(40))
    kv.requests.schedule(request)
    kv.requests.decode(request, 7)
    kv.manager.free(request)
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    assert kv.requests.computed(request).block_ids == ([1, 2],)
    assert kv.requests.schedule(request) == [4]
    assert kv.requests.table(request) == [1, 2, 4]
    assert kv.manager.take_prefix_cache_stats() == (40, 0)


@pytest.mark.parametrize("small", [10], indirect=True)
@pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(0, 1), (1, 1), (2, 2), (4, 2), (6, 3)])
def test_lookahead_takes_room_beyond_the_new_tokens(small, num_lookahead, num_blocks):
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


@pytest.mark.parametrize("small", [10], indirect=True)
def test_only_verified_tokens_are_cached(small):
    request = small.requests.make("ABCDE")
    assert small.manager.allocate_slots(request, 8) == [[1, 2]]
    assert small.pool.hashes[1] is not None
    assert small.pool.hashes[2] is None
    # Two of the three drafts were rejected, then the block fills with verified tokens.
    request.num_computed_tokens = 6
    request.all_token_ids += [70, 71]
    assert small.manager.allocate_slots(request, 1) is NO_NEW_BLOCKS
    request.num_computed_tokens = 7
    request.all_token_ids.append(72)
    assert small.manager.allocate_slots(request, 1) is NO_NEW_BLOCKS
    assert small.pool.hashes[2] == request.block_hashes[1]


def test_freeing_twice_or_before_any_allocation_changes_nothing(kv):
    request = kv.requests.make(range(40))
    kv.manager.free(request)
    kv.requests.schedule(request)
    kv.manager.free(request)
    order = kv.free_order()
    kv.manager.free(request)
    assert kv.free_order() == order
    assert kv.manager.block_ids(request.handle) == [[]]


def test_block_ids_are_a_copy(kv):
    request = kv.requests.make(range(40))
    kv.requests.schedule(request)
    kv.manager.block_ids(request.handle)[0].append(99)
    assert kv.requests.table(request) == [1, 2, 3]


def test_the_prefix_cache_is_reset_only_when_idle(kv):
    request = kv.requests.make(range(40))
    kv.requests.schedule(request)
    assert not kv.manager.reset_prefix_cache()
    assert len(kv.pool.index) == 2
    kv.manager.free(request)
    assert kv.manager.reset_prefix_cache()
    assert kv.requests.computed(kv.requests.make(range(40))) is NOTHING_COMPUTED


def test_statistics_count_admitted_requests_in_tokens_as_deltas(kv):
    assert kv.manager.take_prefix_cache_stats() == (0, 0)
    kv.requests.schedule(kv.requests.make(range(40)))
    request = kv.requests.make(range(50))
    for _ in range(3):
        kv.manager.get_computed_blocks(request)
    kv.requests.schedule(request)
    assert kv.manager.take_prefix_cache_stats() == (90, 32)
    assert kv.manager.take_prefix_cache_stats() == (0, 0)


def test_without_caching_nothing_is_hashed_found_or_counted():
    setup = Setup(make_manager(11, enable_caching=False))
    first, second = setup.requests.make(range(40)), setup.requests.make(range(40))
    assert setup.requests.schedule(first) == [1, 2, 3]
    assert setup.requests.computed(second) is NOTHING_COMPUTED
    assert setup.requests.schedule(second) == [4, 5, 6]
    for _ in range(8):
        assert setup.requests.decode(first, 1) == []
    assert setup.requests.decode(first, 1) == [7]
    assert first.block_hashes == []
    assert set(setup.pool.hashes) == {None}
    assert setup.manager.take_prefix_cache_stats() == (0, 0)
    assert integrity.check(setup.manager) == []


def test_what_fits_is_what_the_usable_blocks_hold(kv):
    kv.requests.schedule(kv.requests.make(range(100)))
    assert kv.manager.most_blocks(160) <= kv.manager.num_usable_blocks
    assert kv.manager.most_blocks(161) > kv.manager.num_usable_blocks


def test_blocks_that_change_hands_stay_where_they_are(kv):
    request = kv.requests.make([*COMMON, *[3] * 7])
    kv.requests.schedule(request)
    free = kv.free_order()
    heir = kv.requests.make([*COMMON, *[3] * 7, *[5] * 10])
    heir.num_computed_tokens = 55
    kv.manager.hand_over(request, heir, 55)
    assert kv.requests.table(request) == []
    assert kv.requests.table(heir) == [1, 2, 3, 4]
    assert kv.free_order() == free
    assert kv.manager.get_computed_blocks(heir) is NOTHING_COMPUTED, "it has its own"
    assert kv.requests.schedule(heir) == [5]
    assert kv.pool.hashes[1:5] == heir.block_hashes
    kv.manager.free(request)
    assert kv.requests.table(heir) == [1, 2, 3, 4, 5]
    kv.manager.free(heir)
    assert kv.manager.usage == 0


def test_what_an_heir_will_overwrite_is_not_found_any_more(kv):
    """The heir goes on after 47 tokens, within the third block."""
    request = kv.requests.make([*COMMON, 3])
    kv.requests.schedule(request)
    heir = kv.requests.make([*COMMON[:47], 9, 9])
    heir.num_computed_tokens = 47
    kv.manager.hand_over(request, heir, 47)
    found = kv.manager.get_computed_blocks(kv.requests.make([*COMMON, 4]))
    assert found.block_ids == ([1, 2],)
    kv.requests.schedule(heir)
    assert kv.manager.get_computed_blocks(kv.requests.make([*COMMON, 4])).num_tokens == 32


def test_without_blocks_there_is_nothing_to_hand_over(kv):
    request, heir = kv.requests.make([1, 2]), kv.requests.make([1, 2, 3])
    kv.manager.hand_over(request, heir, 2)
    assert kv.requests.table(heir) == []
    assert kv.requests.schedule(heir) == [1]
