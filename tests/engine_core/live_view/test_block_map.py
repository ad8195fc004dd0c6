"""The block map equals the state of each block of the pool, in random runs."""

from itertools import pairwise

import numpy as np
import pytest

from engine_core import live_view
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.live_view import (
    OwnerNumbers,
    block_map,
    block_states,
    num_blocks_by_sequence,
    state_map,
)
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from proto.messages.view import (
    CACHED,
    FREE,
    HELD,
    MAX_CELLS,
    RESERVED,
    RETAINED,
    SHARED,
    blocks_per_cell,
)
from tests.engine_core.scheduler.lives import Life
from tests.fakes.kv_requests import Requests, make_manager


def truth(kv_cache, numbers):
    """Return [(state, owner)] of every block, from reference counts and hashes of the pool."""
    pool = kv_cache.pool
    users = {block: set() for block in range(pool.num_blocks)}
    for group in kv_cache.groups:
        for seq_id, table in group.block_tables().items():
            for block in table:
                users[block].add(numbers[seq_id])
    found = [(RESERVED, 0)]
    for block in range(1, pool.num_blocks):
        state = FREE if pool.hashes[block] is None else CACHED
        if pool.ref_counts[block]:
            state = SHARED if len(users[block]) > 1 else HELD
        if pool.retained.counts.get(block):
            state = RETAINED
        found.append((state, min(users[block], default=0)))
    return found


def decoded(blocks):
    """Return [(length, state, owner)] of a map."""
    lengths = np.frombuffer(blocks.lengths, "<i4").tolist()
    owners = np.frombuffer(blocks.owners, "<i4").tolist()
    return list(zip(lengths, blocks.states, owners, strict=True))


def spread(runs):
    return [(state, owner) for length, state, owner in runs for _ in range(length)]


class ShownLife(Life):
    """Compares the map with the pool after every operation."""

    def __init__(self, *args, **more) -> None:
        self.owners = OwnerNumbers()
        self.states = set()
        super().__init__(*args, **more)

    def judge(self) -> None:
        super().judge()
        kv_cache = self.engine.kv_cache
        before = self.owners.numbers
        held = num_blocks_by_sequence(kv_cache)
        self.owners.assign(held)
        numbers = self.owners.numbers
        assert len(set(numbers.values())) == len(numbers)
        assert all(numbers[seq_id] == before[seq_id] for seq_id in numbers.keys() & before.keys())
        runs = decoded(block_map(kv_cache, numbers))
        assert all(a[1:] != b[1:] for a, b in pairwise(runs))
        cells = spread(runs)
        assert cells == truth(kv_cache, numbers)
        for seq_id, number in numbers.items():
            tables = [table for group in kv_cache.groups for table in [group.block_table(seq_id)]]
            assert held[seq_id] == sum(block != 0 for table in tables for block in table)
            assert held[seq_id] >= sum(owner == number for _, owner in cells)
        self.states |= {state for state, _ in cells}


def test_the_block_map_matches_the_pool_after_random_operations():
    states = set()
    for kind in ("pins", "pins and loads"):
        for seed in range(2):
            life = ShownLife(kind, seed)
            life.run(150)
            states |= life.states
    assert states == {FREE, CACHED, HELD, SHARED, RETAINED, RESERVED}


def test_owners_have_the_lowest_numbers_that_are_unused():
    owners = OwnerNumbers()
    owners.assign([10, 11, 12])
    assert owners.numbers == {10: 1, 11: 2, 12: 3}
    owners.assign([12, 13])
    assert owners.numbers == {12: 3, 13: 1}
    owners.assign([12, 14, 15, 13, 16])
    assert owners.numbers == {12: 3, 13: 1, 14: 2, 15: 4, 16: 5}


@pytest.mark.parametrize("num_blocks", [2, MAX_CELLS, MAX_CELLS + 1, 3 * MAX_CELLS, 10**6])
def test_a_pool_of_any_size_has_few_cells(num_blocks):
    per_cell = blocks_per_cell(num_blocks)
    assert per_cell & (per_cell - 1) == 0
    assert -(-num_blocks // per_cell) <= MAX_CELLS
    assert per_cell == 1 or -(-num_blocks // (per_cell // 2)) > MAX_CELLS


def test_a_cell_of_several_blocks_shows_the_highest_state_and_its_owner(monkeypatch):
    monkeypatch.setattr(live_view, "blocks_per_cell", lambda num_blocks: 4)
    manager = make_manager(23, 16)
    requests = Requests(manager)
    numbers = {}
    for number, length in enumerate((40, 90, 40), 1):
        request = requests.make([number] * length)
        assert requests.schedule(request) is not None
        numbers[request.seq_id] = number
        last = request
    manager.free(last)
    del numbers[last.seq_id]
    states, owners = block_states(manager.pool, manager.block_groups, numbers)
    cells = spread(decoded(block_map(manager, numbers)))
    assert len(cells) == 6
    for index, cell in enumerate(cells):
        part = slice(4 * index, 4 * index + 4)
        blocks = list(zip(states[part].tolist(), owners[part].tolist(), strict=True))
        highest = max(state for state, _ in blocks)
        assert cell == next(each for each in blocks if each[0] == highest)
    assert len({state for state, _ in cells}) > 2


def test_the_null_block_has_no_owner():
    manager = make_manager(40, 16, windows=(None, 32))
    requests = Requests(manager)
    request = requests.make([1] * 300)
    assert requests.schedule(request) is not None
    manager.free(request)
    again = requests.make([1] * 300)
    assert requests.schedule(again) is not None
    assert 0 in manager.block_ids(again.seq_id)[1]
    numbers = {again.seq_id: 1}
    cells = spread(decoded(block_map(manager, numbers)))
    assert cells == truth(manager, numbers)
    assert num_blocks_by_sequence(manager)[again.seq_id] == sum(owner == 1 for _, owner in cells)


def test_a_block_held_only_for_a_copy_has_no_owner():
    manager = make_manager(10, 16)
    requests = Requests(manager)
    request = requests.make([1] * 40)
    assert requests.schedule(request) is not None
    table = manager.block_ids(request.seq_id)[0]
    manager.transfer_refs.hold(table)
    manager.free(request)
    cells = spread(decoded(block_map(manager, {})))
    assert cells == truth(manager, {})
    assert [cells[block] for block in table] == [(HELD, 0)] * 3


def test_the_state_map_has_each_slot_for_recurrent_states():
    manager = KVCacheManager(
        40,
        16,
        True,
        bytes(32),
        groups=(KVGroup(), KVGroup(kind=RECURRENT_STATE)),
        num_state_slots=9,
    )
    assert decoded(state_map(manager, {})) == [(8, FREE, 0)]
    requests = Requests(manager)
    numbers = {}
    for number in (1, 2):
        manager.begin_step()
        request = requests.make([number] * 40)
        assert requests.schedule_groups(request) is not None
        numbers[request.seq_id] = number
    held = {
        slot: numbers[seq_id] for seq_id in numbers for slot in manager.block_ids(seq_id)[1] if slot
    }
    cells = spread(decoded(state_map(manager, numbers)))
    assert {slot: owner for slot, (state, owner) in enumerate(cells, 1) if state == HELD} == held
    assert len(held) == manager.num_states[1] == 4
    manager.begin_step()
    manager.free(request)
    del numbers[request.seq_id]
    cells = spread(decoded(state_map(manager, numbers)))
    assert [state for state, _ in cells].count(HELD) == 2
    assert CACHED in [state for state, _ in cells], "the end of a prompt can be found"
    assert decoded(state_map(make_manager(40, 16), {})) == []
