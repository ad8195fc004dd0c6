"""Interface between the offloading connector and a medium: host memory, a disk, a Redis server.

The connector knows requests, steps and device blocks. A manager (`OffloadingManager`) knows which
offloaded blocks its medium has, by key, and allocates slots; it never blocks. `create_manager`
selects the manager for a spec name; `ReuseTracker` finds the blocks that are worth storing.

A medium from outside is a module (spec_module_path) with two functions:

    engine    SPECNAME_manager(extra, ManagerContext) → OffloadingManager
    workers   SPECNAME_handlers(extra, HandlerContext) → {(source, target): OffloadingHandler}
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from proto.runtime.plugins import medium_part
from proto.settings.kv_media import STATES, media_folder
from proto.settings.kv_transfer_config import (
    CPU_SPEC,
    DISK_SPEC,
    FIELD,
    REMOTE_SPEC,
    OffloadSettings,
)

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""Bytes of one rank in unfinished stores, above which a disk or Redis accepts no more stores."""
OffloadKey = bytes
"""Hash of the last device block in an offloaded block, then the cache group, the number of ranks
and the number of device blocks."""
_HERE: Final = "engine_core.kv_connector.offload"
MANAGERS: Final = {
    CPU_SPEC: f"{_HERE}.cpu_manager:make_manager",
    DISK_SPEC: f"{_HERE}.disk_manager:make_manager",
    REMOTE_SPEC: f"{_HERE}.remote_manager:make_manager",
}


@dataclass(frozen=True)
class ManagerContext:
    """Facts about the engine that a medium needs.

    fingerprint: digest of everything that changes KV values. num_ranks: tensor-parallel workers.
    block_bytes: size of an offloaded block on rank 0, whose blocks are the largest.
    notify: wakes the engine, which retries lookups; may be called from any thread.
    factor: device blocks of an offloaded block.
    holds_states: the medium is for recurrent states, one in each of its blocks. A model with states
        has two managers of a medium; the other one is for KV.
    share: of the medium's bytes, for what this manager keeps.
    """

    fingerprint: bytes
    num_ranks: int
    block_bytes: int
    notify: Callable[[], None]
    factor: int = 1
    holds_states: bool = False
    share: float = 1.0

    @property
    def folder(self) -> str:
        """Name of the folder of these blocks, see `kv_media.media_folder`."""
        return self._folder(is_of_states=self.holds_states)

    @property
    def other_folder(self) -> str:
        """Name of the folder of the other manager."""
        return self._folder(is_of_states=not self.holds_states)

    def _folder(self, *, is_of_states: bool) -> str:
        factor = STATES if is_of_states else self.factor
        return media_folder(self.fingerprint, self.num_ranks, factor)


class OffloadingEvent(NamedTuple):
    """Keys that became present on a medium, or were removed from it."""

    keys: Sequence[OffloadKey]
    removed: bool
    medium: str


class PrepareStoreOutput(NamedTuple):
    """Decision about a store.

    keys: blocks to store, a subset of the request in its order. slots: their slots, empty for a
    medium that is addressed by key. evicted: blocks evicted to make room.
    """

    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    evicted: Sequence[OffloadKey]


class OffloadingManager(Protocol):
    """Index of the blocks on one medium.

    A block is being stored (-1), present (0) or read by n loads (n); only blocks in state 0 can be
    evicted. events: blocks added and removed since `take_events`. A protocol whose methods have
    defaults, so that a medium from outside need not derive from it.
    """

    medium: str
    events: list[OffloadingEvent]

    def lookup(self, keys: Sequence[OffloadKey]) -> int | None:
        """Return the length of the longest prefix of `keys` that is present.

        None: not known yet; `notify` follows.
        """
        found = self.contains(keys)
        if found is None:
            return None
        return next((index for index, is_present in enumerate(found) if not is_present), len(found))

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        """Return for each key whether it is present; None: not known yet, `notify` follows."""

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        """Protect the blocks of these keys, all present, from eviction until `complete_load`.

        Returns the slot of each block; empty if the medium has no slots.
        """

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        """End a load. After a failure the blocks are removed once no other load reads them."""

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """Allocate room for the keys that are missing; None, with nothing changed, without room."""

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        """End a store on all ranks: the blocks become present, or are removed after a failure.

        cancelled: the store failed because it was cancelled, not because of the medium.
        """

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks with corrupt content, wherever they are kept; keys may be unknown."""

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        """Mark blocks of a sequence as recently used, its beginning as the most recent.

        Keys may be missing from the medium. is_new_use: False if the same sequence has grown,
        which does not count as another use. A medium with an order of its own does nothing.
        """
        return None

    @property
    def num_blocks(self) -> int:
        """Offloaded blocks that the medium can hold; 0 if unknown."""
        return 0

    @property
    def num_used(self) -> int:
        """Offloaded blocks that it holds, or for which a store has room; 0 if unknown."""
        return 0

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return blocks added and removed since the last call."""
        events, self.events = self.events, []
        return events

    def reset_cache(self) -> bool:
        """Remove all blocks; False, with nothing changed, while copies are in flight."""

    def on_worker_restart(self) -> None:
        """Drop all copies in flight; none of them will be reported."""

    def close(self) -> None:
        """Release what the manager holds."""
        return None


def create_manager(
    settings: OffloadSettings, extra: Mapping[str, Any], context: ManagerContext
) -> OffloadingManager:
    """Create the manager of the configured medium; raises ConfigError."""
    name, module = settings.spec_name, settings.spec_module_path
    make = medium_part(name, module, MANAGERS, "manager", FIELD)
    manager: OffloadingManager = make(extra, context)
    return manager


class ReuseTracker:
    """Counts lookups of keys; remembers the `max_size` keys that were looked up last."""

    def __init__(self, threshold: int, max_size: int) -> None:
        if max_size < 1:
            raise ValueError(f"max_size must be >= 1, got {max_size}")
        self._threshold = threshold
        self._max_size = max_size
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def record_lookup(self, key: OffloadKey) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._max_size:
            self._counts.popitem(last=False)

    def reaches_threshold(self, key: OffloadKey) -> bool:
        return self._counts.get(key, 0) >= self._threshold
