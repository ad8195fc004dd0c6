"""The metrics of all API servers, in shared memory.

API servers accept connections from one socket, so /metrics may reach any of them:
all must show the same. Each one counts in a row of its own, and all rows are added up where
they are shown. A row outlives its API server, and the restarted one continues it.

    API server 0    | 3 | 17 | …     written by API server 0 only
    API server 1    | 5 |  9 | …
    shown          | 8 | 26 | …

Cells have no names: each metric takes its cells in the same order in every process.
"""

import mmap
from bisect import bisect_left
from collections.abc import Sequence

from proto.stats import METRIC_BYTES, METRIC_CELLS


class MetricSheet:
    """Rows of METRIC_CELLS numbers, at first 0.

    memory: of all rows, METRIC_BYTES each. row: of this process.
    """

    def __init__(self, memory: bytearray | mmap.mmap, row: int = 0) -> None:
        cells = memoryview(memory).cast("d")
        self._rows = [
            cells[start : start + METRIC_CELLS] for start in range(0, len(cells), METRIC_CELLS)
        ]
        self._own = self._rows[row]
        self._num_taken = 0

    @classmethod
    def of_one(cls) -> "MetricSheet":
        """Return the sheet of a single API server."""
        return cls(bytearray(METRIC_BYTES))

    @classmethod
    def shared(cls, descriptor: int, row: int, num_rows: int) -> "MetricSheet":
        """descriptor: of memory that all API servers have inherited."""
        return cls(mmap.mmap(descriptor, num_rows * METRIC_BYTES), row)

    @property
    def num_rows(self) -> int:
        """API servers, of which some may be dead."""
        return len(self._rows)

    def take(self, count: int = 1) -> int:
        """Return the first of so many unused cells."""
        first, self._num_taken = self._num_taken, self._num_taken + count
        assert self._num_taken <= METRIC_CELLS, "a row is too short for what is counted"
        return first

    def add(self, cell: int, amount: float = 1) -> None:
        self._own[cell] += amount

    def write(self, first: int, values: Sequence[float]) -> None:
        """Set cells of the own row."""
        for cell, value in enumerate(values, first):
            self._own[cell] = value

    def own(self, first: int, count: int) -> list[float]:
        """Cells of the own row."""
        return list(self._own[first : first + count])

    def of_each(self, first: int, count: int) -> list[list[float]]:
        """The same cells of every row, [num_rows, count]."""
        return [list(row[first : first + count]) for row in self._rows]

    def totals(self, first: int, count: int) -> list[float]:
        """Cells added up over all rows, [count]."""
        return [sum(column) for column in zip(*self.of_each(first, count), strict=True)]


class Counter:
    """A number that only grows."""

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.take()

    def add(self, amount: float = 1) -> None:
        self._sheet.add(self._cell, amount)

    @property
    def value(self) -> float:
        """Of all API servers."""
        return self._sheet.totals(self._cell, 1)[0]


class Gauge:
    """A count of open `with` blocks; a restarted API server forgets those of the dead one."""

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.take()
        sheet.write(self._cell, [0.0])

    def __enter__(self) -> None:
        self._sheet.add(self._cell)

    def __exit__(self, *how: object) -> None:
        self._sheet.add(self._cell, -1)

    @property
    def value(self) -> float:
        """In all API servers."""
        return self._sheet.totals(self._cell, 1)[0]

    @property
    def own(self) -> float:
        """In this API server."""
        return self._sheet.own(self._cell, 1)[0]

    @property
    def each(self) -> list[float]:
        """In every API server."""
        return [row[0] for row in self._sheet.of_each(self._cell, 1)]


class Histogram:
    """Counts per bucket. `bounds`: upper ends, ascending, without infinity."""

    __slots__ = ("_first", "_sheet", "bounds")

    def __init__(self, sheet: MetricSheet, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._sheet = sheet
        self._first = sheet.take(len(self.bounds) + 2)  # the counts, that of infinity, the sum

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        self._sheet.add(self._first + bucket)
        self._sheet.add(self._first + len(self.bounds) + 1, value)

    def totals(self) -> tuple[list[float], float]:
        """Of all API servers: observations by bucket, the last for infinity, and their sum."""
        *counts, total = self._sheet.totals(self._first, len(self.bounds) + 2)
        return counts, total


class News:
    """A count of events that every API server receives; a dead one may have missed some.

    So the highest of all counts is shown, and an API server begins with that.
    """

    __slots__ = ("_cell", "_sheet")

    def __init__(self, sheet: MetricSheet) -> None:
        self._sheet = sheet
        self._cell = sheet.take()
        self.raise_to(self.value)

    def add(self) -> None:
        self._sheet.add(self._cell)

    def raise_to(self, count: float) -> None:
        """There were so many at least."""
        self._sheet.write(self._cell, [max(count, *self._sheet.own(self._cell, 1))])

    @property
    def value(self) -> float:
        return max(row[0] for row in self._sheet.of_each(self._cell, 1))
