"""The manager of a disk against real folders, including an index that is wrong."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_core.kv_connector.offload import disk_folder, disk_manager
from engine_core.kv_connector.offload.base import ManagerContext, OffloadingEvent
from engine_core.kv_connector.offload.disk_manager import DiskOffloadingManager, make_manager
from proto.errors import ConfigError
from proto.settings.kv_media import HEADER_BYTES, file_name, media_folder
from tests.fakes.kv_media import FINGERPRINT, eventually, key

BLOCK_BYTES = 100
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


class Disk:
    """A folder, managers that share it, and stand-ins for the workers' file accesses."""

    def __init__(self, root: Path, num_ranks: int = 1) -> None:
        self.root = root
        self.num_ranks = num_ranks
        self.folder = root / media_folder(FINGERPRINT, num_ranks, 1)
        self.rings = 0
        self._open: list[DiskOffloadingManager] = []

    def manager(self, capacity: int = 100, known: bool = True) -> DiskOffloadingManager:
        context = ManagerContext(FINGERPRINT, self.num_ranks, BLOCK_BYTES, self._ring)
        num_bytes = capacity * FILE_BYTES * self.num_ranks
        extra = {"disk_path": str(self.root), "disk_bytes_to_use": num_bytes}
        made = make_manager(extra, context)
        self._open.append(made)
        if known:
            eventually(lambda: made.lookup([key(0)]) is not None)
        return made

    def write(self, *numbers: int, rank: int = 0) -> None:
        for number in numbers:
            path = self.path(number, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(FILE_BYTES))

    def path(self, number: int, rank: int = 0) -> Path:
        return self.folder / file_name(key(number), rank)

    def store(self, manager: DiskOffloadingManager, *numbers: int) -> list[int]:
        """Write files like the workers; return the numbers of the blocks to store."""
        output = manager.prepare_store([key(each) for each in numbers])
        assert output is not None
        stored = [int.from_bytes(each[:32], "big") for each in output.keys]
        for rank in range(self.num_ranks):
            self.write(*stored, rank=rank)
        manager.complete_store(output.keys)
        return stored

    def names(self) -> set[str]:
        return {each.name for each in self.folder.rglob("*.?") if each.is_file()}

    def close(self) -> None:
        for each in self._open:
            each.close()

    def _ring(self) -> None:
        self.rings += 1


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "_RESCAN_SECONDS", 0.05)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "kv")
    yield made
    made.close()


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "kv", num_ranks=2)
    yield made
    made.close()


def run(manager: DiskOffloadingManager, *numbers: int) -> int | None:
    return manager.lookup([key(each) for each in numbers])


