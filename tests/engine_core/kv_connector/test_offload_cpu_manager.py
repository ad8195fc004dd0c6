"""Manager of host memory and its eviction policies, step by step (behaviours OFF-02 to OFF-20)."""

from collections.abc import Iterable, Sequence

import pytest

from engine_core.kv_connector.offload.base import PrepareStoreOutput
from engine_core.kv_connector.offload.cpu_manager import CPUOffloadingManager
from engine_core.kv_connector.offload.eviction import ARCPolicy, LRUPolicy

CAPACITY = 4


def key(number: int) -> bytes:
    return number.to_bytes(2, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def numbers(found: Iterable[bytes]) -> list[int]:
    return [int.from_bytes(each, "little") for each in found]


def make_policy(name: str) -> LRUPolicy | ARCPolicy:
    return ARCPolicy(CAPACITY) if name == "arc" else LRUPolicy()


@pytest.fixture(params=["lru", "arc"])
def ledger(request: pytest.FixtureRequest) -> CPUOffloadingManager:
    return CPUOffloadingManager(CAPACITY, make_policy(request.param))


def arc_ledger() -> tuple[CPUOffloadingManager, ARCPolicy]:
    policy = ARCPolicy(CAPACITY)
    return CPUOffloadingManager(CAPACITY, policy), policy


def store(ledger: CPUOffloadingManager, *blocks: int) -> PrepareStoreOutput:
    output = ledger.prepare_store(keys(*blocks))
    assert output is not None
    ledger.complete_store(keys(*blocks))
    return output


def events(ledger: CPUOffloadingManager) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    stored, removed = [], []
    for event in ledger.take_events():
        (removed if event.removed else stored).append(numbers(event.keys))
        assert event.medium == "CPU"
    return stored, removed


def test_prepare_store_gives_fresh_slots_and_hides_blocks_until_complete_store(
    ledger: CPUOffloadingManager,
) -> None:
    output = ledger.prepare_store(keys(1, 2))
    assert output == PrepareStoreOutput(keys(1, 2), [0, 1], [])
    assert ledger.lookup(keys(1, 2)) == 0
    assert events(ledger) == ([], [])
    ledger.complete_store(keys(1, 2))
    assert ledger.lookup(keys(1, 2, 3)) == 2
    assert ledger.lookup(keys(3, 1)) == 0
    assert ledger.contains(keys(3, 1)) == [False, True]
    assert events(ledger) == ([[1, 2]], [])
    assert ledger.num_used * 2 == ledger.num_blocks


def test_prepare_store_evicts_the_oldest_and_skips_stored_blocks() -> None:
    ledger = CPUOffloadingManager(CAPACITY, LRUPolicy())
    store(ledger, 1, 2)
    output = ledger.prepare_store(keys(2, 3, 4, 5))
    assert output == PrepareStoreOutput(keys(3, 4, 5), [2, 3, 0], keys(1))
    assert events(ledger) == ([[1, 2]], [[1]])


def test_prepare_store_is_atomic_when_everything_else_is_in_flight(
    ledger: CPUOffloadingManager,
) -> None:
    store(ledger, 1, 2)
    ledger.prepare_store(keys(3, 4))
    ledger.prepare_load(keys(2))
    assert ledger.prepare_store(keys(1, 6)) is None
    assert ledger.contains(keys(1, 2, 3, 4, 6)) == [True, True, False, False, False]
    ledger.complete_store(keys(3, 4))
    output = ledger.prepare_store(keys(1, 6))
    assert output is not None
    assert numbers(output.evicted) in ([3], [4])


def test_prepare_load_pins_blocks_until_complete_load() -> None:
    ledger = CPUOffloadingManager(CAPACITY, LRUPolicy())
    store(ledger, 1, 2)
    store(ledger, 2, 3, 4, 5)
    assert ledger.prepare_load(keys(2, 3)) == [1, 2]
    assert ledger.prepare_store(keys(6, 7, 8)) is None
    ledger.complete_load(keys(2, 3))
    output = ledger.prepare_store(keys(6, 7, 8))
    assert output == PrepareStoreOutput(keys(6, 7, 8), [3, 2, 1], keys(2, 3, 4))


def test_a_block_read_by_two_loads_is_idle_after_both(
    ledger: CPUOffloadingManager,
) -> None:
    store(ledger, 1)
    ledger.prepare_load(keys(1))
    ledger.prepare_load(keys(1))
    ledger.complete_load(keys(1))
    assert ledger.prepare_store(keys(2, 3, 4, 5)) is None
    ledger.complete_load(keys(1))
    assert ledger.prepare_store(keys(2, 3, 4, 5)) is not None


def test_a_failed_store_forgets_only_its_own_blocks() -> None:
    ledger = CPUOffloadingManager(CAPACITY, LRUPolicy())
    store(ledger, 5, 6, 7, 8)
    ledger.touch(keys(7, 6, 5))
    events(ledger)
    output = ledger.prepare_store(keys(7, 9))
    assert output is not None
    assert numbers(output.evicted) == [8]
    ledger.complete_store(keys(7, 9), success=False)
    assert ledger.contains(keys(7, 9)) == [True, False]
    assert events(ledger) == ([], [[8]])
    again = ledger.prepare_store(keys(9))
    assert again is not None
    assert again.evicted == []
    assert again.slots == output.slots


def test_a_failed_load_forgets_the_block_after_its_last_reader(
    ledger: CPUOffloadingManager,
) -> None:
    store(ledger, 1, 2)
    ledger.prepare_load(keys(1, 2))
    ledger.prepare_load(keys(1))
    events(ledger)
    ledger.complete_load(keys(1, 2), success=False)
    assert ledger.contains(keys(1, 2)) == [False, False]
    assert events(ledger) == ([], [[2]])
    ledger.complete_load(keys(1))
    assert events(ledger) == ([], [[1]])
    assert ledger.num_used == 0


def test_a_block_of_the_request_that_is_stored_is_never_the_victim(
    ledger: CPUOffloadingManager,
) -> None:
    store(ledger, 1, 2)
    ledger.touch(keys(1))
    output = ledger.prepare_store(keys(2, 3, 4, 5))
    assert output == PrepareStoreOutput(keys(3, 4, 5), [2, 3, 0], keys(1))
    assert ledger.lookup(keys(2)) == 1


def test_touch_keeps_the_beginning_of_a_sequence_longest() -> None:
    ledger = CPUOffloadingManager(CAPACITY, LRUPolicy())
    store(ledger, 1, 2)
    store(ledger, 3, 4)
    ledger.touch(keys(1, 2, 3, 4), is_new_use=False)
    output = ledger.prepare_store(keys(5, 6, 7))
    assert output is not None
    assert numbers(output.evicted) == [4, 3, 2]


def test_reset_refuses_while_a_block_is_copied(ledger: CPUOffloadingManager) -> None:
    store(ledger, 1)
    ledger.prepare_load(keys(1))
    assert not ledger.reset_cache()
    ledger.complete_load(keys(1))
    events(ledger)
    assert ledger.reset_cache()
    assert ledger.lookup(keys(1)) == 0
    assert events(ledger) == ([], [[1]])
    assert store(ledger, 1, 2, 3, 4).slots == [0, 1, 2, 3]


def test_start_over_forgets_all_blocks(ledger: CPUOffloadingManager) -> None:
    store(ledger, 1)
    ledger.prepare_store(keys(2))
    ledger.prepare_load(keys(1))
    events(ledger)
    ledger.on_worker_restart()
    assert events(ledger) == ([], [[1]])
    assert ledger.contains(keys(1, 2)) == [False, False]
    assert ledger.num_used == 0


def test_arc_stored_blocks_are_wanted_once() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2)
    assert (len(policy.once), len(policy.often)) == (2, 0)


