"""The free list: order, counts, references and links."""

import random
from itertools import pairwise

import pytest

from engine_core.kv_cache.block import NULL_BLOCK
from engine_core.kv_cache.free_queue import FreeQueue


def reordered(order: list[int]) -> FreeQueue:
    """A queue of as many blocks, in this order."""
    queue = FreeQueue(len(order) + 1)
    queue.popleft_n(len(order))
    queue.release(order)
    return queue


def assert_order(queue: FreeQueue, order: list[int]) -> None:
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
    queue = FreeQueue(2)
    assert_order(queue, [1])


def test_an_empty_queue_is_linked_to_itself():
    queue = FreeQueue(2)
    queue.popleft()
    assert_order(queue, [])
    assert queue.next_of[NULL_BLOCK] == queue.prev_of[NULL_BLOCK] == NULL_BLOCK


def test_pop_touch_and_release_keep_the_order():
    queue = FreeQueue(6)
    assert queue.popleft() == 1
    assert_order(queue, [2, 3, 4, 5])
    queue.touch([3])
    assert_order(queue, [2, 4, 5])
    queue.release([3])
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


def test_popleft_n_gives_blocks_in_order_and_references_them():
    queue = reordered([2, 4, 6, 5, 1, 3])
    left = [2, 4, 6, 5, 1, 3]
    for count, expected in ((0, []), (1, [2]), (2, [4, 6]), (3, [5, 1, 3])):
        assert queue.popleft_n(count) == expected
        left = left[count:]
        assert_order(queue, left)


@pytest.mark.parametrize("take", [FreeQueue.popleft, lambda queue: queue.popleft_n(2)])
def test_a_referenced_block_in_the_queue_is_not_given_away(take):
    queue = FreeQueue(4)
    queue.ref_counts[1] = 1
    with pytest.raises(AssertionError, match="block 1 was free and referenced"):
        take(queue)
    assert queue.num_free == 3


def test_release_keeps_the_given_order_behind_what_is_there():
    queue = FreeQueue(6)
    queue.popleft_n(3)
    queue.release([3, 1, 2])
    assert_order(queue, [4, 5, 3, 1, 2])
    queue.release([])
    assert_order(queue, [4, 5, 3, 1, 2])


def test_release_leaves_out_what_is_still_referenced():
    queue = FreeQueue(6)
    queue.popleft_n(4)
    queue.touch([2, 3])
    queue.release([4, 3, 2, 1])
    assert_order(queue, [5, 4, 1])
    queue.release([3, 2])
    assert_order(queue, [5, 4, 1, 3, 2])


@pytest.mark.parametrize("block", [1, 3, 5])
def test_touch_works_at_both_ends_and_in_the_middle(block):
    queue = FreeQueue(6)
    queue.touch([block])
    assert_order(queue, [other for other in range(1, 6) if other != block])


@pytest.mark.parametrize(
    ("touched", "left"),
    [
        ([3, 4, 5], [1, 2, 6, 7]),  # released together: one row
        ([7, 1, 2], [3, 4, 5, 6]),  # a row at the front, one at the end
        ([6, 5, 4], [1, 2, 3, 7]),  # in a row, but the other way round
        ([2, 6, 4], [1, 3, 5, 7]),  # none beside another
        ([5, 2, 3, 6], [1, 4, 7]),
        ([1, 2, 3, 4, 5, 6, 7], []),
    ],
)
def test_touch_cuts_out_rows_wherever_they_stand(touched, left):
    """`touched` is given first block first, the order in the queue is last block first."""
    queue = FreeQueue(8)
    queue.touch(touched[::-1])
    assert_order(queue, left)
    assert all(queue.ref_counts[block] == 1 for block in touched)


def test_touch_counts_blocks_in_use_and_unlinks_the_others():
    queue = FreeQueue(7)
    queue.popleft_n(2)
    queue.touch([1, 4, 2, 3, 4])
    assert queue.ref_counts == [0, 2, 2, 1, 2, 0, 0]
    assert_order(queue, [5, 6])


def test_blocks_are_not_freed_twice():
    queue = FreeQueue(4)
    with pytest.raises(AssertionError, match="block 2 is freed but not referenced"):
        queue.release([2])
    assert_order(queue, [1, 2, 3])
    queue.popleft_n(3)
    with pytest.raises(AssertionError, match="block 1 is freed but not referenced"):
        queue.release([1, 1])
    assert queue.num_free == 0


@pytest.mark.parametrize("num_taken", [0, 1, 3])
def test_the_null_block_is_never_free_nor_counted(num_taken):
    """Also while the queue is empty, when the ring has nothing else."""
    queue = FreeQueue(4)
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
def test_what_is_advanced_goes_next(advanced, order):
    queue = reordered([6, 7, 1, 2, 3, 4, 5])
    queue.popleft_n(2)
    queue.move_to_front(advanced)
    assert_order(queue, order)


def test_long_random_sequences_agree_with_a_plain_list():
    rng = random.Random(7)
    queue, free, held = FreeQueue(30), list(range(1, 30)), []
    for _ in range(3_000):
        match rng.randrange(4):
            case 0:
                count = rng.randint(0, min(6, len(free)))
                taken, free = free[:count], free[count:]
                assert queue.popleft_n(count) == taken
                held.append(taken)
            case 1:
                # What was released together, now and then in another order or in part.
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
