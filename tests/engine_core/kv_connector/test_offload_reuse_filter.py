"""Storing only blocks that were looked up often enough (behaviours OFF-14 to OFF-16)."""

from collections.abc import Sequence

import pytest

from engine_core.kv_connector.offload.base import OffloadKey, ReuseTracker
from tests.fakes.offload_rig import OffloadRig

A, B, C, D = (bytes([number]) for number in range(4))


def test_tracker_counts_up_to_the_threshold() -> None:
    tracker = ReuseTracker(threshold=2, max_size=10)
    assert not tracker.reaches_threshold(A)
    tracker.record_lookup(A)
    assert not tracker.reaches_threshold(A)
    assert not tracker.reaches_threshold(A), "a look does not count"
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


@pytest.mark.parametrize("windows", [(None,), (None, 14)])
def test_repeated_lookups_of_a_request_count_once(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for a slow medium is counted and touched only once."""
    rig = OffloadRig(windows=windows, extra={"store_threshold": 2})
    manager, touched, num_asked = rig.offloading._manager, list[bool](), 0
    reuse, lookup = rig.offloading._loads._reuse, manager.lookup
    assert reuse is not None

    def slow(keys: Sequence[OffloadKey]) -> int | None:
        nonlocal num_asked
        num_asked += 1
        return lookup(keys) if num_asked > 6 else None

    monkeypatch.setattr(manager, "lookup", slow)
    monkeypatch.setattr(
        manager, "touch", lambda keys, *, is_new_use=True: touched.append(is_new_use)
    )
    request = rig.add_one(list(range(37)), 1)
    while rig.finish_reason_of(request) is None:
        rig.step()
        rig.offloading.process_notifications()
    rig.run_until_idle()
    assert num_asked > 6
    assert touched.count(True) == 1
    assert rig.stores == []
    assert set(reuse._counts.values()) == {1}
