"""`python -P -m engine_core.bench`: a workload a line in, its timings a line out.

Both as JSON; the end of the input ends it.
"""

import gc
import sys

from engine_core.compiled import use_compiled
from proto.benchmark import SchedulerTimings, SchedulerWorkload
from proto.codec import from_json, to_json_line


def play(workload: SchedulerWorkload) -> SchedulerTimings:
    """Measure one workload, in an engine of its own."""
    from engine_core.bench.hashing import time_hashing
    from engine_core.bench.steps import time_steps

    if workload.measure == "hashing":
        return time_hashing(workload)
    return time_steps(workload)


def main() -> None:
    """Play until nothing more is asked, compiled where the engine would be."""
    use_compiled()
    for line in sys.stdin.buffer:
        timings = play(from_json(line, SchedulerWorkload))
        gc.unfreeze()
        gc.collect()  # the engine is gone; the next one pays for itself alone
        sys.stdout.buffer.write(to_json_line(timings))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
