"""What scheduler parts from outside cost: the same decisions by built-in parts and by other ones.

Parts from outside are interpreted, those of the scheduler compiled. Each round plays a load with
each part in turn; ratios are those of CPU time in schedule() to the built-in parts of that round.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from deploy.bench.options import BenchParser, at_least_one
from engine_core.kv_cache.outside import EvictionOrder
from engine_core.request import Request
from engine_core.scheduler.features.outside import OutsideFeature
from engine_core.scheduler.queues.outside import SchedulingPolicy
from proto.codec import changed
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram
from tests.benchmarks.messages import SchedulerTimings
from tests.benchmarks.scheduler import select


class ArrivalOrder(SchedulingPolicy):
    """First come, first served, as `fcfs`."""

    def __init__(self) -> None:
        self._first = self._last = 0

    def waiting_key(self, request: Request) -> Any:
        self._last += 1
        return self._last

    def preempted_key(self, request: Request) -> Any:
        self._first -= 1
        return self._first

    def preemption_key(self, request: Request) -> Any:
        return -request.running_index


class LeastRecentFirst(EvictionOrder):
    """The block that became free first, as `lru`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._blocks: dict[int, None] = {}

    def add(self, blocks: Sequence[int]) -> None:
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

    def put_first(self, blocks: Sequence[int]) -> None:
        first = dict.fromkeys(blocks)
        self._blocks = first | {each: None for each in self._blocks if each not in first}

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class Asked(OutsideFeature):
    """Is asked about each candidate, and holds none back."""

    def is_blocked(self, candidate: Any) -> bool:
        return False

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """Do nothing."""


_HERE = "tests.benchmarks.outside_parts"
_PARTS: dict[str, dict[str, Any]] = {
    "built in": {},
    "scheduling policy": {"scheduling_policy": f"{_HERE}:ArrivalOrder"},
    "eviction policy": {"eviction_policy": f"{_HERE}:LeastRecentFirst"},
    "feature": {"scheduler_features": (f"{_HERE}:Asked",)},
}


def main(words: Sequence[str]) -> None:
    parser = BenchParser(prog="python -m tests.benchmarks.outside_parts", description=__doc__)
    parser.add_argument("--workload", default="waiting1000", help="of tests.benchmarks.scheduler")
    parser.add_argument("--rounds", type=at_least_one, default=7)
    options = parser.parse_args(words)
    (workload,) = select([options.workload])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in _PARTS}
    with LineProgram((sys.executable, "-m", "tests.benchmarks.scheduler_program")) as program:
        for _ in range(options.rounds):
            for name, settings in _PARTS.items():
                found = program.play(changed(workload, **settings), SchedulerTimings, name)
                assert found.schedule is not None
                assert found.update is not None
                times[name].append((found.schedule.median, found.update.median))
    print(f"{options.workload}: medians of {options.rounds} rounds")
    for name, rows in times.items():
        schedule, update = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [
            (one[0] + one[1]) / (other[0] + other[1])
            for one, other in zip(rows, times["built in"], strict=True)
        ]
        print(
            f"{name:18} schedule {schedule:7.1f} µs   update {update:7.1f} µs   "
            f"{statistics.median(ratios):.3f} of built in"
        )


if __name__ == "__main__":
    sys.exit(run(main))
