"""Storing only blocks that were looked up often enough (behaviours OFF-14 to OFF-16)."""

from collections.abc import Sequence

import pytest

from engine_core.kv_connector.offload.base import (
    FilterReusedOffloadingManager,
    OffloadKey,
    ReuseTracker,
)
from engine_core.kv_connector.offload.cpu_manager import CPUOffloadingManager
from engine_core.kv_connector.offload.eviction import LRUPolicy
from tests.fakes.offload_rig import OffloadRig

A, B, C, D = (bytes([number]) for number in range(4))


def test_tracker_counts_up_to_the_threshold() -> None:
    tracker = ReuseTracker(threshold=2, max_size=10)
    assert not tracker.reaches_threshold(A)
    tracker.record_lookup(A)
    assert not tracker.reaches_threshold(A)
    assert not tracker.reaches_threshold(A), "`contains` does not count as a lookup"
    tracker.record_lookup(A)
    assert tracker.reaches_threshold(A)
    for _ in range(3):
        tracker.record_lookup(A)
    assert tracker.reaches_threshold(A)
    assert not tracker.reaches_threshold(B)
    once = ReuseTracker(threshold=1, max_size=10)
    once.record_lookup(A)
    assert once.reaches_threshold(A)


def test_tracker_forgets_the_least_recent_lookup() -> None:
    tracker = ReuseTracker(threshold=1, max_size=3)
    for key in (A, B, C, A, D):
        tracker.record_lookup(key)
    assert not tracker.reaches_threshold(B)
    assert tracker.reaches_threshold(A)
    smallest = ReuseTracker(threshold=1, max_size=1)
    smallest.record_lookup(A)
    smallest.record_lookup(B)
    assert not smallest.reaches_threshold(A)
    assert smallest.reaches_threshold(B)


def test_tracker_needs_a_positive_capacity() -> None:
    with pytest.raises(ValueError, match="max_size must be >= 1"):
        ReuseTracker(threshold=2, max_size=0)


def filtered() -> tuple[FilterReusedOffloadingManager, CPUOffloadingManager]:
    backing = CPUOffloadingManager(4, LRUPolicy())
    return FilterReusedOffloadingManager(backing, ReuseTracker(2, 10)), backing


def test_lookup_records_every_key_and_delegates() -> None:
    manager, backing = filtered()
    backing.prepare_store([A, B])
    backing.complete_store([A, B])
    assert manager.lookup([A, B, C]) == 2
    assert manager.lookup([A, B, C]) == 2
    output = manager.prepare_store([C])
    assert output is not None
    assert output.keys == [C], "blocks after the first miss count, too"
    assert manager.contains([A, D]) == [True, False]


def test_prepare_store_passes_on_only_what_reached_the_threshold() -> None:
    manager, _ = filtered()
    manager.lookup([A, B])
    manager.lookup([A])
    output = manager.prepare_store([A, B])
    assert output is not None
    assert output.keys == [A]
    nothing = manager.prepare_store([B])
    assert nothing is not None
    assert nothing.keys == []


def test_everything_else_is_delegated() -> None:
    manager, backing = filtered()
    backing.prepare_store([A, B])
    manager.complete_store([A, B])
    assert [event.removed for event in manager.take_events()] == [False]
    assert manager.usage == 0.5
    assert manager.prepare_load([A]) == [0]
    assert not manager.reset_cache()
    manager.complete_load([A])
    manager.touch([A])
    output = backing.prepare_store([C, D, b"e"])
    assert output is not None
    assert output.evicted == [B]
    manager.on_worker_restart()
    assert backing.usage == 0.0
    assert manager.reset_cache()
    assert manager.medium == "CPU"


@pytest.mark.parametrize("windows", [(None,), (None, 14)])
def test_repeated_lookups_of_a_request_count_once(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for a slow medium is counted and touched only once."""
    rig = OffloadRig(windows=windows, extra={"store_threshold": 2})
    manager = rig.offloading._manager
    assert isinstance(manager, FilterReusedOffloadingManager)
    backing, touched, num_asked = manager._backing, list[bool](), 0
    lookup = backing.lookup

    def slow(keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> int | None:
        nonlocal num_asked
        num_asked += 1
        return lookup(keys) if num_asked > 6 else None

    monkeypatch.setattr(backing, "lookup", slow)
    monkeypatch.setattr(
        backing, "touch", lambda keys, *, is_new_use=True: touched.append(is_new_use)
    )
    request = rig.add_one(list(range(37)), 1)
    while rig.finish_reason_of(request) is None:
        rig.step()
        rig.offloading.process_notifications()
    rig.run_until_idle()
    assert num_asked > 6
    assert touched.count(True) == 1
    assert rig.stores == []
    assert set(manager._tracker._counts.values()) == {1}


def test_discard_is_delegated_for_counted_and_uncounted_keys() -> None:
    manager, backing = filtered()
    backing.prepare_store([A])
    backing.complete_store([A])
    manager.discard([A])
    assert backing.contains([A]) == [False]
