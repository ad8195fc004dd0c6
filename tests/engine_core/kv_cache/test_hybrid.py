"""Several KV groups: allocation, common prefix hits, and freed blocks."""

import pytest

from engine_core.block_hashing import GroupKeys
from engine_core.kv_cache import integrity
from engine_core.kv_cache.groups import FullAttentionGroup, SlidingWindowGroup
from engine_core.kv_cache.manager import NO_NEW_BLOCKS, NO_PREFIX, KVCacheManager
from engine_core.kv_cache.pool import BlockPool
from engine_core.request import Request
from proto.messages.lifecycle import KVGroup
from tests.fakes.kv_requests import Requests, make_manager

COMMON = [token for block in range(3) for token in [block] * 16]
"""Three full blocks that requests share."""


class Setup:
    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pool = manager.pool
        self.requests = Requests(manager)

    def run(self, tokens) -> Request:
        """Add a request that is computed in one step."""
        request = self.requests.make(tokens)
        assert self.requests.schedule_groups(request) is not None
        return request

    def hit(self, tokens) -> tuple[list[int], ...]:
        return self.manager.get_computed_blocks(self.requests.make(tokens)).block_ids

    def drop(self, group: int, request: Request, index: int) -> None:
        """Remove one block of a request from the index."""
        self.pool.uncache([self.manager.block_ids(request.seq_id)[group][index]])


@pytest.fixture
def setup():
    """Create managers, and check their integrity after the test."""
    made = []

    def make(num_blocks: int, *windows: int | None, block_size: int = 16) -> Setup:
        made.append(Setup(make_manager(num_blocks, block_size, windows=windows)))
        return made[-1]

    yield make
    for each in made:
        assert integrity.check(each.manager) == []


def test_groups_are_given_blocks_one_after_another(setup):
    """HY-01, HY-02."""
    kv = setup(21, None, 32, 32)
    first = kv.run([*COMMON, *[3] * 7])
    assert kv.manager.block_ids(first.seq_id) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]

    second = kv.requests.make([*COMMON, *[4] * 5])
    computed = kv.manager.get_computed_blocks(second)
    assert (computed.block_ids, computed.num_tokens) == (([1, 2, 3], [0, 6, 7], [0, 10, 11]), 48)
    assert kv.requests.schedule_groups(second) == [[13], [14], [15]]
    assert [kv.pool.ref_counts[block] for block in (1, 2, 3, 6, 7, 10, 11)] == [2] * 7
    assert [kv.pool.ref_counts[block] for block in (0, 5, 9)] == [0, 1, 1]
    assert kv.manager.pop_prefix_cache_stats() == (55 + 53, 48)


FULL, SMALL, LARGE = None, 32, 64


@pytest.mark.parametrize(
    "windows",
    [
        (FULL, SMALL),
        (SMALL, FULL),
        (FULL, LARGE),
        (FULL, SMALL, SMALL),
        (FULL, SMALL, LARGE),
        (FULL, LARGE, SMALL),
        (SMALL, FULL, LARGE),
        (FULL, FULL, SMALL),
        (SMALL, FULL, FULL),
        (FULL, SMALL, FULL, LARGE),
        (SMALL, LARGE),
        (SMALL, SMALL),
        (LARGE, SMALL, SMALL, LARGE),
        (FULL, FULL),
        (SMALL, LARGE, FULL, FULL),
    ],
)
def test_every_mixture_of_groups_finds_the_whole_common_prefix(setup, windows):
    """HY-06."""
    kv = setup(41, *windows)
    first = kv.run([*COMMON, *[3] * 7])
    tables = kv.manager.block_ids(first.seq_id)
    second = kv.requests.make([*COMMON, *[4] * 5])
    computed = kv.manager.get_computed_blocks(second)
    assert computed.num_tokens == 48
    for table, window, hits in zip(tables, windows, computed.block_ids, strict=True):
        num_null = 1 if window == SMALL else 0
        assert hits == [0] * num_null + table[num_null:3]
    assert kv.requests.schedule_groups(second) is not None


def test_a_hit_ends_where_any_group_lost_a_block(setup):
    """HY-05, without drafts: a window of three blocks, six full blocks."""
    tokens = [*range(96), 500]

    def hit_after(*dropped: tuple[int, int]) -> int:
        kv = setup(31, None, 48, 48)
        first = kv.run([*range(96), *range(900, 907)])
        for group, index in dropped:
            kv.drop(group, first, index)
        hits = kv.hit(tokens)
        return len(hits[0]) if hits else 0

    assert hit_after() == 6
    assert hit_after((1, 0)) == 6  # outside the window
    assert hit_after((0, 0)) == 0
    assert hit_after((0, 5)) == 5
    assert hit_after((1, 5)) == 5
    assert hit_after((1, 4)) == 4
    # Without block 1 a window may end where blocks 2, 3, 4 do, or before it.
    assert hit_after((0, 5), (1, 1)) == 5
    assert hit_after((0, 4), (1, 1)) == 1
    # Each group accepts prefixes that the other one refuses, down to the first block.
    assert hit_after((0, 5), (1, 2), (2, 1)) == 1
    assert hit_after((1, 3), (2, 0)) == 0


