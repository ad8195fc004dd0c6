"""The ledger of a disk: one file for each offloaded block and rank, in a folder that stays.

Decides by what it has in memory; all that touches the disk happens in the workers, or on the
thread that keeps house in the folder. What the ledger believes may be wrong, as others share the
folder: then a load fails, its blocks are computed, and the folder is asked again.

    block      -1 being stored   0 there, or on some ranks only   n being loaded
    order      least recently used first; that is what goes when there is no room
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from engine_core.kv_connector.offload.base import (
    MAX_BYTES_IN_FLIGHT,
    ManagerContext,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
)
from engine_core.kv_connector.offload.disk_folder import DiskFolder, Found, Removed, Report, Seen
from proto.circuit_breaker import CircuitBreaker
from proto.errors import ConfigError
from proto.kv_media import DISK, HEADER_BYTES, media_folder, own_folder
from proto.kv_transfer_config import FIELD, DiskSettings, disk_settings

PATIENCE_SECONDS: Final = 2.0
"""For which requests wait until it is known what is there, after the start of the engine."""
_SLICE: Final = 2000
"""Blocks that are taken into the ledger at a time."""
_RETRY_SECONDS: Final = 1.0
_FAILED_LOADS_ALLOWED: Final = 1
_FAILED_STORES_ALLOWED: Final = 2


class _Block:
    """refs: as above. ranks: bits of those whose files are there. doubtful: a load has failed.

    is_bad: it was discarded while it was copied, and its files go when that is over.
    """

    __slots__ = ("doubtful", "is_bad", "ranks", "refs")

    def __init__(self, refs: int, ranks: int) -> None:
        self.refs = refs
        self.ranks = ranks
        self.doubtful = False
        self.is_bad = False


class DiskOffloadingManager:
    """An OffloadingManager. folder: reports what there is, and removes.

    capacity: blocks that all files may be of, others' included. block_bytes: of the files of
    one block, of all ranks.
    """

    medium = DISK

    def __init__(
        self,
        folder: DiskFolder,
        capacity: int,
        context: ManagerContext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._capacity = capacity
        self._file_bytes = HEADER_BYTES + context.block_bytes
        self._all_ranks = (1 << context.num_ranks) - 1
        self._set_bytes = self._file_bytes * context.num_ranks
        self._others = 0
        self._blocks: OrderedDict[OffloadKey, _Block] = OrderedDict()
        self._leaving: set[OffloadKey] = set()
        self._num_storing = 0
        self._events: deque[OffloadingEvent] = deque()
        self._known = False
        self._found = False
        self._arriving: Iterator[tuple[OffloadKey, int]] = iter(())
        self._ring = context.ring
        self._clock = clock
        self._patient_until = clock() + PATIENCE_SECONDS
        self._loads = CircuitBreaker(_RETRY_SECONDS, _FAILED_LOADS_ALLOWED, clock)
        self._stores = CircuitBreaker(_RETRY_SECONDS, _FAILED_STORES_ALLOWED, clock)
        self._impatience = threading.Timer(PATIENCE_SECONDS, context.ring)
        self._impatience.daemon = True
        self._impatience.start()

    def lookup(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> int | None:
        found = self.contains(keys)
        if found is None:
            return None
        return next((index for index, each in enumerate(found) if not each), len(found))

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        self._hear()
        if not self._known and self._clock() < self._patient_until:
            return None
        if self._loads.is_open:
            return [False] * len(keys)
        return [self._is_present(each) for each in keys]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        for key in keys:
            assert self._is_present(key), "loading what is not there"
            self._blocks[key].refs += 1
        return []

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        if success:
            self._loads.record_success()
        else:
            self._loads.record_failure()
        doubted: list[OffloadKey] = []
        bad: list[OffloadKey] = []
        for key in keys:
            block = self._blocks[key]
            assert block.refs > 0, "the load was not prepared"
            block.refs -= 1
            block.doubtful |= not success
            if block.doubtful and not block.refs:
                self._forget(key)
                (bad if block.is_bad else doubted).append(key)
        self._remove(bad)
        self._ask_about(doubted)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self._hear()
        if not self._known or self._stores.is_open or self._is_busy:
            return None
        wanted = [key for key in dict.fromkeys(keys) if self._is_wanted(key)]
        num_more = sum(key not in self._blocks for key in wanted)
        victims = self._victims(len(self._blocks) + num_more, frozenset(keys))
        if victims is None:
            return None
        for key in victims:
            self._forget(key)
        self._remove(victims)
        for key in wanted:
            self._blocks.pop(key, None)
            self._blocks[key] = _Block(-1, 0)
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
            if block is None or block.refs != -1:
                continue
            self._num_storing -= 1
            (bad if block.is_bad else changed).append(key)
            if success and not block.is_bad:
                block.refs, block.ranks = 0, self._all_ranks
            else:
                del self._blocks[key]
        self._remove(bad)
        if not success:
            self._ask_about(changed)
        elif changed:
            self._events.append(OffloadingEvent(changed, False, self.medium))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Files that are being written or read are removed when that is over."""
        idle = []
        for key in dict.fromkeys(keys):
            block = self._blocks.get(key)
            if block is not None and block.refs:
                block.doubtful = block.is_bad = True
                continue
            if block is not None:
                self._forget(key)
            if key not in self._leaving:
                idle.append(key)
        self._remove(idle)

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._hear()
        events, self._events = self._events, deque()
        return events

    def reset(self) -> bool:
        self._hear()
        if any(block.refs for block in self._blocks.values()):
            return False
        present = [key for key in self._blocks if self._is_present(key)]
        if present:
            self._events.append(OffloadingEvent(present, True, self.medium))
        self._blocks.clear()
        self._known = self._found = False  # until it is empty; what is found then is there
        self._patient_until = self._clock()
        self._folder.clear()
        return True

    def start_over(self) -> None:
        unsure = [key for key, block in self._blocks.items() if block.refs < 0 or block.doubtful]
        bad = [key for key in unsure if self._blocks[key].is_bad]
        for key in unsure:
            self._forget(key)
        for block in self._blocks.values():
            block.refs = 0
        self._num_storing = 0
        self._remove(bad)
        self._ask_about([key for key in unsure if key not in self._leaving])

    def close(self) -> None:
        self._impatience.cancel()
        self._folder.close()

    @property
    def usage(self) -> float:
        """Part of the limit that files take, others' included."""
        return (len(self._blocks) + self._others / self._set_bytes) / self._capacity

    @property
    def _is_busy(self) -> bool:
        return self._num_storing * self._file_bytes > MAX_BYTES_IN_FLIGHT

    def _is_present(self, key: OffloadKey) -> bool:
        block = self._blocks.get(key)
        return (
            block is not None
            and block.refs >= 0
            and block.ranks == self._all_ranks
            and not block.doubtful
        )

    def _is_wanted(self, key: OffloadKey) -> bool:
        """Not there on all ranks, nor about to be, nor on its way out."""
        block = self._blocks.get(key)
        if block is None:
            return key not in self._leaving
        return not block.refs and block.ranks != self._all_ranks

    def _victims(self, num_blocks: int, spared: frozenset[OffloadKey]) -> list[OffloadKey] | None:
        """Who has to go so that there is room for so many in all; None where that cannot be."""
        others = -(-self._others // self._set_bytes)
        num_over = num_blocks + others - self._capacity
        if num_over > 0 and others:
            freed = min(self._others, num_over * self._set_bytes)
            self._folder.remove_others(freed)
            self._others -= freed
            num_over = num_blocks + -(-self._others // self._set_bytes) - self._capacity
        if num_over <= 0:
            return []
        victims = []
        for key, block in self._blocks.items():
            if not block.refs and key not in spared:
                victims.append(key)
                if len(victims) == num_over:
                    return victims
        return None

    def _forget(self, key: OffloadKey) -> None:
        block = self._blocks.pop(key)
        if block.ranks == self._all_ranks:
            self._events.append(OffloadingEvent([key], True, self.medium))

    def _remove(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._leaving.update(keys)
            self._folder.remove(keys)

    def _ask_about(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._folder.look_at(keys)

    def _hear(self) -> None:
        """Take what was found out; a folder of many files in slices, so that it holds nobody up."""
        if self._found and not self._known:
            self._take_arriving()
        else:
            for report in self._folder.take_reports():
                self._take(report)
                if isinstance(report, Found):
                    return

    def _take_arriving(self) -> None:
        arriving = list(islice(self._arriving, _SLICE))
        for key, ranks in arriving:
            self._add(key, ranks)
        if len(arriving) == _SLICE:
            self._ring()
        else:
            self._known = True
            self._remove_surplus()

    def _take(self, report: Report) -> None:
        match report:
            case Found(blocks, others):
                self._others = others
                self._found = True
                self._arriving = iter(blocks.items())
                self._take_arriving()
            case Seen(added, removed):
                for key, bit in added:
                    self._add(key, bit)
                for key, bit in removed:
                    self._lose(key, bit)
                self._remove_surplus()
            case Removed(keys):
                self._leaving.difference_update(keys)

    def _add(self, key: OffloadKey, ranks: int) -> None:
        """Files of a block have been seen; those that are on their way out do not count."""
        if key in self._leaving:
            return
        block = self._blocks.setdefault(key, _Block(0, 0))
        if block.refs < 0 or block.ranks == self._all_ranks:
            return
        block.ranks |= ranks
        if block.ranks == self._all_ranks:
            self._events.append(OffloadingEvent([key], False, self.medium))

    def _lose(self, key: OffloadKey, bit: int) -> None:
        """A file of a block is gone: whoever loads it now finds out, and nobody begins to."""
        block = self._blocks.get(key)
        if block is None or block.refs < 0:
            return
        if block.refs:
            block.doubtful = True
        else:
            self._forget(key)

    def _remove_surplus(self) -> None:
        """Others have added more than there is room for."""
        victims = self._victims(len(self._blocks), frozenset())
        for key in victims or []:
            self._forget(key)
        self._remove(victims or [])


def make_manager(extra: Mapping[str, Any], context: ManagerContext) -> DiskOffloadingManager:
    """For the settings in `kv_connector_extra_config`; raises ConfigError naming the key."""
    settings: DiskSettings = disk_settings(extra)
    capacity = settings.disk_bytes_to_use // (
        (HEADER_BYTES + context.block_bytes) * context.num_ranks
    )
    if capacity < 1:
        raise ConfigError(
            f"--kv-transfer-config: disk_bytes_to_use is {settings.disk_bytes_to_use}, less than "
            f"one block takes ({(HEADER_BYTES + context.block_bytes) * context.num_ranks})",
            FIELD,
        )
    name = media_folder(context.fingerprint, context.num_ranks, context.factor)
    folder = DiskFolder(own_folder(settings.disk_path), name, context.num_ranks, context.ring)
    folder.start()
    return DiskOffloadingManager(folder, capacity, context)
