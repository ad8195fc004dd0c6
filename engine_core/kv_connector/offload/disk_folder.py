"""Keeps house in the folder of a disk medium, on a thread, so that the engine never waits for it.

Finds the blocks that are there, removes those that are to go, and sees what other daemons add to
the folder or take from it. Tells the engine by reports; knows nothing of who needs a block.

    start   every file, oldest first, is one report; leavings of the dead are removed
    then    orders of the ledger; about every second the folders that have changed are listed
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from engine_core.kv_connector.offload.base import OffloadKey
from proto.kv_media import TEMPORARY, file_name, is_media_folder, parse_file_name

logger = logging.getLogger("tokend.kv_media")

_ABANDONED_SECONDS: Final = 600.0
"""After which nobody writes to such a file any more."""
_LOOK_SECONDS: Final = 1.0
_REST: Final = 20.0
"""Looking may take a twentieth of the time, where there is much to see."""
_NICENESS: Final = 10
_STOP_SECONDS: Final = 0.5


class Found(NamedTuple):
    """All there was. blocks: the ranks of each key, oldest first. others: bytes of other models."""

    blocks: OrderedDict[OffloadKey, int]
    others: int


class Seen(NamedTuple):
    """Files that have come or gone since, as (key, bit of the rank)."""

    added: list[tuple[OffloadKey, int]]
    removed: list[tuple[OffloadKey, int]]


class Removed(NamedTuple):
    """Keys whose files are gone, as ordered."""

    keys: list[OffloadKey]


Report = Found | Seen | Removed
Order = Callable[[], None]


class DiskFolder:
    """root: of all models. folder: of this one. ring: is called when there are reports."""

    def __init__(self, root: Path, name: str, num_ranks: int, ring: Callable[[], None]) -> None:
        self._root = root
        self._folder = root / name
        self._num_ranks = num_ranks
        self._ring = ring
        self._commands: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._listed: dict[str, _Listing] = {}
        self._others: list[_File] = []
        self._thread = threading.Thread(target=self._run, name="kv disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take_reports(self) -> Iterator[Report]:
        """What has been found out since the last call."""
        while not self._reports.empty():
            yield self._reports.get_nowait()

    def remove(self, keys: list[OffloadKey]) -> None:
        """Remove the files of these; a report says when they are gone."""
        self._commands.put(lambda: self._remove(keys))

    def look_at(self, keys: list[OffloadKey]) -> None:
        """Report which files of these there are."""
        self._commands.put(lambda: self._look_at(keys))

    def remove_others(self, num_bytes: int) -> None:
        """Make room by removing the oldest blocks of other models."""
        self._commands.put(lambda: self._remove_others(num_bytes))

    def clear(self) -> None:
        """Remove every block of this model; a report says what is there then."""
        self._commands.put(self._clear)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._carried_out(self._find_all)
        pause = _LOOK_SECONDS
        next_look = time.monotonic() + pause
        while True:
            try:
                order = self._commands.get(timeout=max(0.0, next_look - time.monotonic()))
            except queue.Empty:
                begun = time.monotonic()
                self._carried_out(self._look_around)
                pause = max(_LOOK_SECONDS, _REST * (time.monotonic() - begun))
                next_look = time.monotonic() + pause
                continue
            if order is None:
                return
            self._carried_out(order)

    def _carried_out(self, order: Order) -> None:
        """One that fails ends only itself; those that somebody waits for report all the same."""
        try:
            order()
        except Exception as error:  # without this thread nothing would be stored any more
            logger.warning("disk: %s", error, exc_info=not isinstance(error, OSError))

    def _find_all(self) -> None:
        try:
            self._report(self._found())
        except BaseException:
            self._report(Found(OrderedDict(), 0))
            raise

    def _found(self) -> Found:
        self._listed.clear()
        now = self._file_system_time()
        files = []
        for shard in _folders(self._folder):
            mtime = os.stat(shard).st_mtime_ns
            names = set()
            for file in _files(shard):
                parsed = _block_of(shard, file.name)
                if parsed is not None and parsed[1] < self._num_ranks:
                    names.add(file.name)
                    files.append((file.mtime_ns, *parsed))
                elif file.name.endswith(TEMPORARY) and now - file.mtime_ns > _ABANDONED_NS:
                    with suppress(OSError):
                        os.unlink(file.path)
            self._listed[shard] = _Listing(mtime, names, settled=False)
        files.sort()
        blocks: OrderedDict[OffloadKey, int] = OrderedDict()
        for _, key, rank in files:
            blocks[key] = blocks.pop(key, 0) | 1 << rank
        self._others = sorted(self._files_of_others())
        return Found(blocks, sum(each.size for each in self._others))

    def _file_system_time(self) -> int:
        """Nanoseconds, by the clock that names its files' times; 0 where nothing can be written."""
        probe = self._folder / f"{os.urandom(4).hex()}{TEMPORARY}"
        try:
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return 0
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
            os.unlink(probe)

    def _files_of_others(self) -> Iterator["_File"]:
        for folder in _folders(self._root):
            if is_media_folder(Path(folder).name) and folder != str(self._folder):
                for shard in _folders(folder):
                    yield from _files(shard)

    def _look_around(self) -> None:
        for shard in _folders(self._folder):
            before = self._listed.get(shard, _NOTHING)
            try:
                mtime = os.stat(shard).st_mtime_ns
                if mtime == before.mtime_ns and before.settled:
                    continue
                names = {each for each in os.listdir(shard) if _block_of(shard, each) is not None}
            except OSError:
                continue
            # once more after a change: a folder's time does not tell two quick ones apart
            self._listed[shard] = _Listing(mtime, names, settled=mtime == before.mtime_ns)
            added = self._bits(names - before.names)
            removed = self._bits(before.names - names)
            if added or removed:
                self._report(Seen(added, removed))

    def _bits(self, names: set[str]) -> list[tuple[OffloadKey, int]]:
        parsed = [each for each in map(parse_file_name, names) if each is not None]
        return [(key, 1 << rank) for key, rank in parsed if rank < self._num_ranks]

    def _paths(self, key: OffloadKey) -> list[str]:
        return [os.path.join(self._folder, file_name(key, r)) for r in range(self._num_ranks)]

    def _remove(self, keys: list[OffloadKey]) -> None:
        try:
            for path in (path for key in keys for path in self._paths(key)):
                with suppress(OSError):
                    os.unlink(path)
        finally:
            self._report(Removed(keys))

    def _look_at(self, keys: list[OffloadKey]) -> None:
        added = [
            (key, 1 << rank)
            for key in keys
            for rank, path in enumerate(self._paths(key))
            if os.path.exists(path)
        ]
        self._report(Seen(added, []))

    def _remove_others(self, num_bytes: int) -> None:
        while num_bytes > 0 and self._others:
            file = self._others.pop(0)
            num_bytes -= file.size
            with suppress(OSError):
                os.unlink(file.path)

    def _clear(self) -> None:
        try:
            for shard in _folders(self._folder):
                for file in _files(shard):
                    if _block_of(shard, file.name) is not None:
                        with suppress(OSError):
                            os.unlink(file.path)
        finally:
            self._find_all()

    def _report(self, report: Report) -> None:
        self._reports.put(report)
        self._ring()


class _Listing(NamedTuple):
    mtime_ns: int
    names: set[str]
    settled: bool


class _File(NamedTuple):
    mtime_ns: int
    path: str
    name: str
    size: int


_NOTHING: Final = _Listing(-1, set(), settled=False)
_ABANDONED_NS: Final = int(_ABANDONED_SECONDS * 1e9)


def _block_of(shard: str, name: str) -> tuple[OffloadKey, int] | None:
    """Key and rank of a file that is a block's, and lies where that would be looked for."""
    parsed = parse_file_name(name)
    if parsed is None or file_name(*parsed) != f"{os.path.basename(shard)}/{name}":
        return None
    return parsed


def _folders(folder: Path | str) -> Iterator[str]:
    """Those in a folder; none where it is not there."""
    try:
        with os.scandir(folder) as entries:
            yield from [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("disk: %s", error)


def _files(folder: str) -> Iterator[_File]:
    """Those in a folder that are still there when they are looked at."""
    with os.scandir(folder) as entries:
        for each in entries:
            with suppress(OSError):
                facts = each.stat(follow_symlinks=False)
                yield _File(facts.st_mtime_ns, each.path, each.name, facts.st_size)