def test_a_lowered_hit_is_searched_again_by_the_group_that_accepted_more(setup):
    """Group 1 accepts all six blocks, group 2 three; group 1 then finds others for three."""
    kv = setup(41, None, 32, 32)
    first = kv.run([*range(96), 7])
    tables = kv.manager.block_ids(first.seq_id)
    kv.drop(2, first, 5)
    kv.drop(2, first, 3)
    computed = kv.hit([*range(96), 8])
    assert computed == (
        tables[0][:3],
        [0, *tables[1][1:3]],
        [0, *tables[2][1:3]],
    )


def test_blocks_outside_the_window_are_freed_last_first(setup):
    """ST-03: a window of four tokens, blocks of two."""
    kv = setup(21, 4, block_size=2)
    request = kv.run(range(4))
    (group,) = kv.manager.groups
    passed = {4: 0, 5: 1, 6: 1, 7: 2}
    for num_computed, num_null in passed.items():
        assert request.num_computed_tokens == num_computed
        assert kv.requests.decode(request, 9) is not None
        assert kv.requests.table(request)[: num_null + 1].count(0) == num_null
    group.remove_skipped_blocks(request.seq_id, 8)
    held = kv.requests.table(request)[2:4]
    kv.requests.schedule(kv.requests.make([5]))
    request.all_token_ids += [9, 9, 9]
    assert kv.requests.schedule(request, 3) is not None
    assert request.num_computed_tokens == 11
    assert kv.requests.decode(request, 9) is not None
    assert kv.requests.table(request)[:4] == [0, 0, 0, 0]
    assert list(kv.pool.free_queue)[-2:] == held[::-1]


def test_blocks_outside_the_window_are_freed_before_free_blocks_are_counted(setup):
    """Three blocks for a window of two: each new block is the one that was just freed."""
    kv = setup(4, 4, block_size=2)
    request = kv.run(range(5))
    assert kv.manager.num_available_blocks == 0
    for step in range(20):
        assert kv.requests.decode(request, step) is not None
        assert kv.manager.num_available_blocks <= 1
    assert sum(1 for block in kv.requests.table(request) if block) <= 3


def test_a_failed_allocation_frees_only_blocks_outside_the_window(setup):
    kv = setup(8, None, 4, block_size=2)
    request = kv.run(range(6))
    request.all_token_ids += range(9)
    before = kv.manager.block_ids(request.seq_id)
    assert kv.manager.num_blocks_needed(request, 9) == 5 + 5
    assert kv.manager.allocate_slots(request, 9) is None
    assert kv.manager.block_ids(request.seq_id) == [before[0], [0, *before[1][1:]]]
    assert kv.manager.num_available_blocks == 2


def test_a_passed_block_can_be_found_until_it_is_overwritten(setup):
    kv = setup(30, 4, block_size=2)
    request = kv.run(range(12))
    kv.requests.decode(request, 99)
    assert kv.requests.table(request)[:4] == [0] * 4
    hits = kv.hit([*range(6), 50])
    assert hits == ([0, 2, 3],)
    assert kv.pool.ref_counts[2] == 0


@pytest.mark.parametrize(
    ("cached", "num_hit"),
    [
        ("", 0),
        ("F", 0),
        ("FFFF", 0),
        ("T", 1),
        ("TF", 1),
        ("TT", 2),
        ("TTF", 2),
        ("TTT", 3),
        ("TTTF", 3),
        ("TTFTFFTTFTTT", 12),
        ("TTFTFFTTFFF", 8),
        ("TTFTFFTTFFFT", 8),
    ],
)
def test_window_search(cached, num_hit):
    """ST-02: a window of two blocks; all but the last two of a hit are null."""
    pool = BlockPool(20, enable_caching=True)
    group = SlidingWindowGroup(pool, GroupKeys(0, 2), KVGroup(4))
    hashes = [bytes([index]) * 32 for index in range(len(cached))]
    pool.get_new_blocks(len(cached))
    for index, flag in enumerate(cached):
        if flag == "T":
            pool.cache_full_block(index + 1, hashes[index])
    wanted = [0] * (num_hit - 2) + list(range(max(1, num_hit - 1), num_hit + 1))
    assert group.find_longest_hit(hashes, len(cached) * 2) == wanted
    assert group.find_longest_hit(hashes, len(cached) * 2 + 1) == wanted


