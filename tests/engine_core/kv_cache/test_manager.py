"""The KV cache manager: caching, hits, transfer of blocks, statistics.

Blocks of 16 tokens and ten usable blocks unless a test says otherwise.
"""

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NO_PREFIX
from tests.fakes.kv_requests import COMMON, Setup, make_manager


def test_a_cold_request_gets_new_blocks_and_its_full_ones_are_cached(kv):
    request = kv.requests.make([*COMMON, *[3] * 7])
    assert kv.manager.get_computed_blocks(request) is NO_PREFIX
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
    assert kv.manager.num_available_blocks == 5
    assert kv.manager.usage == 0.5


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


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_prompt_logprobs_and_clients_skip_reading_but_not_writing(kv, asked):
    first = kv.requests.make([*COMMON, 9])
    kv.requests.schedule(first)
    asking = kv.requests.make([*COMMON, 9], **asked)
    assert kv.manager.get_computed_blocks(asking) is NO_PREFIX
    assert kv.requests.schedule(asking) == [5, 6, 7, 8]
    assert kv.pool.hashes[5:8] == kv.pool.hashes[1:4]
    assert set(kv.pool.ref_counts[1:9]) == {1}
    assert kv.requests.computed(kv.requests.make([*COMMON, 9])).num_tokens == 48
    assert kv.manager.pop_prefix_cache_stats() == (49, 0)


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
    """The chunk that completes EFGH keeps its own block; the cached duplicate stays."""
    small.requests.schedule(small.requests.make("ABCD|EFGH|X"))
    request = small.requests.make("ABCD|EFGH|IJ")
    computed = small.manager.get_computed_blocks(request)
    hit_one = type(computed)(([computed.block_ids[0][0]],), 4)
    assert small.manager.allocate_slots(request, 2, hit_one) == [[4]]
    request.num_computed_tokens = 6
    assert small.requests.schedule(request) == [5]
    assert small.requests.table(request) == [1, 4, 5]
    assert small.pool.hashes[4] == small.pool.hashes[2]


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
    assert kv.manager.pop_prefix_cache_stats() == (40, 0)


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


def test_the_prefix_cache_is_reset_only_when_idle(kv):
    request = kv.requests.make(range(40))
    kv.requests.schedule(request)
    assert not kv.manager.reset_prefix_cache()
    assert len(kv.pool.index) == 2
    kv.manager.free(request)
    assert kv.manager.reset_prefix_cache()
    assert kv.requests.computed(kv.requests.make(range(40))) is NO_PREFIX


def test_statistics_count_admitted_requests_in_tokens_as_deltas(kv):
    assert kv.manager.pop_prefix_cache_stats() == (0, 0)
    kv.requests.schedule(kv.requests.make(range(40)))
    request = kv.requests.make(range(50))
    for _ in range(3):
        kv.manager.get_computed_blocks(request)
    kv.requests.schedule(request)
    assert kv.manager.pop_prefix_cache_stats() == (90, 32)
    assert kv.manager.pop_prefix_cache_stats() == (0, 0)


def test_without_caching_nothing_is_hashed_found_or_counted():
    setup = Setup(make_manager(11, enable_caching=False))
    first, second = setup.requests.make(range(40)), setup.requests.make(range(40))
    assert setup.requests.schedule(first) == [1, 2, 3]
    assert setup.requests.computed(second) is NO_PREFIX
    assert setup.requests.schedule(second) == [4, 5, 6]
    for _ in range(8):
        assert setup.requests.decode(first, 1) == []
    assert setup.requests.decode(first, 1) == [7]
    assert first.block_hashes == []
    assert set(setup.pool.hashes) == {None}
    assert setup.manager.pop_prefix_cache_stats() == (0, 0)
    assert integrity.check(setup.manager) == []


def test_handed_over_blocks_keep_their_place(kv):
    request = kv.requests.make([*COMMON, *[3] * 7])
    kv.requests.schedule(request)
    free = kv.free_order()
    heir = kv.requests.make([*COMMON, *[3] * 7, *[5] * 10])
    heir.num_computed_tokens = 55
    kv.manager.hand_over_blocks(request, heir, 55)
    assert kv.requests.table(request) == []
    assert kv.requests.table(heir) == [1, 2, 3, 4]
    assert kv.free_order() == free
    assert kv.manager.get_computed_blocks(heir) is NO_PREFIX, "the request has its own block"
    assert kv.requests.schedule(heir) == [5]
    assert kv.pool.hashes[1:5] == heir.block_hashes
    kv.manager.free(request)
    assert kv.requests.table(heir) == [1, 2, 3, 4, 5]
    kv.manager.free(heir)
    assert kv.manager.usage == 0


def test_blocks_the_successor_will_overwrite_are_not_findable(kv):
    """The new request continues after 47 tokens, inside the third block."""
    request = kv.requests.make([*COMMON, 3])
    kv.requests.schedule(request)
    heir = kv.requests.make([*COMMON[:47], 9, 9])
    heir.num_computed_tokens = 47
    kv.manager.hand_over_blocks(request, heir, 47)
    found = kv.manager.get_computed_blocks(kv.requests.make([*COMMON, 4]))
    assert found.block_ids == ([1, 2],)
    kv.requests.schedule(heir)
    assert kv.manager.get_computed_blocks(kv.requests.make([*COMMON, 4])).num_tokens == 32


def test_without_blocks_there_is_nothing_to_hand_over(kv):
    request, heir = kv.requests.make([1, 2]), kv.requests.make([1, 2, 3])
    kv.manager.hand_over_blocks(request, heir, 2)
    assert kv.requests.table(heir) == []
    assert kv.requests.schedule(heir) == [1]
