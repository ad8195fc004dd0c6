"""Storing only what somebody is likely to want again: what was looked for often enough.

Owns the counts; the blocks are the manager's behind it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.kv_connector.offload.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
)


class ReuseTracker:
    """How often keys were looked for, of the `max_size` that were looked for last."""

    def __init__(self, threshold: int, max_size: int) -> None:
        if max_size < 1:
            raise ValueError(f"max_size must be >= 1, got {max_size}")
        self._threshold = threshold
        self._max_size = max_size
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()

    def record(self, key: OffloadKey) -> None:
        """Somebody looks for it."""
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._max_size:
            self._counts.popitem(last=False)

    def check(self, key: OffloadKey) -> bool:
        """Whether it was looked for as often as the threshold says."""
        return self._counts.get(key, 0) >= self._threshold


class FilterReusedOffloadingManager:
    """OffloadingManager over another one, which hears only of keys that are wanted again."""

    def __init__(self, backing: OffloadingManager, tracker: ReuseTracker) -> None:
        self._backing = backing
        self._tracker = tracker
        self.medium = backing.medium

    def lookup(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> int | None:
        """Counts every key of a new use, those after the first miss too."""
        if is_new_use:
            for key in keys:
                self._tracker.record(key)
        return self._backing.lookup(keys, is_new_use=is_new_use)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool] | None:
        """Counts nothing: for whoever asks again."""
        return self._backing.contains(keys)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> Sequence[int]:
        return self._backing.prepare_load(keys)

    def complete_load(self, keys: Sequence[OffloadKey], *, success: bool = True) -> None:
        self._backing.complete_load(keys, success=success)

    def prepare_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        return self._backing.prepare_store([key for key in keys if self._tracker.check(key)])

    def complete_store(
        self, keys: Sequence[OffloadKey], *, success: bool = True, cancelled: bool = False
    ) -> None:
        self._backing.complete_store(keys, success=success, cancelled=cancelled)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._backing.discard(keys)

    def touch(self, keys: Sequence[OffloadKey], *, is_new_use: bool = True) -> None:
        self._backing.touch(keys, is_new_use=is_new_use)

    @property
    def usage(self) -> float:
        """Of the manager behind it."""
        return self._backing.usage

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._backing.take_events()

    def reset(self) -> bool:
        return self._backing.reset()

    def start_over(self) -> None:
        self._backing.start_over()

    def close(self) -> None:
        self._backing.close()
