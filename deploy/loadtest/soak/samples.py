"""What a soak looks at again and again, and how fast it grows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from deploy.loadtest.processes import Usage
from deploy.loadtest.summary import quantile

WARM_UP: Final = 50_000
"""Requests in which caches and heaps may fill, or half of them all: a front end's takes so many."""
REQUESTS: Final = 100_000
MAX_MIB: Final = 1.0
"""Most growth of a process in so many requests; a shorter run may grow as much in all."""
MAX_DRIFT: Final = 1.5
"""What the 99th percentile may become, as part of what it was after the warm-up."""
_DRIFT_SAMPLES: Final = 16
"""Without so many the middle one of a quarter of them says nothing."""


@dataclass(frozen=True)
class Sample:
    """One moment. requests: so far. latencies in milliseconds, of the time since the last one.

    usage: of each process, by title. blocks: part of the KV pool in use, 0 to 1.
    """

    seconds: float
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    blocks: float
    usage: Mapping[str, Usage]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Growth:
    """Of the memory of one process. mib: per REQUESTS, by least squares. requests: it is of."""

    title: str
    mib: float
    requests: int

    def describe(self) -> str:
        """In words."""
        return f"{self.name}: {self.mib:+.3f} MiB in {REQUESTS:,} requests"

    @property
    def name(self) -> str:
        """Of the process."""
        return self.title.removeprefix("tokend: ")

    @property
    def judged_mib(self) -> float:
        """Of REQUESTS, or of all where there were fewer.

        A few requests that let a heap grow once say nothing of the next ones.
        """
        return self.mib * min(1.0, self.requests / REQUESTS)


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Of each process that was there all the time, after the warm-up."""
    later = settled(samples)
    titles = set.intersection(*(set(each.usage) for each in later))
    requests = later[-1].requests - later[0].requests
    return [
        Growth(title, REQUESTS * slope(_memory(later, title)), requests) for title in sorted(titles)
    ]


def drifts(samples: Sequence[Sample]) -> list[float]:
    """The p99 of the last quarter to that of the first one after the warm-up, each its median.

    Empty for a run too short to say; a time without an answer counts for nothing.
    """
    later = [each.p99_ms for each in settled(samples) if each.p99_ms]
    if len(later) < _DRIFT_SAMPLES:
        return []
    quarter = len(later) // 4
    return [quantile(later[-quarter:], 0.5) / quantile(later[:quarter], 0.5)]


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Those after the warm-up; there is one at least."""
    begin = min(WARM_UP, samples[-1].requests / 2)
    return [each for each in samples if each.requests >= begin]


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Of the straight line nearest to the points; 0 where they have one x."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if not spread:
        return 0.0
    return float(sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread)


def _memory(samples: Sequence[Sample], title: str) -> list[tuple[float, float]]:
    return [(float(each.requests), each.usage[title].resident_mib) for each in samples]
