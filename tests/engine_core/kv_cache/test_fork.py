"""Forks of a sequence: shared blocks and copied blocks."""

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.manager import NO_PREFIX, KVCacheManager
from engine_core.request import Request
from tests.fakes.kv_requests import Requests, make_manager


class Setup:
    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pool = manager.pool
        self.requests = Requests(manager)

    def run(self, tokens: list[int]) -> Request:
        """Add a request that is computed in one step."""
        request = self.requests.make(tokens)
        assert self.requests.schedule_groups(request) is not None
        return request

    def fork(self, source: Request, num_tokens: int, tokens: list[int]) -> Request:
        """Add a request that forks from another one and computes the rest."""
        request = self.requests.make(tokens)
        computed = self.manager.find_fork(source, num_tokens)
        assert computed.num_tokens == num_tokens
        num_new = request.num_tokens - num_tokens
        assert self.manager.allocate_slots(request, num_new, computed) is not None
        request.num_computed_tokens = request.num_tokens
        return request

    def tables(self, request: Request) -> list[list[int]]:
        return self.manager.block_ids(request.seq_id)


@pytest.fixture
def setup():
    """Create managers, and check their integrity after the test."""
    made = []

    def make(num_blocks: int = 20, *windows: int | None, caching: bool = True) -> Setup:
        manager = make_manager(num_blocks, 4, caching, windows=windows or (None,))
        made.append(Setup(manager))
        return made[-1]

    yield make
    for each in made:
        assert integrity.check(each.manager) == []


TEN = list(range(10))


@pytest.mark.parametrize("caching", [True, False])
def test_full_blocks_are_shared_and_the_last_one_is_copied(setup, caching):
    kv = setup(caching=caching)
    source = kv.run(TEN)
    fork = kv.fork(source, 9, TEN)
    assert kv.tables(source) == [[1, 2, 3]]
    assert kv.tables(fork) == [[1, 2, 4]]
    assert kv.pool.ref_counts[1:5] == [2, 2, 1, 1]
    assert kv.manager.pop_copies()[0] == [3, 4]
    assert kv.manager.pop_copies()[0] == []


def test_tokens_that_end_with_a_block_need_no_copy(setup):
    kv = setup()
    source = kv.run(TEN)
    assert kv.tables(kv.fork(source, 8, TEN)) == [[1, 2, 4]]
    assert kv.manager.pop_copies()[0] == []


def test_a_fork_may_begin_far_behind_its_source(setup):
    kv = setup()
    source = kv.run(list(range(19)))
    assert kv.tables(kv.fork(source, 6, [0, 1, 2, 3, 4, 5, 90])) == [[1, 6]]
    assert kv.manager.pop_copies()[0] == [2, 6]


def test_all_forks_copy_from_the_source(setup):
    kv = setup()
    source = kv.run(TEN)
    for _ in range(3):
        kv.fork(source, 9, TEN)
    assert kv.manager.pop_copies()[0] == [3, 4, 3, 5, 3, 6]
    assert kv.pool.ref_counts[1:7] == [4, 4, 1, 1, 1, 1]
    assert kv.manager.num_usable_blocks - kv.manager.num_available_blocks == 2 + 4


def test_a_fork_of_a_fork_copies_from_the_first_source(setup):
    """In one step, before any block is copied."""
    kv = setup()
    fork = kv.fork(kv.run(TEN), 9, TEN)
    assert kv.tables(kv.fork(fork, 9, TEN)) == [[1, 2, 5]]
    assert kv.manager.pop_copies()[0] == [3, 4, 3, 5]
    kv.fork(fork, 9, TEN)
    assert kv.manager.pop_copies()[0] == [4, 6]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_shared_blocks_are_freed_by_the_last_user(setup, order):
    kv = setup()
    source = kv.run(TEN)
    family = [source, kv.fork(source, 9, TEN), kv.fork(source, 9, TEN)]
    for number, each in enumerate(order, 1):
        assert kv.pool.ref_counts[1] == 4 - number
        kv.manager.free(family[each])
    assert kv.manager.num_available_blocks == kv.manager.num_usable_blocks


def test_a_copied_block_is_findable_only_once_filled(setup):
    kv = setup()
    source = kv.run(TEN)
    kv.fork(source, 9, TEN)
    assert kv.pool.hashes[3] is None
    assert kv.pool.hashes[4] is None
    kv.requests.decode(source, 10)
    kv.requests.decode(source, 11)
    found = kv.manager.get_computed_blocks(kv.requests.make(list(range(20))))
    assert found.block_ids == ([1, 2, 3],)


