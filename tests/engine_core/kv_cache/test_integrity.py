"""The integrity check names every corruption that a test can plant."""

from collections.abc import Callable

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from tests.fakes.kv_requests import Requests, make_manager


class Scene:
    """Two running requests that share blocks 1 and 2, cached and never used free blocks.

    shared tables: [1, 2, 3] and [1, 2, 4]; free queue: 7 8 9 10 6 5, of which 5 has a hash.
    """

    def __init__(self) -> None:
        self.manager: KVCacheManager = make_manager(11, block_size=4)
        self.pool = self.manager.pool
        self.queue = self.pool.free_queue
        requests = Requests(self.manager)
        self.first: Request = requests.make("ABCD|EFGH|I")
        self.second: Request = requests.make("ABCD|EFGH|J")
        gone = requests.make("WXYZ|w")
        for request in (self.first, self.second, gone):
            requests.schedule(request)
        self.manager.free(gone)

    def table(self) -> list[int]:
        """The block table of the first request."""
        return self.manager.groups[0].block_tables()[self.first.seq_id]


def test_a_healthy_manager_has_no_violations():
    scene = Scene()
    assert list(scene.queue) == [7, 8, 9, 10, 6, 5]
    assert integrity.check(scene.manager) == []


def wrong_free_count(scene: Scene) -> None:
    scene.queue.num_free += 1


def broken_backward_link(scene: Scene) -> None:
    scene.queue.prev_of[9] = 7


def broken_forward_link(scene: Scene) -> None:
    scene.queue.next_of[8] = 10


def wrong_tail(scene: Scene) -> None:
    scene.queue.prev_of[NULL_BLOCK] = 6


def link_to_nowhere(scene: Scene) -> None:
    scene.queue.next_of[8] = 99


def cycle(scene: Scene) -> None:
    scene.queue.next_of[10] = 8


def reference_count_too_high(scene: Scene) -> None:
    scene.pool.ref_counts[3] = 2


def reference_count_too_low(scene: Scene) -> None:
    scene.pool.ref_counts[1] = 1


def hash_in_index_not_on_block(scene: Scene) -> None:
    scene.pool.hashes[5] = None


def other_hash_in_index_than_on_block(scene: Scene) -> None:
    scene.pool.hashes[5] = b"another"


def hash_on_block_not_in_index(scene: Scene) -> None:
    block_hash = scene.pool.hashes[5]
    assert block_hash is not None
    scene.pool.index.remove(block_hash, 5)


def block_twice_in_index(scene: Scene) -> None:
    scene.pool.index.insert(b"another", 5)


def block_twice_in_a_table(scene: Scene) -> None:
    scene.table().append(3)


def unknown_block_in_a_table(scene: Scene) -> None:
    scene.table().append(11)


def referenced_block_in_the_free_queue(scene: Scene) -> None:
    scene.queue.release([3])
    scene.pool.ref_counts[3] = 1


def free_block_in_a_table(scene: Scene) -> None:
    scene.table().append(7)


def lost_block(scene: Scene) -> None:
    scene.queue.touch([9])
    scene.pool.ref_counts[9] = 0


def null_block_freed(scene: Scene) -> None:
    scene.pool.ref_counts[NULL_BLOCK] -= 1


def null_block_hashed(scene: Scene) -> None:
    scene.pool.hashes[NULL_BLOCK] = b"nothing"


def null_block_in_a_full_attention_table(scene: Scene) -> None:
    scene.table()[0] = NULL_BLOCK


def cached_count_too_high(scene: Scene) -> None:
    scene.manager.groups[0]._sequences[scene.first.seq_id].num_cached = 4


def cached_count_too_low(scene: Scene) -> None:
    scene.pool.cache_full_block(3, b"too early")


def table_of_a_forgotten_sequence(scene: Scene) -> None:
    scene.manager._unchanged_below.pop(scene.first.seq_id)


def shortened_table(scene: Scene) -> None:
    scene.manager.groups[0].block_tables()[scene.second.seq_id].pop()


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (wrong_free_count, "free count: 7 is recorded, 6 blocks are queued"),
        (broken_backward_link, "broken link: block 9 follows 8, but says that it follows 7"),
        (broken_forward_link, "broken link: block 10 follows 8, but says that it follows 9"),
        (wrong_tail, "broken link: the free queue ends with block 5, but says that it ends with 6"),
        (link_to_nowhere, "broken link: block 8 is followed by 99, which is no block"),
        (cycle, "cycle: the free queue comes back to block 8"),
        (reference_count_too_high, "reference count: block 3 counts 2, but stands in 1 tables"),
        (reference_count_too_low, "reference count: block 1 counts 1, but stands in 2 tables"),
        (hash_in_index_not_on_block, "hash not on block: the index has block 5 under "),
        (other_hash_in_index_than_on_block, "hash not on block: the index has block 5 under "),
        (hash_on_block_not_in_index, "hash not in index: block 5 carries "),
        (block_twice_in_index, "hash: the index has block 5 twice"),
        (block_twice_in_a_table, "duplicate block: 3 stands 2 times in one table"),
        (unknown_block_in_a_table, "unknown block: 11 stands in a table"),
        (referenced_block_in_the_free_queue, "free and referenced: block 3"),
        (free_block_in_a_table, "free and referenced: block 7"),
        (lost_block, "lost block: 9 is neither free nor referenced"),
        (null_block_freed, "null block: its reference count is -1"),
        (null_block_hashed, "null block: it carries a hash"),
        (null_block_in_a_full_attention_table, "null block: it stands in the table of sequence 0"),
        (cached_count_too_high, "cached count: sequence 0 counts 4 cached blocks of 3"),
        (cached_count_too_low, "cached count: sequence 0 counts 2 cached blocks of 3, but of "),
        (table_of_a_forgotten_sequence, "sequences: group 0 and the manager disagree on seq_ids"),
        (shortened_table, "room: sequence 1 has blocks for 8 tokens in group 0"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_every_planted_corruption_is_named(plant: Callable[[Scene], None], expected: str):
    scene = Scene()
    plant(scene)
    found = integrity.check(scene.manager)
    assert any(violation.startswith(expected) for violation in found), found


def test_a_large_pool_is_checked_in_slices():
    """No call checks more than a slice, and a fault at the end is found."""
    manager = make_manager(10 * integrity.SLICE, block_size=4)
    pieces = list(integrity.check_in_slices(manager))
    assert len(pieces) > 30
    assert not any(pieces)
    manager.pool.ref_counts[10 * integrity.SLICE - 1] = 1
    found = integrity.check(manager)
    assert [each.split(":")[0] for each in found] == ["reference count", "free and referenced"]
