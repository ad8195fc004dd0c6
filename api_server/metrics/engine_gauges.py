"""The latest statistics of each engine, whichever front end received them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from api_server.metrics.metric_sheet import MetricSheet
from proto.stats import SchedulerStats

_NUM_SLOTS: Final = 3
"""Engines whose statistics a front end keeps; at most two run at once, during a reload."""


@dataclass(frozen=True, slots=True)
class EngineGaugeValues:
    """The gauges among the fields of SchedulerStats."""

    num_running: float
    num_waiting: float
    kv_cache_usage: float
    num_deferred: float
    num_queued_reqs: float
    num_queued_tokens: float
    cpu_offload_usage: float
    num_pinned_blocks: float
    num_pinned_agent_sessions: float


_FIELDS: Final = tuple(field.name for field in fields(EngineGaugeValues))
_HEADER_CELLS: Final = 2
_SLOT_CELLS: Final = _HEADER_CELLS + len(_FIELDS)
"""A slot: the epoch of an engine (0 if unused), the time of its statistics, the gauges."""


class EngineGauges:
    """The gauges of the engines that run, by epoch."""

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._slots = [sheet.allocate_cells(_SLOT_CELLS) for _ in range(_NUM_SLOTS)]
        self._epochs: set[int] = set()

    def add_engine(self, epoch: int) -> None:
        self._epochs.add(epoch)

    def remove_engine(self, epoch: int) -> None:
        self._epochs.discard(epoch)
        for slot in self._slots:
            if self._sheet.own_cells(slot, 1) == [epoch]:
                self._sheet.write_cells(slot, [0.0])

    def write(self, epoch: int, timestamp: float, stats: SchedulerStats) -> None:
        """Store the gauges of an engine. timestamp: monotonic seconds of the engine."""
        headers = [self._sheet.own_cells(slot, _HEADER_CELLS) for slot in self._slots]
        index = next((index for index, (owner, _) in enumerate(headers) if owner == epoch), None)
        if index is None:  # an unused slot, or the oldest one
            index = min(
                range(_NUM_SLOTS), key=lambda slot: (headers[slot][0] != 0, headers[slot][1])
            )
        values = [float(getattr(stats, name)) for name in _FIELDS]
        self._sheet.write_cells(self._slots[index], [epoch, timestamp, *values])

    def latest_values(self) -> Iterator[EngineGaugeValues]:
        """Yield the newest gauges of each engine, received by any front end."""
        newest: dict[int, list[float]] = {}
        for slot in self._slots:
            for cells in self._sheet.cells_by_row(slot, _SLOT_CELLS):
                epoch = int(cells[0])
                if epoch in self._epochs and cells[1] >= newest.get(epoch, cells)[1]:
                    newest[epoch] = cells
        for cells in newest.values():
            yield EngineGaugeValues(*cells[_HEADER_CELLS:])
