"""The seam between the offloading connector and a medium: host memory, a disk, a remote store.

The connector knows requests, steps and device blocks. A manager knows which offloaded blocks its
medium has, by key, and gives out places; it knows nothing of requests or device blocks, and
never waits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""Of one rank; while more is being stored, nothing is added to it, where a medium
is slower than memory."""
OffloadKey = bytes
"""Hash of the last device block of an offloaded block; group, rank count and factor behind it."""


@dataclass(frozen=True)
class ManagerContext:
    """What a medium may know of the engine.

    fingerprint: of everything that changes KV values, the same on every rank. num_ranks: workers
    that share the model. block_bytes: of one offloaded block, on rank 0, which has most. ring:
    from any thread; requests that were told to ask again are put back into the line. factor:
    device blocks of an offloaded one.
    """

    fingerprint: bytes
    num_ranks: int
    block_bytes: int
    ring: Callable[[], None]
    factor: int = 1


class OffloadingEvent(NamedTuple):
    """keys: that a medium has from now on, or (removed) no more."""

    keys: Sequence[OffloadKey]
    removed: bool
    medium: str


class PrepareStoreOutput(NamedTuple):
    """keys: of those asked for, the ones to be stored, in order. slots: their places, empty for a
    medium that is looked up by key. evicted: what had to go for them."""

    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    evicted: Sequence[OffloadKey]


class OffloadingManager(Protocol):
    """The ledger of one medium.

    A block is stored (-1), present (0) or read by n loads (n); only present ones are evicted.
    """

    medium: str

    def lookup(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> int | None:
        """Length of the leading run that is present; None: not known yet, a wake follows.

        is_new_use: False for a request that has looked for them before.
        """
        ...

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        """Of each whether it is present; None: not known yet, a wake follows."""
        ...

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        """Keep these, which are present, until `complete_load`; returns their places, or none."""
        ...

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        """A load is over. What could not be read is forgotten once nobody reads it."""
        ...

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """Find room for those that are not there. None, with nothing changed, if there is none."""
        ...

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        """A store is over on all ranks: present from now on, or forgotten.

        cancelled: it has no success, but the medium has not failed.
        """
        ...

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """What these hold is wrong, and nobody is to find it, wherever it is kept.

        Also keys that are not known here. No failure of the medium: only what is in it is bad.
        """
        ...

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        """These are wanted, in the order of a sequence, whether they are here or not.

        The first ones are to outlive the others. is_new_use: False by somebody who wanted them
        before, whose sequence has grown: they are as recent as that, and not wanted once more.
        """
        ...

    @property
    def usage(self) -> float:
        """Part of the medium that is taken, 0 to 1; 0 where it is not known."""
        ...

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What became present and what went since the last call."""
        ...

    def reset(self) -> bool:
        """Forget all; False where a copy is under way."""
        ...

    def start_over(self) -> None:
        """Whatever was being copied never will be."""
        ...

    def close(self) -> None: ...
