"""A thread that scans and cleans the folder of a disk medium; the engine never blocks on the disk.

It finds existing blocks, removes files on command, and detects files that other daemons add or
remove. The manager reads its reports.

    start   one report of all files, oldest first; abandoned temporary files are removed
    then    commands of the manager; changed subfolders are listed about once a second
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

from engine_core.kv_connector.offload.base import ManagerContext, OffloadKey
from proto.settings.kv_media import TEMPORARY, file_name, is_media_folder, parse_file_name

logger = logging.getLogger("tokend.kv_media")

_ABANDONED_SECONDS: Final = 600.0
"""Age after which a temporary file is left over from a process that died."""
_RESCAN_SECONDS: Final = 1.0
_RESCAN_PAUSE: Final = 20.0
"""Pause after a rescan, as a multiple of its duration."""
_NICENESS: Final = 10
_STOP_SECONDS: Final = 0.5


class InitialScan(NamedTuple):
    """Result of a complete scan.

    blocks: bit mask of ranks for each key, oldest first. others: bytes of other models' files.
    """

    blocks: OrderedDict[OffloadKey, int]
    others: int


class FilesChanged(NamedTuple):
    """Files added or removed since the last report, as (key, bit of the rank)."""

    added: list[tuple[OffloadKey, int]]
    removed: list[tuple[OffloadKey, int]]


class FilesRemoved(NamedTuple):
    """Keys whose files were removed by a command."""

    keys: list[OffloadKey]


Report = InitialScan | FilesChanged | FilesRemoved
Command = Callable[[], None]


class DiskFolder:
    """Thread that scans and cleans the folder of one model.

    root: folder of all models. context: names the subfolder of this model, and that of its states
    or KV, which another thread cleans. Its `notify` is called after each report.
    """

    def __init__(self, root: Path, context: ManagerContext) -> None:
        self._root = root
        self._folder = root / context.folder
        self._own_folders = (context.folder, context.other_folder)
        self._num_ranks = context.num_ranks
        self._notify = context.notify
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._listed: dict[str, _Listing] = {}
        self._others: list[_File] = []
        self._thread = threading.Thread(target=self._run, name="kv disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pop_reports(self) -> Iterator[Report]:
        """Yield what the thread has found since the last call."""
        while not self._reports.empty():
            yield self._reports.get_nowait()

    def remove(self, keys: list[OffloadKey]) -> None:
        """Remove the files of keys; a FilesRemoved report follows."""
        self._commands.put(lambda: self._remove(keys))

    def check_files(self, keys: list[OffloadKey]) -> None:
        """Report which files of keys exist."""
        self._commands.put(lambda: self._check_files(keys))

    def remove_others(self, num_bytes: int) -> None:
        """Remove the oldest files of other models, to free `num_bytes`."""
        self._commands.put(lambda: self._remove_others(num_bytes))

    def clear(self) -> None:
        """Remove all blocks of this model; an InitialScan report follows."""
        self._commands.put(self._clear)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._run_command(self._report_scan)
        pause = _RESCAN_SECONDS
        next_rescan = time.monotonic() + pause
        while True:
            try:
                command = self._commands.get(timeout=max(0.0, next_rescan - time.monotonic()))
            except queue.Empty:
                started = time.monotonic()
                self._run_command(self._rescan)
                pause = max(_RESCAN_SECONDS, _RESCAN_PAUSE * (time.monotonic() - started))
                next_rescan = time.monotonic() + pause
                continue
            if command is None:
                return
            self._run_command(command)

    def _run_command(self, command: Command) -> None:
        """Run a command; log its errors, because the thread must not die."""
        try:
            command()
        except Exception as error:  # the thread must go on
            unexpected = not isinstance(error, OSError)
            logger.warning("disk %s: %s", self._root, error, exc_info=unexpected)

    def _report_scan(self) -> None:
        try:
            self._report(self._scan())
        except BaseException:
            self._report(InitialScan(OrderedDict(), 0))
            raise

    def _scan(self) -> InitialScan:
        self._listed.clear()
        now = self._file_system_time()
        files = []
        for shard in _subfolders(self._folder):
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
        return InitialScan(blocks, sum(file.size for file in self._others))

    def _file_system_time(self) -> int:
        """Return the file system's current time in nanoseconds; 0 if the folder is not writable."""
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
        for folder in _subfolders(self._root):
            name = os.path.basename(folder)
            if is_media_folder(name) and name not in self._own_folders:
                for shard in _subfolders(folder):
                    yield from _files(shard)

    def _rescan(self) -> None:
        for shard in _subfolders(self._folder):
            before = self._listed.get(shard, _NOT_LISTED)
            try:
                mtime = os.stat(shard).st_mtime_ns
                if mtime == before.mtime_ns and before.settled:
                    continue
                names = {name for name in os.listdir(shard) if _block_of(shard, name) is not None}
            except OSError:
                continue
            # listed again after a change: mtime does not tell two quick changes apart
            self._listed[shard] = _Listing(mtime, names, settled=mtime == before.mtime_ns)
            added = self._bits(names - before.names)
            removed = self._bits(before.names - names)
            if added or removed:
                self._report(FilesChanged(added, removed))

    def _bits(self, names: set[str]) -> list[tuple[OffloadKey, int]]:
        parsed = [block for block in map(parse_file_name, names) if block is not None]
        return [(key, 1 << rank) for key, rank in parsed if rank < self._num_ranks]

    def _paths(self, key: OffloadKey) -> list[str]:
        return [os.path.join(self._folder, file_name(key, r)) for r in range(self._num_ranks)]

    def _remove(self, keys: list[OffloadKey]) -> None:
        try:
            for path in (path for key in keys for path in self._paths(key)):
                with suppress(OSError):
                    os.unlink(path)
        finally:
            self._report(FilesRemoved(keys))

    def _check_files(self, keys: list[OffloadKey]) -> None:
        added = [
            (key, 1 << rank)
            for key in keys
            for rank, path in enumerate(self._paths(key))
            if os.path.exists(path)
        ]
        self._report(FilesChanged(added, []))

    def _remove_others(self, num_bytes: int) -> None:
        while num_bytes > 0 and self._others:
            file = self._others.pop(0)
            num_bytes -= file.size
            with suppress(OSError):
                os.unlink(file.path)

    def _clear(self) -> None:
        try:
            for shard in _subfolders(self._folder):
                for file in _files(shard):
                    if _block_of(shard, file.name) is not None:
                        with suppress(OSError):
                            os.unlink(file.path)
        finally:
            self._report_scan()

    def _report(self, report: Report) -> None:
        self._reports.put(report)
        self._notify()


class _Listing(NamedTuple):
    mtime_ns: int
    names: set[str]
    settled: bool


class _File(NamedTuple):
    mtime_ns: int
    path: str
    name: str
    size: int


_NOT_LISTED: Final = _Listing(-1, set(), settled=False)
_ABANDONED_NS: Final = int(_ABANDONED_SECONDS * 1e9)


def _block_of(shard: str, name: str) -> tuple[OffloadKey, int] | None:
    """Return key and rank of a block's file; None for other files and misplaced ones."""
    parsed = parse_file_name(name)
    if parsed is None or file_name(*parsed) != f"{os.path.basename(shard)}/{name}":
        return None
    return parsed


def _subfolders(folder: Path | str) -> Iterator[str]:
    """Yield the paths of subfolders; none if the folder is missing."""
    try:
        with os.scandir(folder) as entries:
            yield from [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("disk %s: %s", folder, error.strerror)


def _files(folder: str) -> Iterator[_File]:
    """Yield the files of a folder, except those removed meanwhile."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                yield _File(facts.st_mtime_ns, entry.path, entry.name, facts.st_size)
