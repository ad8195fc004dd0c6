"""The free list: order, counts, references and links."""

import random
from itertools import pairwise

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.free_queue import (
    EVICTION_POLICIES,
    NULL_BLOCK,
    FreeBlockQueue,
    LRUFreeQueue,
)
from engine_core.kv_cache.manager import KVCacheManager
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from tests.fakes.kv_requests import Requests, make_manager


def reordered(order: list[int]) -> LRUFreeQueue:
    """Return a queue of these blocks in this order."""
    queue = LRUFreeQueue(len(order) + 1)
    queue.popleft_n(len(order))
    queue.release(order)
    return queue


def assert_order(queue: LRUFreeQueue, order: list[int]) -> None:
    assert list(queue) == order
    assert len(queue) == queue.num_free == len(order)
    ring = [NULL_BLOCK, *order, NULL_BLOCK]
    for before, after in pairwise(ring):
        assert queue.next_of[before] == after
        assert queue.prev_of[after] == before
    assert queue.ref_counts[NULL_BLOCK] == 0
    for block in range(1, len(queue.ref_counts)):
        assert (queue.ref_counts[block] == 0) is (block in order)


def test_a_queue_of_one_block_is_linked_to_both_ends():
    queue = LRUFreeQueue(2)
    assert_order(queue, [1])


def test_an_empty_queue_is_linked_to_itself():
    queue = LRUFreeQueue(2)
    queue.popleft()
    assert_order(queue, [])
    assert queue.next_of[NULL_BLOCK] == queue.prev_of[NULL_BLOCK] == NULL_BLOCK


def test_pop_touch_and_release_keep_the_order():
    queue = LRUFreeQueue(6)
    assert queue.popleft() == 1
    assert_order(queue, [2, 3, 4, 5])
    queue.touch([3])
    assert_order(queue, [2, 4, 5])
    queue.release([3])
    assert_order(queue, [2, 4, 5, 3])
    assert [queue.popleft() for _ in range(4)] == [2, 4, 5, 3]
    assert_order(queue, [])


def test_popleft_of_an_empty_queue_is_an_error():
    queue = LRUFreeQueue(2)
    queue.popleft()
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()


def test_popleft_n_pops_nothing_when_too_few_are_free():
    queue = LRUFreeQueue(4)
    with pytest.raises(ValueError, match="4 needed, 3 free"):
        queue.popleft_n(4)
    assert_order(queue, [1, 2, 3])


def test_popleft_n_gives_blocks_in_order_and_references_them():
    queue = reordered([2, 4, 6, 5, 1, 3])
    left = [2, 4, 6, 5, 1, 3]
    for count, expected in ((0, []), (1, [2]), (2, [4, 6]), (3, [5, 1, 3])):
        assert queue.popleft_n(count) == expected
        left = left[count:]
        assert_order(queue, left)


@pytest.mark.parametrize("take", [LRUFreeQueue.popleft, lambda queue: queue.popleft_n(2)])
def test_a_referenced_block_in_the_queue_is_not_allocated(take):
    queue = LRUFreeQueue(4)
    queue.ref_counts[1] = 1
    with pytest.raises(AssertionError, match="block 1 was free and referenced"):
        take(queue)
    assert queue.num_free == 3


def test_release_appends_blocks_in_the_given_order():
    queue = LRUFreeQueue(6)
    queue.popleft_n(3)
    queue.release([3, 1, 2])
    assert_order(queue, [4, 5, 3, 1, 2])
    queue.release([])
    assert_order(queue, [4, 5, 3, 1, 2])


def test_release_skips_referenced_blocks():
    queue = LRUFreeQueue(6)
    queue.popleft_n(4)
    queue.touch([2, 3])
    queue.release([4, 3, 2, 1])
    assert_order(queue, [5, 4, 1])
    queue.release([3, 2])
    assert_order(queue, [5, 4, 1, 3, 2])


@pytest.mark.parametrize("block", [1, 3, 5])
def test_touch_works_at_both_ends_and_in_the_middle(block):
    queue = LRUFreeQueue(6)
    queue.touch([block])
    assert_order(queue, [other for other in range(1, 6) if other != block])


@pytest.mark.parametrize(
    ("touched", "left"),
    [
        ([3, 4, 5], [1, 2, 6, 7]),  # freed together: one run
        ([7, 1, 2], [3, 4, 5, 6]),  # one run at the front, one at the end
        ([6, 5, 4], [1, 2, 3, 7]),  # a run in reverse order
        ([2, 6, 4], [1, 3, 5, 7]),  # no adjacent blocks
        ([5, 2, 3, 6], [1, 4, 7]),
        ([1, 2, 3, 4, 5, 6, 7], []),
    ],
)
def test_touch_cuts_out_rows_wherever_they_stand(touched, left):
    """`touched` has the first block first; the queue has the last block first."""
    queue = LRUFreeQueue(8)
    queue.touch(touched[::-1])
    assert_order(queue, left)
    assert all(queue.ref_counts[block] == 1 for block in touched)


def test_touch_counts_blocks_in_use_and_unlinks_the_others():
    queue = LRUFreeQueue(7)
    queue.popleft_n(2)
    queue.touch([1, 4, 2, 3, 4])
    assert queue.ref_counts == [0, 2, 2, 1, 2, 0, 0]
    assert_order(queue, [5, 6])