def test_arc_pinned_blocks_are_not_evicted() -> None:
    ledger, _ = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    ledger.prepare_load(keys(2, 3))
    assert ledger.prepare_store(keys(6, 7, 8)) is None
    ledger.complete_load(keys(2, 3))
    output = ledger.prepare_store(keys(6, 7, 8))
    assert output is not None
    assert len(output.evicted) >= 1


def test_arc_ghost_hit_raises_the_target() -> None:
    policy = ARCPolicy(2)
    ledger = CPUOffloadingManager(2, policy)
    store(ledger, 1, 2)
    store(ledger, 3)
    assert numbers(policy.once_ghosts) == [1]
    ledger.touch(keys(1))
    assert policy.target == 1.0
    ledger.touch(keys(1))
    ledger.touch(keys(1))
    assert policy.target == 2.0, "bounded by the capacity"
    ledger.touch(keys(1), is_new_use=False)
    assert policy.target == 2.0


def test_arc_evicts_from_once_while_it_is_as_long_as_its_target() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    ledger.touch(keys(3, 4))
    policy.target = 1.0
    output = ledger.prepare_store(keys(5))
    assert output is not None
    assert numbers(output.evicted) == [1]
    assert numbers(policy.once_ghosts) == [1]
    assert key(5) in policy.once


