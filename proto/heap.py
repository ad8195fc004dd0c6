"""The garbage collector of a process that does the same step again and again.

A step makes a few objects a request and drops them by the next step, which reference
counts see to. With Python's thresholds a step of 1,024 requests starts six collections
all the same, and every twentieth step waits 15 to 30 ms for one of the whole heap, most
of which is there for good: modules, weights, and the books of the block pool.
"""

import gc
from typing import Final

Thresholds = tuple[int, int, int]
"""Objects in the youngest generation, then collections of one before one of the next."""
STEPS: Final = (50_000, 20, 100)
"""More than a step leaves alive, and still a bound for the cycles that errors leave behind."""
REQUESTS: Final = (3_000, 5, 5)
"""For who leaves cycles behind with every request, and has an object or two a token besides: the
old generations are looked at about as often as with Python's thresholds, the youngest seldom."""


def settle_heap(thresholds: Thresholds = STEPS) -> None:
    """What is alive now stays alive: no collection looks at it again. Call it before serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
