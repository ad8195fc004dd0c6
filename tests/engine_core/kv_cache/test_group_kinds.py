"""A KV cache group that holds no KV: a recurrent state, in one slot per sequence.

    tokens         |  a b c d  |  e f g h  |  i j
    slots          |  1        |  2        |  3         the state after each token, overwritten
    block table    |  0        |  0        |  3         a full slot is a checkpoint: freed, findable

A prefix can be continued only from a checkpoint, so a hit ends where a slot was full. The group is
a class and a line in the registry; manager, coordinator and scheduler are the product's.
"""

from collections.abc import Collection, Iterator, Sequence

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.coordinator import HybridCoordinator, max_blocks_of_request
from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_cache.groups import GROUP_KINDS, CacheGroup
from engine_core.kv_cache.hashing import GroupKeys
from engine_core.kv_cache.manager import NOTHING_COMPUTED, KVCacheManager
from engine_core.kv_cache.pool import BlockPool, HashedTokens
from proto.lifecycle import KVGroup
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.kv_requests import Requests

pytestmark = pytest.mark.interpreted

SIZE = 4
GROUPS = (KVGroup(), KVGroup(kind="recurrent_state"))


class StateSlots(CacheGroup):
    """One slot for the current state of a sequence; earlier states are not kept."""

    is_downward_closed = False

    def __init__(self, pool: BlockPool, keys: GroupKeys, spec: KVGroup) -> None:
        super().__init__(pool, keys, spec)
        self._pool = pool
        self._keys = keys
        self._tables: dict[int, list[int]] = {}
        self._num_cached: dict[int, int] = {}

    @staticmethod
    def max_blocks(
        spec: KVGroup, num_tokens: int, block_size: int, longest_chunk: int | None
    ) -> int:
        chunk = num_tokens if longest_chunk is None else min(longest_chunk, num_tokens)
        return min(-(-num_tokens // block_size), 1 + -(-chunk // block_size))

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_tokens: int) -> list[int]:
        end = min(max_tokens // self.block_size, self._keys.count(block_hashes))
        for index in range(end - 1, -1, -1):
            slot = self._pool.index.get(self._keys.key(block_hashes, index))
            if slot is not None:
                return [NULL_BLOCK] * index + [slot]
        return []

    def find_fork(self, seq_id: int, num_tokens: int) -> tuple[list[int], int] | None:
        return None  # the state after an earlier token is overwritten

    def remove_skipped_blocks(self, seq_id: int, num_computed: int) -> None:
        table = self._tables.get(seq_id, [])
        for index in range(min((num_computed - 1) // self.block_size, len(table))):
            self._pool.free_blocks([table[index]])
            table[index] = NULL_BLOCK

    def num_new_blocks(
        self, seq_id: int, num_tokens: int, num_hits: int, num_computed: int = 0
    ) -> int:
        num_held = len(self._tables[seq_id]) if seq_id in self._tables else num_hits
        return max(0, -(-num_tokens // self.block_size) - num_held)

    def attach_blocks(self, seq_id: int, hits: Sequence[int]) -> None:
        self._pool.touch(hits)
        self._tables[seq_id] = list(hits)
        self._num_cached[seq_id] = len(hits)

    def allocate_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        new = self._pool.get_new_blocks(self.num_new_blocks(seq_id, num_tokens, 0))
        self._tables[seq_id] += new
        return new

    def cache_full_blocks(self, seq_id: int, content: HashedTokens, num_tokens: int) -> int:
        first, end = self._num_cached[seq_id], num_tokens // self.block_size
        table = self._tables[seq_id]
        for index in range(first, end):
            if table[index] != NULL_BLOCK:
                self._pool.cache_full_blocks(table, index, index + 1, self._keys, content)
        self._num_cached[seq_id] = max(first, end)
        return 0  # checked with every allocation

    def uncache_after(self, seq_id: int, num_tokens: int) -> None:
        self._pool.uncache(self._tables.get(seq_id, [])[num_tokens // self.block_size :])

    def uncache_hashes(self, block_hashes: Sequence[bytes]) -> None:
        for index in range(self._keys.count(block_hashes)):
            self._pool.uncache_key(self._keys.key(block_hashes, index))

    def rename_sequence(self, seq_id: int, new_seq_id: int) -> None:
        self._tables[new_seq_id] = self._tables.pop(seq_id)
        self._num_cached[new_seq_id] = self._num_cached.pop(seq_id)

    def free_sequence(self, seq_id: int) -> None:
        self._num_cached.pop(seq_id, None)
        self._pool.free_blocks(self._tables.pop(seq_id, [])[::-1])

    def num_valid_tokens(self, seq_id: int, bad_blocks: Collection[int]) -> int | None:
        return 0 if set(self._tables.get(seq_id, ())) & set(bad_blocks) else None

    def prefix_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        return self._tables.get(seq_id, [])[: num_tokens // self.block_size]

    def cached_blocks(self, seq_id: int, first_token: int) -> list[tuple[int, int]]:
        hashes = self._pool.hashes
        return [
            (index * self.block_size, slot)
            for index, slot in enumerate(self._tables[seq_id])
            if hashes[slot] is not None and (index + 1) * self.block_size > first_token
        ]

    def block_table(self, seq_id: int) -> list[int]:
        return self._tables.get(seq_id, []).copy()

    def block_tables(self) -> dict[int, list[int]]:
        return self._tables

    def violations(self, seq_id: int, recheck_after: int) -> list[str]:
        return [] if recheck_after == 0 else [f"sequence {seq_id} is not checked every time"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    GROUP_KINDS["recurrent_state"] = StateSlots
    yield
    del GROUP_KINDS["recurrent_state"]


def make_state_manager(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, True, bytes(32), groups=GROUPS)


def test_a_sequence_has_one_slot_and_the_last_checkpoint_is_found():
    manager = make_state_manager(21)
    assert isinstance(manager._coordinator, HybridCoordinator)
    requests = Requests(manager)
    first = requests.make("abcd|efgh|ij")
    for num_tokens in (4, 4, 2):
        assert requests.schedule_groups(first, num_tokens) is not None
    kv, state = manager.block_ids(first.seq_id)
    assert len(kv) == 3
    assert [slot == NULL_BLOCK for slot in state] == [True, False, False], (
        "the checkpoint is freed as well"
    )
    assert requests.decode(first, "k") is not None
    assert [slot == NULL_BLOCK for slot in manager.block_ids(first.seq_id)[1]] == [
        True,
        True,
        False,
    ]
    second = requests.make("abcd|efgh|xyz")
    computed = manager.get_computed_blocks(second)
    assert computed.num_tokens == 8
    assert computed.block_ids == (kv[:2], [NULL_BLOCK, state[1]])
    assert integrity.check(manager) == []
    for request in (first, second):
        manager.free(request)
    assert manager.pool.num_free == 20


def test_a_lost_checkpoint_is_a_shorter_hit_although_the_kv_is_there():
    manager = make_state_manager(21)
    requests = Requests(manager)
    first = requests.make("abcd|efgh|ij")
    for num_tokens in (4, 4, 2):
        requests.schedule_groups(first, num_tokens)
    checkpoint = manager.block_ids(first.seq_id)[1][1]
    manager.pool.uncache([checkpoint])
    assert manager.get_computed_blocks(requests.make("abcd|efgh|xyz")).num_tokens == 4
    assert manager.find_fork(first, 8) is NOTHING_COMPUTED


def test_the_bound_of_a_request_counts_its_slots():
    assert max_blocks_of_request(GROUPS, 100 * SIZE, SIZE, SIZE) == 100 + 2


def test_a_step_carries_the_slots_beside_the_kv():
    engine = EngineHarness(
        num_blocks=41,
        block_size=SIZE,
        groups=GROUPS,
        windows=(None, 2),  # a token reads the state of the previous token
        max_num_batched_tokens=8,
    )
    request = engine.add_one(list(range(1, 11)), max_tokens=7, ignore_eos=True)
    output = engine.step()
    (new,) = output.new_requests
    kv, state = new.block_ids
    assert (len(kv), len(state)) == (2, 2), "eight tokens fill two blocks and two checkpoints"
    tables = [list(kv), list(state)]
    while request.seq_id in engine.scheduler._lifecycle.requests:
        output = engine.step()
        for grown in output.cached_requests.new_block_ids:
            for table, blocks in zip(tables, grown or (), strict=False):
                table += blocks
    assert [len(table) for table in tables] == [4, 4]
    again = engine.add_one([*range(1, 11), 99], max_tokens=1)
    (new,) = engine.step().new_requests
    assert new.num_computed_tokens == 8
    assert new.block_ids[0][:2] == tables[0][:2]
    assert new.block_ids[1][:2] == [NULL_BLOCK, tables[1][1]]
    assert again.num_cached_tokens == 8
    engine.run()
