"""Blocks as files: they load unchanged or not at all, and a failing disk delays no step."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto.errors import ConfigError
from tests.fakes.kv_media import Rank, key
from worker.kv_connector.offload.disk_medium import DiskMedium, make_handlers


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(factor: int = 1, rank: int = 0, num_ranks: int = 1, **extra: object) -> Rank:
        extra = {"disk_path": str(tmp_path / "kv"), "disk_bytes_to_use": 1 << 30} | extra
        ranks.append(Rank(make_handlers, extra, "disk", factor, rank, num_ranks))
        return ranks[-1]

    yield make
    for each in ranks:
        each.close()


@pytest.mark.parametrize("factor", [1, 4])
def test_blocks_are_loaded_unchanged(make_rank: Callable[..., Rank], factor: int) -> None:
    rank = make_rank(factor)
    stored = list(range(1, 1 + 2 * factor))
    assert rank.stored(stored, [key(1), key(2)])
    into = list(range(8, 8 + 2 * factor)) if factor == 1 else [11, 10, 13, 12, 15, 14, 17, 16]
    assert rank.loaded(into, [key(1), key(2)]) == []
    assert [rank.bytes_of(each) for each in into] == [rank.bytes_of(each) for each in stored]


def test_a_load_may_start_and_end_inside_offloaded_blocks(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(4)
    assert rank.stored([1, 2, 3, 4, 5, 6, 7, 8], [key(1), key(2)])
    before = rank.bytes_of(15)
    assert rank.loaded([10, 11, 12], [key(1), key(2)], skip=3) == []
    assert [rank.bytes_of(each) for each in (10, 11, 12)] == [
        rank.bytes_of(each) for each in (4, 5, 6)
    ]
    assert rank.bytes_of(15) == before


def test_another_process_loads_the_stored_blocks(make_rank: Callable[..., Rank]) -> None:
    first, second = make_rank(), make_rank()
    assert first.stored([3], [key(7)])
    assert second.loaded([9], [key(7)]) == []
    assert second.bytes_of(9) == first.bytes_of(3)


def test_every_rank_has_its_own_files(make_rank: Callable[..., Rank], tmp_path: Path) -> None:
    ranks = [make_rank(rank=each, num_ranks=2) for each in (0, 1)]
    assert ranks[0].stored([1], [key(1)])
    assert ranks[1].loaded([5], [key(1)]) == [5]
    assert ranks[1].stored([2], [key(1)])
    assert ranks[1].loaded([5], [key(1)]) == []
    assert ranks[1].bytes_of(5) == ranks[1].bytes_of(2)
    assert [each.suffix for each in files(tmp_path)] == [".0", ".1"]


def test_files_are_private_and_temporary_files_are_removed(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    rank = make_rank()
    assert rank.stored([1, 2, 3], [key(1), key(2), key(300)])
    found = files(tmp_path)
    assert len(found) == 3
    assert {each.stat().st_mode & 0o777 for each in found} == {0o600}
    folders = [each for each in (tmp_path / "kv").rglob("*") if each.is_dir()]
    assert {each.stat().st_mode & 0o777 for each in [tmp_path / "kv", *folders]} == {0o700}


def test_a_file_is_complete_before_it_is_renamed(
    make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    rename = os.rename

    def recording_rename(old: str, new: str) -> None:
        assert not os.path.exists(new)
        seen.append((new, os.path.getsize(old)))
        rename(old, new)

    monkeypatch.setattr(os, "rename", recording_rename)
    assert make_rank().stored([1], [key(1)])
    assert [(str(each), each.stat().st_size) for each in files(tmp_path)] == seen


def damage(kind: str, path: Path) -> None:
    content = bytearray(path.read_bytes())
    match kind:
        case "torn":
            del content[len(content) // 2 :]
        case "header only":
            del content[256:]
        case "empty":
            content.clear()
        case "zeros at the end":
            content[-100:] = bytes(100)
        case "bit flip":
            content[-5] ^= 4
        case "bit flip in the header":
            content[30] ^= 1
        case "longer":
            content += b"more"
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind",
    [
        "torn",
        "header only",
        "empty",
        "zeros at the end",
        "bit flip",
        "bit flip in the header",
        "longer",
    ],
)
def test_a_damaged_file_fails_its_block_and_is_removed(
    make_rank: Callable[..., Rank], tmp_path: Path, kind: str
) -> None:
    rank = make_rank()
    assert rank.stored([1, 2, 3], [key(1), key(2), key(3)])
    paths = {each.name.split(".")[0]: each for each in files(tmp_path)}
    damage(kind, paths[key(2).hex()])
    before = rank.bytes_of(9)
    assert rank.loaded([8, 9, 10], [key(1), key(2), key(3)]) == [9]
    assert rank.bytes_of(9) == before, "unverified bytes are not written"
    assert rank.bytes_of(10) == rank.bytes_of(3)
    assert not paths[key(2).hex()].exists()
    assert rank.stored([2], [key(2)])
    assert rank.loaded([9], [key(2)]) == []


def test_a_missing_file_fails_its_block(make_rank: Callable[..., Rank], tmp_path: Path) -> None:
    rank = make_rank()
    assert rank.stored([1, 2], [key(1), key(2)])
    files(tmp_path)[0].unlink()
    assert rank.loaded([8, 9], [key(1), key(2)]) == [8]


def test_a_file_of_another_model_is_refused(make_rank: Callable[..., Rank], tmp_path: Path) -> None:
    rank = make_rank()
    assert rank.stored([1, 2], [key(1), key(2)])
    one, two = files(tmp_path)
    two.write_bytes(one.read_bytes())
    assert rank.loaded([9], [key(2)]) == [9]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_failed_store_leaves_no_file(
    make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rank = make_rank()
    write = os.write
    written = []

    def full(descriptor: int, data: memoryview) -> int:
        if written:
            raise OSError(number, os.strerror(number))
        written.append(write(descriptor, data[:100]))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not rank.stored([1, 2], [key(1), key(2)])
    assert files(tmp_path) == []
    assert rank.loaded([9], [key(1)]) == [9]
    assert rank.stored([1, 2], [key(1), key(2)]), "there is room again"


def test_an_unexpected_failure_ends_its_copy_and_no_later_one(
    make_rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = make_rank()

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a fault of the medium")

    with monkeypatch.context() as patch:
        patch.setattr(DiskMedium, "write_block", fail)
        patch.setattr(DiskMedium, "read_blocks", fail)
        assert not rank.stored([1], [key(1)])
        assert rank.loaded([2], [key(1)]) == [2]
    assert "a fault of the medium" in caplog.text
    assert "Traceback" in caplog.text
    assert rank.stored([1], [key(1)])
    assert rank.loaded([2], [key(1)]) == []


def test_without_a_folder_stores_are_skipped_and_loads_fail(
    make_rank: Callable[..., Rank],
) -> None:
    rank = make_rank(disk_path="/proc/no/such/folder")
    assert not rank.stored([1], [key(1)])
    assert rank.loaded([2], [key(1)]) == [2]


class SlowReads:
    """Replaces os.preadv with one that blocks until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.reached.set()
        self.go.wait()
        return self._read(descriptor, buffers, offset)


