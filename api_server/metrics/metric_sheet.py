"""Cells in shared memory that all front ends count in, and the metrics over these cells.

Front ends accept connections from one socket, so /metrics may reach any of them and all must show
the same. Each front end writes a row of its own; a shown value combines all rows. A row outlives
its front end, and the restarted one continues it.

    front end 0     | 3 | 17 | …     written by front end 0 only
    front end 1     | 5 |  9 | …
    shown           | 8 | 26 | …

Cells have no names: each metric allocates its cells in the same order in every process.
"""

import mmap
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from proto.messages.stats import metric_bytes


class MetricSheet:
    """Rows of numbers, initially 0, one row per front end.

    memory: `metric_bytes` per row. row: index of this process's row.
    """

    def __init__(
        self, memory: bytearray | mmap.mmap, row: int = 0, *, num_engines: int = 1
    ) -> None:
        cells = memoryview(memory).cast("d")
        self._num_cells = metric_bytes(num_engines) // cells.itemsize
        self._rows = [
            cells[start : start + self._num_cells]
            for start in range(0, len(cells), self._num_cells)
        ]
        self._own_row = self._rows[row]
        self._num_allocated = 0

    @classmethod
    def of_one(cls, num_engines: int = 1) -> "MetricSheet":
        """Return the sheet of a single front end."""
        return cls(bytearray(metric_bytes(num_engines)), num_engines=num_engines)

    @classmethod
    def shared(
        cls, descriptor: int, row: int, num_rows: int, num_engines: int = 1
    ) -> "MetricSheet":
        """Return a sheet over memory that all front ends have inherited as `descriptor`."""
        memory = mmap.mmap(descriptor, num_rows * metric_bytes(num_engines))
        return cls(memory, row, num_engines=num_engines)

    @property
    def num_rows(self) -> int:
        """Number of front ends, dead ones included."""
        return len(self._rows)

    def allocate_cells(self, count: int = 1) -> int:
        """Return the index of the first of `count` unused cells."""
        first, self._num_allocated = self._num_allocated, self._num_allocated + count
        assert self._num_allocated <= self._num_cells, "the metrics need more cells than a row has"
        return first

    def add_to_cell(self, cell: int, amount: float = 1) -> None:
        self._own_row[cell] += amount

    def write_cells(self, first: int, values: Sequence[float]) -> None:
        for cell, value in enumerate(values, first):
            self._own_row[cell] = value

    def own_cells(self, first: int, count: int) -> list[float]:
        """Return cells of this process's row, [count]."""
        return list(self._own_row[first : first + count])

    def cells_by_row(self, first: int, count: int) -> list[list[float]]:
        """Return the same cells of every row, [num_rows, count]."""
        return [list(row[first : first + count]) for row in self._rows]

    def sums(self, first: int, count: int) -> list[float]:
        """Return cells summed over all rows, [count]."""
        return [sum(column) for column in zip(*self.cells_by_row(first, count), strict=True)]


class Counter:
    """A number that only grows, summed over all front ends."""

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.allocate_cells()

    def increment(self, amount: float = 1) -> None:
        self._sheet.add_to_cell(self._cell, amount)

    @property
    def value(self) -> float:
        return self._sheet.sums(self._cell, 1)[0]


class Gauge:
    """The number of open `with` blocks; a restarted front end starts at 0."""

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.allocate_cells()
        sheet.write_cells(self._cell, [0.0])

    def __enter__(self) -> None:
        self._sheet.add_to_cell(self._cell)

    def __exit__(self, *how: object) -> None:
        self._sheet.add_to_cell(self._cell, -1)

    @property
    def value(self) -> float:
        """Sum over all front ends."""
        return self._sheet.sums(self._cell, 1)[0]

    @property
    def own_value(self) -> float:
        """Value of this front end."""
        return self._sheet.own_cells(self._cell, 1)[0]

    @property
    def values(self) -> list[float]:
        """Value of each front end."""
        return [row[0] for row in self._sheet.cells_by_row(self._cell, 1)]