@pytest.mark.parametrize(("window", "num_seen"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_a_hit_needs_what_the_next_token_sees(setup, window, num_seen):
    """The next token attends to window - 1 tokens of the hit."""
    kv = setup(30, window, block_size=2)
    kv.run(range(12))
    (hits,) = kv.hit([*range(10), 50])
    assert len(hits) == 5
    assert sum(1 for block in hits if block) == num_seen


@pytest.mark.parametrize("window", [None, 8])
def test_cached_blocks_in_the_free_queue_count_as_needed(window):
    """ST-05, ST-06: 20 blocks of tokens, hits without references."""
    pool = BlockPool(40, enable_caching=True)
    keys = GroupKeys(0, 2)
    group = (
        FullAttentionGroup(pool, keys, KVGroup())
        if window is None
        else SlidingWindowGroup(pool, keys, KVGroup(8))
    )
    free = list(range(1, 11))

    def num_needed(num_tokens: int, hits: list[int]) -> int:
        return group.num_new_blocks(7, num_tokens, len(hits)) + pool.num_evictable(hits)

    assert num_needed(40, free) == 20
    assert num_needed(40, [0] * 5 + free[:5]) == 15
    held = pool.get_new_blocks(1)
    assert num_needed(4, held) == 1
    pool.cache_full_block(1, b"x")
    pool.free_blocks(held)
    assert num_needed(4, held) == 2
    group.attach_blocks(7, held)
    assert num_needed(4, []) == 1
    assert len(group.allocate_blocks(7, 4)) == 1
    assert len(group.block_table(7)) == 2


def test_predicted_and_allocated_block_counts_agree():
    """ST-07."""
    pool = BlockPool(40, enable_caching=True)
    group = SlidingWindowGroup(pool, GroupKeys(0, 2), KVGroup(8))
    group.attach_blocks(1, ())
    for num_tokens in (4, 8, 12, 16):
        predicted = group.num_new_blocks(1, num_tokens, 0)
        assert len(group.allocate_blocks(1, num_tokens)) == predicted == 2


def test_groups_are_separate_keys(setup):
    """BP-03: the same hash means other content in another group."""
    kv = setup(11, None, None)
    request = kv.requests.make([*COMMON, 9])
    kv.requests.schedule_groups(request)
    assert len(kv.pool.index) == 6
    kv.drop(0, request, 2)
    assert len(kv.pool.index) == 5
    assert kv.hit([*COMMON, 8]) == ([1, 2], [5, 6])


def test_windows_are_freed_without_prefix_caching():
    manager = make_manager(8, 2, enable_caching=False, windows=(4, 4))
    requests = Requests(manager)
    request = requests.make(range(3))
    assert requests.schedule_groups(request) == [[1, 2], [3, 4]]
    for step in range(30):
        assert requests.decode(request, step) is not None
    assert manager.num_available_blocks >= 1
    assert manager.get_computed_blocks(requests.make(range(3))) is NO_PREFIX
    manager.free(request)
    assert manager.usage == 0
    assert integrity.check(manager) == []


def test_a_decode_inside_its_blocks_is_still_one_comparison(setup):
    kv = setup(60, None, 48, 48)
    request = kv.run(range(100))
    answers = []
    for step in range(64):
        request.all_token_ids.append(step)
        answers.append(kv.manager.allocate_slots(request, 1))
        request.num_computed_tokens += 1
    assert sum(1 for answer in answers if answer is not NO_NEW_BLOCKS) == 4
    assert all(answer is NO_NEW_BLOCKS or len(answer) == 3 for answer in answers)


def test_drafts_may_pass_a_block_before_it_was_cached(setup):
    """Accepted drafts fill a block whose tokens were not verified when it was written."""
    kv = setup(20, 1, block_size=2)
    request = kv.run(range(3))
    assert kv.manager.allocate_slots(request, 3) is not None
    request.all_token_ids += [3, 4, 5]
    request.num_computed_tokens = 6
    request.all_token_ids.append(6)
    assert kv.manager.allocate_slots(request, 1) is not None
    assert kv.requests.table(request)[:3] == [0, 0, 0]
    # Only the block that was verified in time is in the index.
    assert len(kv.pool.index) == 1


def test_blocks_of_a_failed_request_are_not_findable(setup):
    kv = setup(41, None, 32)
    first = kv.run([*COMMON, 9])
    sharing = kv.run([*COMMON, 8])
    kv.manager.uncache_after(first, 16)
    assert len(kv.hit([*COMMON, 7])[0]) == 1
    # A request that hit them keeps them, and does not register them again.
    kv.requests.decode(sharing, 7)
    assert len(kv.hit([*COMMON, 7])[0]) == 1
    kv.requests.decode(first, 7)
    assert len(kv.hit([*COMMON, 7])[0]) == 1
    kv.manager.uncache_after(first, 0)
    assert kv.hit([*COMMON, 7]) == ()
    kv.manager.free(first)
    kv.manager.uncache_after(first, 0)


def test_the_most_blocks_of_a_request_are_not_those_of_all_its_tokens():
    manager = make_manager(100, 2, windows=(None, 4), longest_chunk=4)
    request = Requests(manager).make(range(40))
    assert manager.num_blocks_needed(request, 40) == 40
    assert manager.max_blocks(40) == 20 + 4
    assert manager.max_blocks(40) <= manager.num_usable_blocks