def test_a_load_that_times_out_never_writes_to_the_cache(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(load_timeout=0.2)
    assert rank.stored([1, 2], [key(1), key(2)])
    disk = SlowReads(monkeypatch)
    before = rank.bytes_of(9)
    rank.start_copy(True, [9], [key(1)])
    assert disk.reached.wait(10)
    rank.start_copy(True, [10], [key(2)])
    first, second = rank.wait_for_copy(), rank.wait_for_copy()
    assert first.failed_blocks == [9]
    assert second.failed_blocks == [10], "the timeout includes the time in the queue"
    disk.go.set()
    assert rank.loaded([11], [key(2)]) == [], "the disk answers again"
    assert rank.bytes_of(9) == before


def test_waiting_for_a_hung_load_ends_at_its_timeout(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(load_timeout=0.2)
    assert rank.stored([1], [key(1)])
    disk = SlowReads(monkeypatch)
    job = rank.start_copy(True, [9], [key(1)])
    rank.load.wait({job, 12345})
    assert rank.wait_for_copy().failed_blocks == [9]
    disk.go.set()


def test_stores_are_cancelled_at_once_when_waited_for(
    make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(store_timeout=1000.0)
    write, reached, go = os.write, threading.Event(), threading.Event()

    def slow(descriptor: int, data: memoryview) -> int:
        reached.set()
        go.wait()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    writing = rank.start_copy(False, [1, 2], [key(1), key(2)])
    assert reached.wait(10)
    queued = rank.start_copy(False, [3], [key(3)])
    rank.store.wait({writing, queued})
    rank.cache.buffer.zero_()  # a step may overwrite the cache from here on
    results = rank.store.get_finished()
    assert [each.job_id for each in results if not each.succeeded] == [writing, queued]
    assert all(each.cancelled for each in results), "cancelled is not failed"
    go.set()
    rank.close()
    assert [each.name.split(".")[0] for each in files(tmp_path)] in ([], [key(1).hex()])


def test_stores_that_wait_too_long_for_a_slow_disk_are_dropped(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(store_timeout=0.2)
    write, go = os.write, threading.Event()

    def slow(descriptor: int, data: memoryview) -> int:
        go.wait()
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow)
        for number in range(1, 6):
            rank.start_copy(False, [number], [key(number)])
        assert not any(rank.wait_for_copy().succeeded for _ in range(5))
        go.set()
    assert rank.stored([1], [key(1)])


def test_closing_does_not_wait_for_a_hung_disk(
    make_rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(load_timeout=1000.0)
    assert rank.stored([1], [key(1)])
    disk = SlowReads(monkeypatch)
    rank.start_copy(True, [9], [key(1)])
    assert disk.reached.wait(10)
    before = rank.bytes_of(9)
    rank.close()
    disk.go.set()
    for thread in rank.load._threads:
        thread.join(10)
    assert rank.bytes_of(9) == before


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"disk_path": "relative"}, "kv_connector_extra_config.disk_path must be an absolute"),
        ({"disk_path": 5}, r"Expected `str`, got `int` - at `\$.disk_path`"),
        ({"disk_bytes": 5}, "disk_bytes is not known to DiskOffloadingSpec; it has disk_path"),
        ({"disk_bytes_to_use": 0}, "disk_bytes_to_use must be at least 1, got 0"),
        ({"load_timeout": 0}, "load_timeout must be more than 0"),
    ],
)
def test_invalid_settings_are_named(
    make_rank: Callable[..., Rank], extra: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rank(**extra)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o2772])