def test_a_filled_copy_is_findable_after_the_source_is_freed(setup):
    kv = setup()
    source = kv.run(TEN)
    fork = kv.fork(source, 9, [*TEN, 10, 11])
    kv.manager.free(source)
    assert kv.tables(fork) == [[1, 2, 4]]
    found = kv.manager.get_computed_blocks(kv.requests.make(list(range(20))))
    assert found.block_ids == ([1, 2, 4],)


def test_a_fork_without_a_free_block_changes_nothing(setup):
    kv = setup(4)
    source = kv.run(TEN)
    computed = kv.manager.find_fork(source, 9)
    request = kv.requests.make(TEN)
    assert kv.manager.num_blocks_needed(request, 1, computed) == 1
    assert kv.manager.allocate_slots(request, 1, computed) is None
    assert kv.manager.pop_copies()[0] == []
    assert kv.pool.ref_counts == [0, 1, 1, 1]


def test_a_fork_is_neither_looked_up_nor_a_hit(setup):
    kv = setup()
    source = kv.run(TEN)
    kv.fork(source, 8, TEN)
    kv.fork(source, 9, TEN)
    assert kv.manager.pop_prefix_cache_stats() == (10, 0)


@pytest.mark.parametrize("caching", [True, False])
def test_every_group_shares_and_copies_blocks_of_its_own(setup, caching):
    kv = setup(40, None, 9, caching=caching)
    source = kv.run(TEN)
    fork = kv.fork(source, 9, TEN)
    assert kv.tables(source) == [[1, 2, 3], [4, 5, 6]]
    assert kv.tables(fork) == [[1, 2, 7], [4, 5, 8]]
    assert kv.manager.pop_copies()[0] == [3, 7, 6, 8]


def test_a_fork_does_not_hold_what_its_window_has_passed(setup):
    """Token 9 attends to tokens 6 to 9; block 1 (4 to 7) has some of them and block 0 none."""
    kv = setup(40, 4)
    source = kv.run(TEN)
    fork = kv.fork(source, 9, TEN)
    assert kv.tables(source) == [[1, 2, 3]]
    assert kv.tables(fork) == [[0, 2, 4]]
    assert kv.manager.pop_copies()[0] == [3, 4]


def test_what_the_window_of_the_source_has_passed_cannot_be_forked(setup):
    """With 11 computed tokens the window begins at token 8, so block 1 is freed."""
    kv = setup(40, None, 4)
    source = kv.run(TEN)
    for token in (10, 11):
        kv.requests.decode(source, token)
        assert kv.manager.find_fork(source, 9).num_tokens == (9 if token == 10 else 0)
    assert kv.tables(source)[1] == [0, 0, 6]
    assert kv.manager.find_fork(source, 9) is NO_PREFIX
    fork = kv.fork(source, 11, [*TEN, 10, 99])
    assert kv.tables(fork) == [[1, 2, 7], [0, 0, 8]]
    assert kv.manager.pop_copies()[0] == [3, 7, 6, 8]


def test_a_window_of_one_token_shares_nothing(setup):
    kv = setup(40, 1)
    fork = kv.fork(kv.run(TEN), 9, TEN)
    assert kv.tables(fork) == [[0, 0, 4]]


def test_nothing_is_shared_of_no_tokens(setup):
    kv = setup()
    assert kv.manager.find_fork(kv.run(TEN), 0) is NO_PREFIX


def test_a_branch_begins_before_it_is_scheduled(setup):
    kv = setup()
    source, request = kv.run(TEN), kv.requests.make(TEN)
    assert kv.manager.fork_blocks(request, source, 10) == 10
    assert kv.tables(request) == [[1, 2, 4]]
    assert kv.manager.pop_copies()[0] == [3, 4]
    assert kv.pool.ref_counts[1:5] == [2, 2, 1, 1]


def test_without_a_block_for_the_copy_a_branch_shares_whole_blocks(setup):
    kv = setup(5)
    source = kv.run(TEN)
    kv.run([80])
    assert kv.manager.num_available_blocks == 0
    request = kv.requests.make(TEN)
    assert kv.manager.fork_blocks(request, source, 10) == 8
    assert kv.tables(request) == [[1, 2]]
    assert kv.manager.pop_copies()[0] == []


def test_a_branch_of_an_empty_source_holds_no_blocks(setup):
    kv = setup()
    source, request = kv.run(TEN), kv.requests.make(TEN)
    kv.manager.free(source)
    assert kv.manager.fork_blocks(request, source, 10) == 0
    assert kv.tables(request) == [[]]


def test_no_copy_is_made_for_a_finished_branch(setup):
    kv = setup()
    source, request = kv.run(TEN), kv.requests.make(TEN)
    kv.manager.fork_blocks(request, source, 10)
    kv.manager.free(request)
    assert kv.manager.pop_copies()[0] == []
