"""When the sessions of an open loop begin: seconds from the start, the same for the same seed."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator


def gamma_arrivals(
    rate: float, burstiness: float, seed: int, number: int | None
) -> Iterable[float]:
    """`rate` a second in the mean; the gaps are gamma distributed with shape `burstiness`.

    1 is a Poisson process, less comes in bursts, more is more even, infinity is a fixed beat.
    A known number of arrivals is stretched so that the last comes at number / rate, as
    `vllm bench serve` does it: else the rate of a short run would be a matter of luck.
    """
    gaps = _gaps(rate, burstiness, random.Random(f"arrivals {seed}"))
    if number is None:
        return itertools.accumulate(gaps)
    arrivals = list(itertools.accumulate(itertools.islice(gaps, number)))
    stretch = number / rate / arrivals[-1]
    return [each * stretch for each in arrivals]


def ramped(arrivals: Iterable[float], seconds: float) -> Iterator[float]:
    """The same arrivals, as if their rate had grown evenly from 0 within so many seconds.

    The arrival at s of an even rate comes when the integral of the growing rate is as large:
    t² / (2 seconds) = s while the rate grows, t - seconds / 2 = s after it.
    """
    for each in arrivals:
        growing = each < seconds / 2
        yield math.sqrt(2 * seconds * each) if growing else each + seconds / 2


def _gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    while True:
        if math.isinf(burstiness):
            yield 1 / rate
        else:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))