def test_a_folder_writable_by_others_is_refused(
    make_rank: Callable[..., Rank], tmp_path: Path, mode: int
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(ConfigError, match=f"disk_path .* by others \\(mode {mode:04o}\\)"):
        make_rank()
    (tmp_path / "kv").chmod(0o755)
    make_rank()


@pytest.mark.parametrize("mode", [0o770, 0o2775])
def test_a_group_writable_folder_gets_a_private_subfolder(
    make_rank: Callable[..., Rank], tmp_path: Path, mode: int
) -> None:
    """As in a Kubernetes volume with an fsGroup, which makes files accessible to the group."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    rank = make_rank()
    assert rank.stored([1, 2], [key(1), key(2)])
    own = tmp_path / "kv" / f"tokend-{os.geteuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    first, second = files(tmp_path)
    assert {own} == {each.parents[2] for each in (first, second)}
    own.chmod(0o2770)
    first.chmod(0o660)
    again = make_rank()
    assert own.stat().st_mode & 0o777 == 0o700
    failed = [*again.loaded([3], [key(1)]), *again.loaded([4], [key(2)])]
    assert len(failed) == 1, "files that the group could write are not trusted"


def test_a_symlink_in_place_of_the_private_subfolder_is_refused(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o770)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kv" / f"tokend-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a folder"):
        make_rank()


def test_a_folder_of_another_user_is_refused(
    make_rank: Callable[..., Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"disk_path .* belongs to user"):
        make_rank()


def test_blocks_are_not_stored_in_a_folder_recreated_by_others(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    rank = make_rank()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    assert not rank.stored([1], [key(1)])
    assert files(tmp_path) == []