def test_lookup_returns_none_during_the_scan_and_notifies_afterwards(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(1)
    scan = disk_manager.DiskFolder.pop_reports
    monkeypatch.setattr(disk_manager.DiskFolder, "pop_reports", lambda self: iter(()))
    manager = disk.manager(known=False)
    assert run(manager, 1) is None
    assert manager.contains([key(1)]) is None
    assert manager.prepare_store([key(2)]) is None
    eventually(lambda: disk.rings > 0)
    monkeypatch.setattr(disk_manager.DiskFolder, "pop_reports", scan)
    assert run(manager, 1) == 1


def test_a_slow_scan_delays_requests_only_briefly(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_manager, "SCAN_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(disk_manager.DiskFolder, "pop_reports", lambda self: iter(()))
    manager = disk.manager(known=False)
    eventually(lambda: disk.rings > 1)  # the end of the scan, and of the wait
    eventually(lambda: run(manager, 1) == 0)


def test_a_restart_finds_stored_blocks_in_the_order_of_last_use(disk: Disk) -> None:
    first = disk.manager()
    assert disk.store(first, 1, 2, 3) == [1, 2, 3]
    for age, number in enumerate((2, 3, 1)):
        os.utime(disk.path(number), (1000.0 + age, 1000.0 + age))
    second = disk.manager(capacity=3)
    assert run(second, 1, 2, 3, 4) == 3
    output = second.prepare_store([key(4)])
    assert output is not None
    assert output.evicted == [key(2)]


def test_many_files_are_scanned_in_slices(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_manager, "_SLICE", 3)
    disk.write(*range(1, 11))
    manager = disk.manager(known=False)
    eventually(lambda: disk.rings > 0)
    answers = [run(manager, *range(1, 11)) for _ in range(4)]
    assert answers[:3] == [None] * 3
    assert answers[3] == 10
    assert disk.rings >= 3


def test_prepare_store_skips_stored_blocks(disk: Disk) -> None:
    manager = disk.manager()
    assert disk.store(manager, 1, 2) == [1, 2]
    output = manager.prepare_store([key(2), key(3), key(3)])
    assert output is not None
    assert (output.keys, output.slots, output.evicted) == ([key(3)], [], [])
    assert run(manager, 1, 2, 3) == 2, "the store is not complete"
    again = manager.prepare_store([key(3)])
    assert again is not None
    assert again.keys == []
    manager.complete_store([key(3)])
    assert run(manager, 1, 2, 3) == 3


def test_prepare_store_evicts_the_least_recently_used_and_the_files_go(disk: Disk) -> None:
    manager = disk.manager(capacity=3)
    disk.store(manager, 1, 2, 3)
    manager.touch([key(1), key(2)])
    output = manager.prepare_store([key(4), key(5)])
    assert output is not None
    assert output.evicted == [key(3), key(2)], "the first block of a sequence is evicted last"
    eventually(lambda: not disk.path(3).exists() and not disk.path(2).exists())
    assert run(manager, 1) == 1
    assert manager.num_used == manager.num_blocks


def test_prepare_store_never_evicts_blocks_being_loaded_or_stored(disk: Disk) -> None:
    manager = disk.manager(capacity=3)
    disk.store(manager, 1, 2, 3)
    manager.prepare_load([key(1)])
    assert manager.prepare_store([key(2), key(3), key(4)]) is None
    output = manager.prepare_store([key(4), key(5)])
    assert output is not None
    assert output.evicted == [key(2), key(3)]
    assert manager.prepare_store([key(6)]) is None, "the others are being stored"
    manager.complete_load([key(1)])
    assert manager.prepare_store([key(6)]) is not None


def test_a_block_being_deleted_is_stored_only_after_its_deletion(disk: Disk) -> None:
    manager = disk.manager(capacity=1)
    disk.store(manager, 1)
    hold: list[list[bytes]] = []
    remove = manager._folder.remove
    manager._folder.remove = hold.append  # type: ignore[method-assign]
    disk.store(manager, 2)
    output = manager.prepare_store([key(1)])
    assert output is not None
    assert output.keys == []
    for keys in hold:
        remove(keys)
    eventually(lambda: disk.store(manager, 1) == [1])
    assert disk.path(1).exists()


def test_a_block_is_present_only_with_the_files_of_all_ranks(two_ranks: Disk) -> None:
    two_ranks.write(1, rank=0)
    two_ranks.write(2, rank=0)
    two_ranks.write(2, rank=1)
    two_ranks.write(3, rank=1)
    manager = two_ranks.manager()
    assert manager.contains([key(1), key(2), key(3)]) == [False, True, False]
    assert two_ranks.store(manager, 1, 2, 3) == [1, 3]
    assert run(manager, 1, 2, 3) == 3


def test_files_of_another_rank_count_are_ignored(two_ranks: Disk) -> None:
    two_ranks.write(1, rank=0)
    two_ranks.write(1, rank=1)
    alone = Disk(two_ranks.root)
    assert run(alone.manager(), 1) == 0
    alone.close()


def test_a_failed_load_forgets_the_block_and_rechecks_the_folder(disk: Disk) -> None:
    manager = disk.manager()
    disk.store(manager, 1, 2)
    disk.path(2).unlink()
    manager.prepare_load([key(1), key(2)])
    manager.complete_load([key(1), key(2)], success=False)
    eventually(lambda: manager.contains([key(1), key(2)]) == [True, False])


def test_an_unreadable_block_is_forgotten_after_its_last_load(disk: Disk) -> None:
    manager = disk.manager()
    disk.store(manager, 1)
    manager.prepare_load([key(1)])
    manager.prepare_load([key(1)])
    manager.complete_load([key(1)], success=False)
    assert run(manager, 1) == 0, "no further load may start"
    disk.path(1).unlink()
    manager.complete_load([key(1)])
    assert disk.store(manager, 1) == [1]


def test_consecutive_load_failures_pause_the_disk(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_manager, "_RETRY_SECONDS", 0.3)
    manager = disk.manager()
    disk.store(manager, 1, 2, 3)
    for number in (1, 2):
        manager.prepare_load([key(number)])
        manager.complete_load([key(number)], success=False)
    assert run(manager, 3) == 0
    eventually(lambda: run(manager, 3) == 1)


def test_consecutive_store_failures_pause_stores(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_manager, "_RETRY_SECONDS", 0.3)
    manager = disk.manager()
    for number in (1, 2, 3):
        output = manager.prepare_store([key(number)])
        assert output is not None
        manager.complete_store(output.keys, success=False)
    assert manager.prepare_store([key(4)]) is None
    assert run(manager, 1) == 0
    eventually(lambda: manager.prepare_store([key(4)]) is not None)


def test_nothing_is_added_to_a_long_queue_of_stores(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_manager, "MAX_BYTES_IN_FLIGHT", 2 * FILE_BYTES)
    manager = disk.manager()
    output = manager.prepare_store([key(1), key(2), key(3)])
    assert output is not None
    assert manager.prepare_store([key(4)]) is None
    manager.complete_store([key(1)])
    assert manager.prepare_store([key(4)]) is not None


def test_files_of_another_daemon_appear_and_vanish(disk: Disk) -> None:
    manager = disk.manager()
    disk.write(1)
    eventually(lambda: run(manager, 1) == 1)
    disk.write(257)
    eventually(lambda: run(manager, 1, 257) == 2)
    disk.path(1).unlink()
    eventually(lambda: run(manager, 1) == 0)
    assert run(manager, 257) == 1


def test_blocks_of_another_daemon_beyond_the_limit_evict_the_oldest(disk: Disk) -> None:
    manager = disk.manager(capacity=2)
    disk.store(manager, 1, 2)
    disk.write(3)
    eventually(lambda: run(manager, 3) == 1)
    eventually(lambda: not disk.path(1).exists())
    assert manager.contains([key(2)]) == [True]


def test_engines_that_share_a_folder_keep_it_within_the_limit_together(disk: Disk) -> None:
    """And each finds what the others have stored."""
    managers = [disk.manager(capacity=20) for _ in range(3)]
    for number in range(1, 91):
        disk.store(managers[number % 3], number)
        if not number % 10:
            eventually(lambda: all(knows_all(disk, each) for each in managers))
            assert len(disk.names()) <= 20
    assert len(disk.names()) > 10, "each engine evicts for what it stores, not for the others"


def knows_all(disk: Disk, manager: DiskOffloadingManager) -> bool:
    """Return whether a manager knows exactly the files of the folder."""
    _ = manager.take_events()
    present = disk.names()
    return manager.num_used == len(present) and all(
        manager.contains([key(number)]) == [True]
        for number in range(1, 91)
        if disk.path(number).name in present
    )


def test_a_start_with_a_smaller_limit_removes_the_oldest(disk: Disk) -> None:
    for number in range(1, 6):
        disk.write(number)
        os.utime(disk.path(number), (1000.0 + number, 1000.0 + number))
    manager = disk.manager(capacity=2)
    assert manager.contains([key(each) for each in range(1, 6)]) == [False] * 3 + [True] * 2
    eventually(lambda: len(disk.names()) == 2)


def test_blocks_of_other_models_count_and_go_first(disk: Disk) -> None:
    other = disk.root / media_folder(bytes(32), 1, 1) / "00"
    other.mkdir(parents=True)
    for number in range(2):
        (other / f"{key(number).hex()}.0").write_bytes(bytes(FILE_BYTES))
        os.utime(other / f"{key(number).hex()}.0", (1000.0 + number, 1000.0 + number))
    unrelated = disk.root / "readme.txt"
    unrelated.write_text("not a block")
    manager = disk.manager(capacity=3)
    disk.store(manager, 1)
    assert manager.num_used == manager.num_blocks
    assert disk.store(manager, 2) == [2]
    eventually(lambda: len(list(other.iterdir())) == 1)
    assert (other / f"{key(1).hex()}.0").exists()
    assert run(manager, 1, 2) == 2
    assert unrelated.exists()


def test_temporary_files_of_dead_processes_only_are_removed(disk: Disk) -> None:
    disk.write(1)
    old, new = (disk.path(1).with_name(f"{each}.new") for each in ("old", "new"))
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (1000.0, 1000.0))
    assert run(disk.manager(), 1) == 1
    assert not old.exists()
    assert new.exists()


def test_files_that_are_not_blocks_are_ignored(disk: Disk) -> None:
    disk.write(1)
    whole = key(7).hex()
    for name in (
        *("x", "zz.0", ".0", "00.x", "00.999999", "00", "00.0", f"{whole}00.0", f"{whole[2:]}.0"),
        *(f"00 {whole[2:-2]}.0", f" {whole}.0", f"{whole}.00", f"{whole}.-1"),
        *(f"{whole[:-2].upper()}FF.0", f"ff{whole[2:]}.0"),  # the latter in another's shard
    ):
        disk.path(1).with_name(name).write_bytes(b"")
    stray = disk.folder / "ab" / "ab.0"
    stray.parent.mkdir()
    stray.write_bytes(b"")
    manager = disk.manager()
    assert run(manager, 1) == 1
    assert [event.keys for event in manager.take_events()] == [[key(1)]]
    stray.with_name("abcd.0").write_bytes(b"")
    disk.write(2)
    eventually(lambda: run(manager, 2) == 1)
    assert [event.keys for event in manager.take_events()] == [[key(2)]]
    manager.reset_cache()
    eventually(lambda: not disk.path(1).exists())
    assert stray.exists()


def test_a_missing_folder_is_an_empty_disk(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "no" / "such")
    assert run(disk.manager(), 1) == 0
    disk.close()


def test_reset_removes_every_block_unless_one_is_being_copied(disk: Disk) -> None:
    manager = disk.manager()
    disk.store(manager, 1, 2)
    manager.prepare_load([key(1)])
    assert not manager.reset_cache()
    manager.complete_load([key(1)])
    output = manager.prepare_store([key(3)])
    assert output is not None
    assert not manager.reset_cache()
    manager.complete_store([key(3)], success=False)
    eventually(lambda: manager.reset_cache())
    assert run(manager, 1) == 0
    eventually(lambda: disk.names() == set())
    eventually(lambda: manager.prepare_store([key(1)]) is not None)


def test_start_over_forgets_copies_that_never_end(disk: Disk) -> None:
    manager = disk.manager(capacity=3)
    disk.store(manager, 1)
    manager.prepare_load([key(1)])
    manager.prepare_store([key(2), key(3)])
    disk.write(2)  # progress of the dead worker
    manager.on_worker_restart()
    eventually(lambda: manager.contains([key(1), key(2), key(3)]) == [True, True, False])
    assert disk.store(manager, 4, 5) == [4, 5], "nothing holds the old ones"


def test_take_events_reports_stored_and_removed_blocks(disk: Disk) -> None:
    manager = disk.manager(capacity=2)
    disk.store(manager, 1, 2)
    disk.store(manager, 3)
    assert list(manager.take_events()) == [
        OffloadingEvent([key(1), key(2)], False, "disk"),
        OffloadingEvent([key(1)], True, "disk"),
        OffloadingEvent([key(3)], False, "disk"),
    ]
    assert list(manager.take_events()) == []


def test_a_limit_below_one_block_is_a_configuration_error(disk: Disk) -> None:
    with pytest.raises(ConfigError, match=r"disk_bytes_to_use must be at least 1"):
        disk.manager(capacity=0)
    context = ManagerContext(FINGERPRINT, 1, BLOCK_BYTES, lambda: None)
    extra = {"disk_path": str(disk.root), "disk_bytes_to_use": FILE_BYTES - 1}
    with pytest.raises(ConfigError, match=f"less than one block takes \\({FILE_BYTES}\\)"):
        make_manager(extra, context)


@pytest.mark.parametrize("seed", range(4))
def test_events_and_lookups_agree_over_random_operations(disk: Disk, seed: int) -> None:
    """Applying the events to a model gives the present blocks; limits always hold."""
    draw = random.Random(seed)
    capacity = 6
    manager = disk.manager(capacity)
    present: set[bytes] = set()
    loading: list[bytes] = []
    storing: list[bytes] = []

    def store() -> None:
        output = manager.prepare_store([key(draw.randrange(1, 15)) for _ in range(3)])
        if output is not None:
            storing.extend(output.keys)

    def end_store() -> None:
        if storing:
            each = storing.pop(draw.randrange(len(storing)))
            success = draw.random() < 0.9
            if success:
                disk.write(int.from_bytes(each[:32], "big"))
            manager.complete_store([each], success=success)

    def load() -> None:
        each = key(draw.randrange(1, 15))
        if manager.contains([each]) == [True]:
            manager.prepare_load([each])
            loading.append(each)

    def end_load() -> None:
        if loading:
            each = loading.pop(draw.randrange(len(loading)))
            manager.complete_load([each], success=draw.random() < 0.9)

    acts: list[Callable[[], None]] = [store, end_store, load, end_load]
    for _ in range(400):
        draw.choice(acts)()
        for event in manager.take_events():
            for each in event.keys:
                assert (each in present) == event.removed, "an event that changes nothing"
            present = present - {*event.keys} if event.removed else present | {*event.keys}
        assert manager.num_used <= manager.num_blocks
        if not manager._loads.is_open:
            answers = manager.contains([key(each) for each in range(1, 15)])
            assert answers is not None
            found = {key(each) for each, there in enumerate(answers, 1) if there}
            assert found <= present
            assert present - found <= set(loading), "only blocks that are in doubt and being read"
    assert not set(loading) & set(storing)


def test_discard_removes_the_files_and_is_no_failure(disk: Disk) -> None:
    manager = disk.manager()
    disk.store(manager, 1, 2, 3)
    manager.prepare_load([key(2)])
    output = manager.prepare_store([key(4)])
    assert output is not None
    disk.write(4)
    for _ in range(4):
        manager.discard([key(1), key(2), key(4), key(5)])
    assert manager.contains([key(each) for each in (1, 2, 3, 4)]) == [False, False, True, False]
    manager.complete_load([key(2)])
    manager.complete_store([key(4)])
    eventually(lambda: disk.names() == {disk.path(3).name})
    manager._folder.check_files([key(each) for each in (1, 2, 4, 5)])
    eventually(lambda: not manager.take_events() and not manager._removing)
    assert (
        manager.contains([key(each) for each in range(1, 6)]) == [False, False, True] + [False] * 2
    )
    assert disk.store(manager, 1, 2, 4) == [1, 2, 4], "the disk is not paused"


def test_discard_removes_files_unknown_to_the_index(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(1, 2)
    hear = disk_manager.DiskFolder.pop_reports
    monkeypatch.setattr(disk_manager.DiskFolder, "pop_reports", lambda self: iter(()))
    manager = disk.manager(known=False)
    manager.discard([key(1)])
    monkeypatch.setattr(disk_manager.DiskFolder, "pop_reports", hear)
    eventually(lambda: manager.contains([key(1), key(2)]) == [False, True])
    eventually(lambda: not disk.path(1).exists())
    assert manager.contains([key(1), key(2)]) == [False, True]


def test_blocks_discarded_during_a_copy_are_removed_when_workers_restart(disk: Disk) -> None:
    manager = disk.manager()
    disk.store(manager, 1)
    manager.prepare_load([key(1)])
    manager.prepare_store([key(2)])
    disk.write(2)
    manager.discard([key(1), key(2)])
    manager.on_worker_restart()
    eventually(lambda: disk.names() == set())
    assert manager.contains([key(1), key(2)]) == [False, False]


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("who knows")])
def test_a_failed_command_affects_no_other(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    manager = disk.manager()
    disk.store(manager, 1)
    files = disk_folder._files

    def fail(folder: str) -> Iterator[disk_folder._File]:
        raise error

    monkeypatch.setattr(disk_folder, "_files", fail)
    assert manager.reset_cache()
    eventually(lambda: manager.prepare_store([key(2)]) is not None)
    monkeypatch.setattr(disk_folder, "_files", files)
    manager.complete_store([key(2)], success=False)
    assert manager.reset_cache()
    eventually(lambda: disk.names() == set())


def test_cancelled_stores_do_not_count_as_failures(disk: Disk) -> None:
    manager = disk.manager()
    for number in range(1, 10):
        output = manager.prepare_store([key(number)])
        assert output is not None, "the disk is paused"
        manager.complete_store(output.keys, success=False, cancelled=True)
    assert run(manager, 1) == 0