def test_blocks_are_not_freed_twice():
    queue = LRUFreeQueue(4)
    with pytest.raises(AssertionError, match="block 2 is freed but not referenced"):
        queue.release([2])
    assert_order(queue, [1, 2, 3])
    queue.popleft_n(3)
    with pytest.raises(AssertionError, match="block 1 is freed but not referenced"):
        queue.release([1, 1])
    assert queue.num_free == 0


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_the_null_block_is_never_free_nor_counted(num_taken):
    """Also while the queue is empty."""
    queue = LRUFreeQueue(4)
    held = queue.popleft_n(num_taken)
    left = list(queue)
    queue.touch([NULL_BLOCK, NULL_BLOCK, *held])
    queue.release([*held, NULL_BLOCK])
    assert_order(queue, left)
    queue.release([NULL_BLOCK, *held, NULL_BLOCK])
    assert_order(queue, left + held)


@pytest.mark.parametrize(
    ("advanced", "order"),
    [
        ([], [1, 2, 3, 4, 5]),
        ([1], [1, 2, 3, 4, 5]),
        ([5], [5, 1, 2, 3, 4]),
        ([4, 2], [4, 2, 1, 3, 5]),
        ([2, 1], [2, 1, 3, 4, 5]),
        ([5, 4, 3, 2, 1], [5, 4, 3, 2, 1]),
        ([7, 3, NULL_BLOCK, 6], [3, 1, 2, 4, 5]),  # 6 and 7 are in use
    ],
)
def test_advanced_blocks_are_evicted_next(advanced, order):
    queue = reordered([6, 7, 1, 2, 3, 4, 5])
    queue.popleft_n(2)
    queue.move_to_front(advanced)
    assert_order(queue, order)


def test_long_random_sequences_agree_with_a_plain_list():
    rng = random.Random(7)
    queue, free, held = LRUFreeQueue(30), list(range(1, 30)), []
    for _ in range(3_000):
        match rng.randrange(4):
            case 0:
                count = rng.randint(0, min(6, len(free)))
                taken, free = free[:count], free[count:]
                assert queue.popleft_n(count) == taken
                held.append(taken)
            case 1:
                # blocks freed together, sometimes in another order or in part
                start = rng.randrange(30)
                touched = (free + [each for table in held for each in table])[start : start + 8]
                touched = list(dict.fromkeys(touched))[:: rng.choice([-1, -1, 1, 2])]
                queue.touch(touched)
                free = [each for each in free if each not in touched]
                held.append(touched)
            case 2 if held:
                released = held.pop(rng.randrange(len(held)))[::-1]
                queue.release(released)
                in_use = {each for table in held for each in table}
                free += [each for each in released if each not in in_use]
            case 3:
                advanced = rng.sample(range(30), 5)
                queue.move_to_front(advanced)
                first = [each for each in advanced if each in free]
                free = first + [each for each in free if each not in first]
        assert_order(queue, free)


class LastFreedFirst(FreeBlockQueue):
    """A stack: the block freed last is allocated first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = list(range(num_blocks - 1, 0, -1))

    def popleft(self) -> int:
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[int]:
        if count > self.num_free:
            raise ValueError("No free blocks available")
        popped = [self._free.pop() for _ in range(count)]
        for block in popped:
            self.ref_counts[block] = 1
        self.num_free -= count
        return popped

    def release(self, blocks):
        for block in filter(None, blocks):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free.append(block)
        self.num_free = len(self._free)

    def touch(self, blocks):
        for block in filter(None, blocks):
            if not self.ref_counts[block]:
                self._free.remove(block)
            self.ref_counts[block] += 1
        self.num_free = len(self._free)

    def move_to_front(self, blocks):
        for block in reversed([block for block in blocks if block in self._free]):
            self._free.remove(block)
            self._free.append(block)

    def peek(self) -> int:
        return self._free[-1] if self._free else NULL_BLOCK

    def __iter__(self):
        return iter(self._free[::-1])


@pytest.mark.interpreted
def test_another_eviction_order_is_a_class_and_a_line_in_the_registry(monkeypatch):
    monkeypatch.setitem(EVICTION_POLICIES, "last freed", LastFreedFirst)
    evicted = {}
    for policy in ("lru", "last freed"):
        manager = make_manager(5, block_size=4, eviction_policy=policy)
        requests = Requests(manager)
        older, newer = requests.make("abcd|e"), requests.make("efgh|i")
        for request in (older, newer):
            requests.schedule(request)
        for request in (older, newer):
            manager.free(request)
            assert integrity.check(manager) == []
        requests.schedule(requests.make("1234|5"))
        evicted[policy] = [
            not manager.get_computed_blocks(requests.make(request.all_token_ids)).num_tokens
            for request in (older, newer)
        ]
        groups = (KVGroup(), KVGroup(kind=RECURRENT_STATE))
        manager = KVCacheManager(
            5, 4, True, bytes(32), groups=groups, num_state_slots=5, eviction_policy=policy
        )
        queues = {type(group.pool.free_queue) for group in manager.groups}
        assert queues == {EVICTION_POLICIES[policy]}
    assert evicted == {"lru": [True, False], "last freed": [False, True]}
