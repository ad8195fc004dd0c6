"""What engines said last of themselves, to whichever front end.

An engine tells one front end after each step, so what is true now stands in one row of the
sheet or another: in that of the latest time. Two engines may be there side by side, during a
reload.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from api_server.metric_sheet import MetricSheet
from proto.stats import SchedulerStats

_PLACES: Final = 3
"""Engines that a front end keeps figures of; more than two are never there at once."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Those of SchedulerStats."""

    num_running: float
    num_waiting: float
    kv_cache_usage: float
    num_deferred: float
    num_queued_reqs: float
    num_queued_tokens: float
    cpu_offload_usage: float
    num_pinned_blocks: float
    num_pinned_jobs: float


_NAMES: Final = tuple(field.name for field in fields(Gauges))
_HEAD: Final = 2
_RECORD: Final = _HEAD + len(_NAMES)
"""A place has the epoch of an engine, 0 for none; the time; and the gauges."""


class EngineGauges:
    """Of the engines that this front end knows, by epoch."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._places = [sheet.take(_RECORD) for _ in range(_PLACES)]
        self._known: set[int] = set()

    def meet(self, epoch: int) -> None:
        """Its figures count from now on."""
        self._known.add(epoch)

    def forget(self, epoch: int) -> None:
        """It is gone, and with it what its gauges showed."""
        self._known.discard(epoch)
        for place in self._places:
            if self._sheet.own(place, 1) == [epoch]:
                self._sheet.write(place, [0.0])

    def write(self, epoch: int, timestamp: float, stats: SchedulerStats) -> None:
        """timestamp: monotonic seconds of the engine."""
        held = [self._sheet.own(place, _HEAD) for place in self._places]
        index = next((index for index, (owner, _) in enumerate(held) if owner == epoch), None)
        if index is None:
            index = min(range(_PLACES), key=lambda each: (held[each][0] != 0, held[each][1]))
        values = [float(getattr(stats, name)) for name in _NAMES]
        self._sheet.write(self._places[index], [epoch, timestamp, *values])

    def latest(self) -> Iterator[Gauges]:
        """Of each engine that has said something, to whomever."""
        newest: dict[int, list[float]] = {}
        for place in self._places:
            for record in self._sheet.of_each(place, _RECORD):
                epoch = int(record[0])
                if epoch in self._known and record[1] >= newest.get(epoch, record)[1]:
                    newest[epoch] = record
        for record in newest.values():
            yield Gauges(*record[_HEAD:])