def test_arc_evicts_from_often_where_once_is_shorter_than_its_target() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    ledger.touch(keys(3, 4))
    policy.target = 3.0
    output = ledger.prepare_store(keys(5))
    assert output is not None
    assert numbers(output.evicted) == [4]
    assert numbers(policy.often_ghosts) == [4]
    ledger.complete_store(keys(5))
    ledger.touch(keys(4))
    assert policy.target == 2.0


def test_arc_ghost_that_is_stored_again_counts_as_wanted_often() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    store(ledger, 5)
    store(ledger, 1)
    assert key(1) in policy.often
    assert key(1) not in policy.once_ghosts


def test_arc_touch_order() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    ledger.touch(keys(3, 4))
    ledger.touch(keys(1, 3, 4))
    assert (len(policy.once), len(policy.often)) == (1, 3)
    output = ledger.prepare_store(keys(5))
    assert output == PrepareStoreOutput(keys(5), [1], keys(2))


def test_arc_growth_of_one_sequence_is_no_second_use() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2)
    store(ledger, 3)
    ledger.touch(keys(1, 2, 3), is_new_use=False)
    assert numbers(policy.once) == [3, 2, 1]
    assert not policy.often


def test_arc_failed_store_leaves_the_ghost_of_the_evicted_block() -> None:
    ledger, policy = arc_ledger()
    store(ledger, 1, 2, 3, 4)
    ledger.prepare_store(keys(5))
    ledger.complete_store(keys(5), success=False)
    assert policy.get(key(5)) is None
    assert ledger.lookup(keys(5)) == 0
    assert numbers(policy.once_ghosts) == [1]


def test_arc_keeps_blocks_that_were_used_twice() -> None:
    ledger, _ = arc_ledger()
    store(ledger, 1, 2)
    output = store(ledger, 3, 4, 5)
    assert len(output.evicted) == 1
    ledger.touch(keys(2, 3))
    store(ledger, 6)
    assert ledger.contains(keys(2, 3)) == [True, True]


def test_arc_ghosts_are_bounded() -> None:
    ledger, policy = arc_ledger()
    for block in range(30):
        store(ledger, block)
    assert numbers(policy.once_ghosts) == [22, 23, 24, 25]


def test_discard_leaves_nothing_and_waits_for_copies(ledger: CPUOffloadingManager) -> None:
    store(ledger, 1, 2)
    ledger.prepare_load(keys(2))
    ledger.prepare_store(keys(3))
    events(ledger)
    ledger.discard(keys(1, 2, 3, 9))
    assert ledger.contains(keys(1, 2, 3, 9)) == [False] * 4
    assert events(ledger) == ([], [[1]])
    assert ledger.num_used * 2 == ledger.num_blocks, "slots of running copies are not free yet"
    ledger.complete_load(keys(2))
    ledger.complete_store(keys(3))
    assert events(ledger) == ([], [[2]])
    assert ledger.num_used == 0
    assert store(ledger, 1, 2, 3, 4).keys == keys(1, 2, 3, 4)
