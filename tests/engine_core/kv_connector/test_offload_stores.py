"""Stores: which blocks are copied, when, and which references they keep meanwhile.

Device blocks of 4 tokens, offloaded blocks of 12.
"""

import pytest

from proto.messages.kv_connector import (
    DeviceBlocks,
    FinishedJob,
    KVConnectorOutput,
    OffloadReport,
    pack,
)
from proto.messages.stats import KVCopy, KVTier
from tests.fakes.offload_rig import OffloadRig, device_of

PROMPT = list(range(37))
LATER = 10_000


def test_stores_are_planned_for_full_offloaded_blocks_only() -> None:
    rig = OffloadRig()
    rig.generate(PROMPT)
    (store,) = rig.stores
    assert not store.is_load
    assert store.medium == "CPU"
    assert store.device == [DeviceBlocks(0, list(range(1, 10)))]
    assert store.slots == [[0, 1, 2]]
    rig.assert_idle()


def test_only_what_prepare_store_wants_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = OffloadRig()
    manager = rig.offloading._manager
    prepare = manager.prepare_store
    monkeypatch.setattr(manager, "prepare_store", lambda keys: prepare(keys[1:2]))
    rig.generate(PROMPT)
    assert [device_of(store) for store in rig.stores] == [[4, 5, 6]]


def test_a_growing_request_stores_each_block_once_it_is_full() -> None:
    rig = OffloadRig()
    request = rig.add_one(PROMPT[:12], 26)
    rig.step()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3]]
    while request.num_computed_tokens < 23:
        rig.step()
    assert len(rig.stores) == 1
    rig.step()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6]]
    rig.run_until_idle()
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_full_medium_is_retried_with_new_blocks_only() -> None:
    rig = OffloadRig(num_slots=2, finishes=lambda job: None)
    rig.add_one(PROMPT[:36], 5)
    rig.step()
    assert not rig.stores
    (stats,) = rig.offloading.drain_stats()
    assert (stats.num_unstored, stats.stores) == (3, [])
    assert rig.scheduler.kv_tiers[1] == KVTier("CPU", 2, 0)
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.add_one(PROMPT[:24], 13)
    rig.step()
    assert [device_of(store) for store in rig.stores] != []


def test_touch_keeps_all_blocks_of_a_growing_request_recent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    touched: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        rig.offloading._manager,
        "touch",
        lambda keys, *, is_new_use=True: touched.append((len(keys), is_new_use)),
    )
    request = rig.add_one(PROMPT[:24], 50)
    while request.num_computed_tokens < 72:
        rig.step()
    assert touched == [(2, True), (2, False), (3, False), (4, False), (6, False)]
    assert device_of(rig.stores[-1]) == [16, 17, 18]


def test_a_long_request_is_touched_as_it_grows_by_a_quarter_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = OffloadRig()
    manager, touched = rig.offloading._manager, list[int]()
    monkeypatch.setattr(
        manager, "touch", lambda keys, *, is_new_use=True: touched.append(len(keys))
    )
    rig.generate([each % 900 for each in range(12 * 24)], 12 * 5 + 1)
    assert touched == [24, 24, 29]


def test_stores_begin_with_the_step_that_follows() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    rig.add_one(PROMPT, 5)
    rig.step()
    assert rig.half.put_off
    assert not rig.half.under_way
    assert rig.offloading.needs_step()
    rig.step()
    assert rig.half.under_way
    assert not rig.half.put_off
    assert not rig.offloading.needs_step()


def test_abort_while_storing_keeps_blocks_until_the_copy_ends() -> None:
    rig = OffloadRig(finishes=lambda job: None)
    request = rig.add_one(PROMPT)
    rig.step()
    rig.scheduler.abort_request(request.request_id)
    (store,) = rig.stores
    assert not set(device_of(store)) & set(rig.kv_cache.pool.free_queue)
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()
    rig.reset_prefix_cache()
    assert rig.generate(PROMPT).num_cached_tokens == 36


def test_request_finished_stores_the_last_full_block() -> None:
    """The step that fills the block samples the last token, so no later step can store it."""
    rig = OffloadRig()
    rig.generate(PROMPT[:12], max_tokens=13)
    assert [device_of(store) for store in rig.stores] == [[1, 2, 3], [4, 5, 6]]


def test_handle_preemptions_flushes_the_stores_of_the_victims() -> None:
    rig = OffloadRig(num_blocks=14, finishes=lambda job: None)
    rig.add_one(PROMPT[:13], 20)
    rig.add_one([*range(200, 213)], 20)
    for _ in range(LATER):
        if rig.half.flushed:
            break
        rig.step()
    victims = {store.job_id for store in rig.stores}
    assert set(rig.half.flushed) <= victims
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()


def test_a_copy_ends_when_all_ranks_have_reported() -> None:
    rig = OffloadRig(num_ranks=3, finishes=lambda job: None)
    rig.add_one(PROMPT, 5)
    rig.step()
    rig.step()
    (store,) = rig.half.under_way
    reports = rig.half.finish(store, rig.runner)
    for report in reports:
        assert rig.offloading._manager.num_used > 0
        assert rig.offloading._manager.lookup(store.keys[0]) == 0
        rig.scheduler.update_from_connector(report)
    assert rig.offloading._manager.lookup(store.keys[0]) == 3
    (stats,) = rig.offloading.drain_stats()
    assert stats.stores == [KVCopy(300, 0.5)]
    rig.finishes = lambda job: True
    rig.run_until_idle()
    rig.assert_idle()


def test_a_store_that_failed_on_one_rank_is_forgotten_on_all() -> None:
    rig = OffloadRig(num_ranks=2, finishes=lambda job: False)
    rig.generate(PROMPT)
    assert rig.offloading._manager.num_used == 0
    rig.reset_prefix_cache()
    rig.finishes = lambda job: True
    rig.generate(PROMPT)
    assert not rig.loads


def test_blocks_that_depend_on_an_unfinished_load_are_not_stored() -> None:
    """The load may still fail, so next_block stays where it is until the load is confirmed."""
    rig = OffloadRig()
    rig.trusts = False
    rig.add_one(PROMPT, 20)
    rig.step()
    rig.step()
    assert rig.stores == []
    rig.trusts = True
    rig.step()
    assert [len(device_of(store)) for store in rig.stores] == [9]
    rig.run_until_idle()
    rig.trusts = False
    rig.generate([*range(300, 337)])
    assert len(rig.stores) == 2, "nor when it ends"


@pytest.mark.parametrize("cancelled", [[True, True], [True, False]])
def test_a_store_that_ranks_cancelled_or_finished_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, cancelled: list[bool]
) -> None:
    rig = OffloadRig(num_ranks=3, finishes=lambda job: None)
    rig.add_one(PROMPT, 10)
    rig.step()
    (store,) = rig.stores
    reported: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        rig.offloading._manager,
        "complete_store",
        lambda keys, *, success, cancelled: reported.append((success, cancelled)),
    )
    done = [FinishedJob(store.job_id, False, cancelled=each) for each in cancelled]
    for each in [FinishedJob(store.job_id, True), *done]:
        report = pack(OffloadReport([each]))
        rig.offloading.update_connector_output(KVConnectorOutput(worker_metadata=report))
    assert reported == [(False, all(cancelled))]
