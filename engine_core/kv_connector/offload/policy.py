"""Which offloaded blocks have to go when others need their places.

A policy owns the order among the blocks of a medium and finds them by key; the ledger owns their
states and places. The source of LRU is folklore; that of ARC is named there.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from engine_core.kv_connector.offload.base import OffloadKey

BEING_STORED = -1
"""Instead of a number of readers."""


class OffloadedBlock:
    """slot: its place on the medium. num_readers: loads under way, or BEING_STORED.

    is_bad: it could not be read, or is wrong, and goes when no copy needs its place any more.
    """

    __slots__ = ("is_bad", "num_readers", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.num_readers = BEING_STORED
        self.is_bad = False

    @property
    def is_present(self) -> bool:
        """It may be loaded."""
        return self.num_readers >= 0 and not self.is_bad

    @property
    def is_idle(self) -> bool:
        """It may go."""
        return self.num_readers == 0


class Victim(NamedTuple):
    """A block that was evicted."""

    key: OffloadKey
    block: OffloadedBlock


class EvictionPolicy(Protocol):
    """The order of the blocks of one medium."""

    def get(self, key: OffloadKey) -> OffloadedBlock | None:
        """The block with this key, in whatever state."""
        ...

    def insert(self, key: OffloadKey, block: OffloadedBlock) -> None:
        """A block that was not here."""
        ...

    def remove(self, key: OffloadKey) -> None:
        """Drop a block that is here, for reasons of others; nothing is learnt from it."""
        ...

    def touch(self, keys: Sequence[OffloadKey], is_new_use: bool) -> None:
        """As the manager's: the first key is the most recent afterwards."""
        ...

    def evict(self, count: int, protected: Collection[OffloadKey]) -> list[Victim] | None:
        """Take out as many idle blocks that are not protected; None, with nothing changed, if
        there are fewer."""
        ...

    def __iter__(self) -> Iterator[OffloadKey]:
        """The keys of all blocks that are here."""
        ...

    def clear(self) -> None:
        """Forget all, also what was learnt."""
        ...

    def __len__(self) -> int: ...