class Histogram:
    """Observations by bucket. bounds: upper ends of the buckets, ascending, without infinity."""

    __slots__ = ("_first", "_sheet", "bounds")

    def __init__(self, sheet: MetricSheet, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._sheet = sheet
        # one cell per bucket, one for the bucket to infinity, one for the sum
        self._first = sheet.allocate_cells(len(self.bounds) + 2)

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        self._sheet.add_to_cell(self._first + bucket)
        self._sheet.add_to_cell(self._first + len(self.bounds) + 1, value)

    @property
    def count(self) -> float:
        """Number of observations."""
        return sum(self._sheet.sums(self._first, len(self.bounds) + 1))

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return Prometheus' buckets (upper end, cumulative count) and the sum of observations."""
        return self.joined_buckets([self])

    @staticmethod
    def joined_buckets(
        histograms: "Sequence[Histogram]",
    ) -> tuple[list[tuple[str, float]], float]:
        """Return buckets and sum of the observations of several histograms of the same bounds."""
        bounds = histograms[0].bounds
        *counts, total = (
            sum(column)
            for column in zip(
                *(each._sheet.sums(each._first, len(bounds) + 2) for each in histograms),
                strict=True,
            )
        )
        ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        return list(zip(ends, accumulate(counts), strict=True)), total


class BroadcastCounter:
    """A count of events that every front end is notified of.

    A dead front end misses events, so the highest count of any is shown, and a restarted front
    end starts with it.
    """

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.allocate_cells()
        self.raise_to(self.value)

    def increment(self) -> None:
        self._sheet.add_to_cell(self._cell)

    def raise_to(self, count: float) -> None:
        """Set the count to at least `count`."""
        self._sheet.write_cells(self._cell, [max(count, *self._sheet.own_cells(self._cell, 1))])

    @property
    def value(self) -> float:
        return max(row[0] for row in self._sheet.cells_by_row(self._cell, 1))


_MORE_SLOTS: Final = 2
"""Engines beyond their number whose statistics a front end keeps: one more runs in a reload."""
_HEADER_CELLS: Final = 2


class EngineValues(NamedTuple):
    """Gauges of the engine of an epoch. timestamp: monotonic seconds of the engine."""

    epoch: int
    engine: int
    timestamp: float
    gauges: dict[str, float]


class EngineGauges:
    """The latest gauges of the engines that run, by epoch, whichever front end received them.

    names: of the gauges. num_engines: how many serve. A slot has the epoch of an engine (0 if
    unused), the time of its statistics, and the gauges.
    """

    def __init__(self, sheet: MetricSheet, names: Sequence[str], num_engines: int = 1) -> None:
        self._sheet = sheet
        self._names = names
        self._num_cells = _HEADER_CELLS + len(names)
        num_slots = num_engines + _MORE_SLOTS
        self._slots = [sheet.allocate_cells(self._num_cells) for _ in range(num_slots)]
        self._engines: dict[int, int] = {}

    def add_engine(self, epoch: int, engine: int) -> None:
        self._engines[epoch] = engine

    def remove_engine(self, epoch: int) -> None:
        self._engines.pop(epoch, None)
        for slot in self._slots:
            if self._sheet.own_cells(slot, 1) == [epoch]:
                self._sheet.write_cells(slot, [0.0])

    def write(self, epoch: int, timestamp: float, gauges: Mapping[str, float]) -> None:
        """Store the gauges of an engine, by name. timestamp: monotonic seconds of the engine."""
        headers = [self._sheet.own_cells(slot, _HEADER_CELLS) for slot in self._slots]
        index = next((index for index, (owner, _) in enumerate(headers) if owner == epoch), None)
        if index is None:  # an unused slot, or the oldest one
            index = min(
                range(len(headers)), key=lambda slot: (headers[slot][0] != 0, headers[slot][1])
            )
        values = [gauges[name] for name in self._names]
        self._sheet.write_cells(self._slots[index], [epoch, timestamp, *values])

    def latest_values(self) -> list[EngineValues]:
        """Return the newest gauges of each engine, received by any front end, by their names."""
        newest: dict[int, list[float]] = {}
        for slot in self._slots:
            for cells in self._sheet.cells_by_row(slot, self._num_cells):
                epoch = int(cells[0])
                if epoch in self._engines and cells[1] >= newest.get(epoch, cells)[1]:
                    newest[epoch] = cells
        return [
            EngineValues(
                epoch,
                self._engines[epoch],
                cells[1],
                dict(zip(self._names, cells[_HEADER_CELLS:], strict=True)),
            )
            for epoch, cells in newest.items()
        ]
