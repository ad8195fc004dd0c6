"""Manager of blocks on a disk: one file for each offloaded block and rank.

The files survive restarts, and other daemons may share the folder. The manager decides from an
index in memory; only the workers and the thread of `DiskFolder` access the disk. If the index is
wrong, a load fails, its blocks are recomputed, and the folder is checked again.

    num_refs   -1 being stored   0 present, possibly on some ranks only   n being loaded
    order      least recently used first, which is also the order of eviction
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from engine_core.kv_connector.offload.base import (
    MAX_BYTES_IN_FLIGHT,
    ManagerContext,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
)
from engine_core.kv_connector.offload.disk_folder import (
    DiskFolder,
    FilesChanged,
    FilesRemoved,
    InitialScan,
    Report,
)
from proto.errors import ConfigError
from proto.runtime.circuit_breaker import CircuitBreaker
from proto.settings.kv_media import DISK, HEADER_BYTES, own_folder
from proto.settings.kv_transfer_config import DiskSettings, disk_settings

SCAN_WAIT_SECONDS: Final = 2.0
"""Time after the start for which requests wait until the folder has been scanned."""
_SLICE: Final = 2000
"""Blocks added to the index at a time, so that a large folder does not delay a step."""
_RETRY_SECONDS: Final = 1.0
_FAILED_LOADS_ALLOWED: Final = 1
_FAILED_STORES_ALLOWED: Final = 2


class _DiskBlock:
    """Index entry of a block on the disk.

    num_refs: loads in flight, -1 while being stored. ranks: bit mask of ranks whose files exist.
    is_suspect: a load has failed. is_bad: discarded during a copy; its files are removed after the
    copy.
    """

    __slots__ = ("is_bad", "is_suspect", "num_refs", "ranks")

    def __init__(self, num_refs: int, ranks: int) -> None:
        self.num_refs = num_refs
        self.ranks = ranks
        self.is_suspect = False
        self.is_bad = False


class DiskOffloadingManager(OffloadingManager):
    """OffloadingManager of a disk.

    folder: scans the folder and removes files. capacity: limit in blocks of all ranks,
    including the files of other models.
    """

    medium = DISK

    def __init__(
        self,
        folder: DiskFolder,
        capacity: int,
        context: ManagerContext,
    ) -> None:
        self._folder = folder
        self._capacity = capacity
        self._file_bytes = HEADER_BYTES + context.block_bytes
        self._all_ranks = (1 << context.num_ranks) - 1
        self._set_bytes = self._file_bytes * context.num_ranks
        self._other_bytes = 0
        self._blocks: OrderedDict[OffloadKey, _DiskBlock] = OrderedDict()
        self._removing: set[OffloadKey] = set()
        self._num_storing = 0
        self.events = []
        self._is_indexed = False
        self._is_scanned = False
        self._unindexed: Iterator[tuple[OffloadKey, int]] = iter(())
        self._notify = context.notify
        self._wait_until = time.monotonic() + SCAN_WAIT_SECONDS
        self._loads = CircuitBreaker(_RETRY_SECONDS, _FAILED_LOADS_ALLOWED)
        self._stores = CircuitBreaker(_RETRY_SECONDS, _FAILED_STORES_ALLOWED)
        self._wait_timer = threading.Timer(SCAN_WAIT_SECONDS, context.notify)
        self._wait_timer.daemon = True
        self._wait_timer.start()

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        self._process_reports()
        if not self._is_indexed and time.monotonic() < self._wait_until:
            return None
        if self._loads.is_open:
            return [False] * len(keys)
        return [self._is_present(key) for key in keys]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        for key in keys:
            assert self._is_present(key), "only present blocks can be loaded"
            self._blocks[key].num_refs += 1
        return []

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        if success:
            self._loads.record_success()
        else:
            self._loads.record_failure()
        suspect: list[OffloadKey] = []
        bad: list[OffloadKey] = []
        for key in keys:
            block = self._blocks[key]
            assert block.num_refs > 0, "the load was not prepared"
            block.num_refs -= 1
            block.is_suspect |= not success
            if block.is_suspect and not block.num_refs:
                self._drop(key)
                (bad if block.is_bad else suspect).append(key)
        self._remove(bad)
        self._check_files(suspect)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self._process_reports()
        if not self._is_indexed or self._stores.is_open or self._is_busy:
            return None
        wanted = [key for key in dict.fromkeys(keys) if self._is_storable(key)]
        num_more = sum(key not in self._blocks for key in wanted)
        victims = self._victims(len(self._blocks) + num_more, frozenset(keys))
        if victims is None:
            return None
        for key in victims:
            self._drop(key)
        self._remove(victims)
        for key in wanted:
            self._blocks.pop(key, None)
            self._blocks[key] = _DiskBlock(-1, 0)
        self._num_storing += len(wanted)
        return PrepareStoreOutput(wanted, [], victims)

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        if success:
            self._stores.record_success()
        elif not cancelled:
            self._stores.record_failure()
        changed: list[OffloadKey] = []
        bad: list[OffloadKey] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.num_refs != -1:
                continue
            self._num_storing -= 1
            (bad if block.is_bad else changed).append(key)
            if success and not block.is_bad:
                block.num_refs, block.ranks = 0, self._all_ranks
            else:
                del self._blocks[key]
        self._remove(bad)
        if not success:
            self._check_files(changed)
        elif changed:
            self.events.append(OffloadingEvent(changed, False, self.medium))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove corrupt blocks; files that are being read or written go after the copy."""
        idle = []
        for key in dict.fromkeys(keys):
            block = self._blocks.get(key)
            if block is not None and block.num_refs:
                block.is_suspect = block.is_bad = True
                continue
            if block is not None:
                self._drop(key)
            if key not in self._removing:
                idle.append(key)
        self._remove(idle)

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._process_reports()
        return super().take_events()

    def reset_cache(self) -> bool:
        self._process_reports()
        if any(block.num_refs for block in self._blocks.values()):
            return False
        present = [key for key in self._blocks if self._is_present(key)]
        if present:
            self.events.append(OffloadingEvent(present, True, self.medium))
        self._blocks.clear()
        self._is_indexed = self._is_scanned = False  # until the folder is scanned again
        self._wait_until = time.monotonic()
        self._folder.clear()
        return True

    def on_worker_restart(self) -> None:
        suspect = [
            key for key, block in self._blocks.items() if block.num_refs < 0 or block.is_suspect
        ]
        bad = [key for key in suspect if self._blocks[key].is_bad]
        for key in suspect:
            self._drop(key)
        for block in self._blocks.values():
            block.num_refs = 0
        self._num_storing = 0
        self._remove(bad)
        self._check_files([key for key in suspect if key not in self._removing])

    def close(self) -> None:
        self._wait_timer.cancel()
        self._folder.close()

    @property
    def num_blocks(self) -> int:
        return self._capacity

    @property
    def num_used(self) -> int:
        """Blocks on the disk, and how many more the files of other models would be."""
        return len(self._blocks) + -(-self._other_bytes // self._set_bytes)

    @property
    def _is_busy(self) -> bool:
        return self._num_storing * self._file_bytes > MAX_BYTES_IN_FLIGHT

    def _is_present(self, key: OffloadKey) -> bool:
        block = self._blocks.get(key)
        return (
            block is not None
            and block.num_refs >= 0
            and block.ranks == self._all_ranks
            and not block.is_suspect
        )

    def _is_storable(self, key: OffloadKey) -> bool:
        """Whether a block should be stored: it is not present, being stored or being removed."""
        block = self._blocks.get(key)
        if block is None:
            return key not in self._removing
        return not block.num_refs and block.ranks != self._all_ranks

    def _victims(
        self, num_blocks: int, protected: frozenset[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Return the blocks to evict so that `num_blocks` fit; None if too few are idle."""
        others = -(-self._other_bytes // self._set_bytes)
        num_over = num_blocks + others - self._capacity
        if num_over > 0 and others:
            freed = min(self._other_bytes, num_over * self._set_bytes)
            self._folder.remove_others(freed)
            self._other_bytes -= freed
            num_over = num_blocks + -(-self._other_bytes // self._set_bytes) - self._capacity
        if num_over <= 0:
            return []
        victims = []
        for key, block in self._blocks.items():
            if not block.num_refs and key not in protected:
                victims.append(key)
                if len(victims) == num_over:
                    return victims
        return None

    def _drop(self, key: OffloadKey) -> None:
        block = self._blocks.pop(key)
        if block.ranks == self._all_ranks:
            self.events.append(OffloadingEvent([key], True, self.medium))

    def _remove(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._removing.update(keys)
            self._folder.remove(keys)

    def _check_files(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._folder.check_files(keys)

    def _process_reports(self) -> None:
        """Apply reports of the folder thread; the initial scan in slices, to keep steps short."""
        if self._is_scanned and not self._is_indexed:
            self._index_slice()
        else:
            for report in self._folder.pop_reports():
                self._apply_report(report)
                if isinstance(report, InitialScan):
                    return

    def _index_slice(self) -> None:
        entries = list(islice(self._unindexed, _SLICE))
        for key, ranks in entries:
            self._add_files(key, ranks)
        if len(entries) == _SLICE:
            self._notify()
        else:
            self._is_indexed = True
            self._evict_surplus()

    def _apply_report(self, report: Report) -> None:
        match report:
            case InitialScan(blocks, others):
                self._other_bytes = others
                self._is_scanned = True
                self._unindexed = iter(blocks.items())
                self._index_slice()
            case FilesChanged(added, removed):
                for key, bit in added:
                    self._add_files(key, bit)
                for key, bit in removed:
                    self._remove_file(key, bit)
                self._evict_surplus()
            case FilesRemoved(keys):
                self._removing.difference_update(keys)

    def _add_files(self, key: OffloadKey, ranks: int) -> None:
        """Record that files of a block exist, unless the block is being removed."""
        if key in self._removing:
            return
        block = self._blocks.setdefault(key, _DiskBlock(0, 0))
        if block.num_refs < 0 or block.ranks == self._all_ranks:
            return
        block.ranks |= ranks
        if block.ranks == self._all_ranks:
            self.events.append(OffloadingEvent([key], False, self.medium))

    def _remove_file(self, key: OffloadKey, bit: int) -> None:
        """Record that a file is gone: loads of its block in flight fail, and no more start."""
        block = self._blocks.get(key)
        if block is None or block.num_refs < 0:
            return
        if block.num_refs:
            block.is_suspect = True
        else:
            self._drop(key)

    def _evict_surplus(self) -> None:
        """Evict blocks if other daemons have filled the folder beyond the limit."""
        victims = self._victims(len(self._blocks), frozenset())
        for key in victims or []:
            self._drop(key)
        self._remove(victims or [])


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> DiskOffloadingManager:
    """Create the manager and start its folder thread; raises ConfigError naming the wrong key."""
    settings: DiskSettings = disk_settings(extra)
    num_bytes = int(settings.disk_bytes_to_use * context.share)
    set_bytes = (HEADER_BYTES + context.block_bytes) * context.num_ranks
    if num_bytes < set_bytes:
        raise ConfigError(
            f"--kv-transfer-config: disk_bytes_to_use is {num_bytes}, less than one "
            f"{'state' if context.holds_states else 'block'} takes ({set_bytes})"
        )
    capacity = num_bytes // set_bytes
    folder = DiskFolder(own_folder(settings.disk_path), context)
    folder.start()
    return DiskOffloadingManager(folder, capacity, context)
