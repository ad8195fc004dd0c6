"""The free list: order, counts and links."""

from itertools import pairwise

import pytest

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue


def reordered(order: list[int]) -> FreeQueue:
    """A queue of as many blocks, in this order."""
    queue = FreeQueue(len(order) + 1)
    queue.popleft_n(len(order))
    queue.append_n(order)
    return queue


def assert_order(queue: FreeQueue, order: list[int]) -> None:
    assert list(queue) == order
    assert len(queue) == queue.num_free == len(order)
    ring = [NULL_BLOCK, *order, NULL_BLOCK]
    for before, after in pairwise(ring):
        assert queue.next_of[before] == after
        assert queue.prev_of[after] == before


def test_a_queue_of_one_block_is_linked_to_both_ends():
    queue = FreeQueue(2)
    assert_order(queue, [1])


def test_an_empty_queue_is_linked_to_itself():
    queue = FreeQueue(2)
    queue.popleft()
    assert_order(queue, [])
    assert queue.next_of[NULL_BLOCK] == queue.prev_of[NULL_BLOCK] == NULL_BLOCK


def test_pop_remove_and_append_keep_the_order():
    queue = FreeQueue(6)
    assert queue.popleft() == 1
    assert_order(queue, [2, 3, 4, 5])
    queue.remove(3)
    assert_order(queue, [2, 4, 5])
    queue.append(3)
    assert_order(queue, [2, 4, 5, 3])
    assert [queue.popleft() for _ in range(4)] == [2, 4, 5, 3]
    assert_order(queue, [])


def test_popleft_of_an_empty_queue_is_an_error():
    queue = FreeQueue(2)
    queue.popleft()
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()


def test_popleft_n_takes_none_when_too_few_are_free():
    queue = FreeQueue(4)
    with pytest.raises(ValueError, match="4 wanted, 3 free"):
        queue.popleft_n(4)
    assert_order(queue, [1, 2, 3])


def test_popleft_n_gives_blocks_in_order_and_unlinks_them():
    queue = reordered([2, 4, 6, 5, 1, 3])
    for count, expected, left in ((0, [], 6), (1, [2], 5), (2, [4, 6], 3), (3, [5, 1, 3], 0)):
        taken = queue.popleft_n(count)
        assert taken == expected
        assert queue.num_free == left
        assert all(queue.next_of[block] == queue.prev_of[block] == block for block in taken)
        assert not any(block in queue for block in taken)


def test_append_n_keeps_the_given_order_behind_what_is_there():
    queue = FreeQueue(6)
    queue.popleft_n(3)
    queue.append_n([3, 1, 2])
    assert_order(queue, [4, 5, 3, 1, 2])
    queue.append_n([])
    assert_order(queue, [4, 5, 3, 1, 2])


@pytest.mark.parametrize("block", [1, 3, 5])
def test_remove_works_at_both_ends_and_in_the_middle(block):
    queue = FreeQueue(6)
    queue.remove(block)
    assert_order(queue, [other for other in range(1, 6) if other != block])
    assert block not in queue


def test_blocks_are_not_freed_twice_nor_removed_twice():
    queue = FreeQueue(4)
    with pytest.raises(AssertionError, match="block 2 is free already"):
        queue.append(2)
    queue.popleft_n(3)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        queue.append_n([1, 1])
    with pytest.raises(AssertionError, match="block 2 is not free"):
        queue.remove(2)


def test_the_null_block_is_never_free():
    queue = FreeQueue(3)
    assert NULL_BLOCK not in queue
    with pytest.raises(AssertionError, match="null block"):
        queue.append(NULL_BLOCK)
    with pytest.raises(AssertionError, match="not free"):
        queue.remove(NULL_BLOCK)
