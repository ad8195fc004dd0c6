"""How many tokens to draft for which request: the most accepted tokens for the time of a step.

StepCost           how long a step takes by its number of rows
choose_lengths     the lengths of all drafts of a step

How likely the tokens of a draft are accepted comes from `acceptance.py`.
"""

from collections.abc import Sequence
from typing import Final

_NUM_EXACT: Final = 32
"""Row counts up to this one are points of the grid; beyond, there are 8 points to an octave."""
_NUM_OCTAVES: Final = 9
_MAX_ROWS: Final = _NUM_EXACT << _NUM_OCTAVES
_PRIOR_SLOPE: Final = 0.07
"""Assumed time of a further row before any step was seen, as a share of the time of a step with one
row."""
_LEAST_SLOPE: Final = 0.001
"""Minimum of the estimated time of a further row, as a share of the time of a step with one row:
noise of measurements would make rows free otherwise."""
_UNIT_RATE: Final = 0.1
"""Share of a step's deviation by which the unit, the time of a step with one row, is corrected."""
_MAX_WEIGHT: Final = 16.0
"""Limit of the weight of a point's mean, in steps: newer steps replace older ones."""
_FIRST_WEIGHT: Final = 3.0
"""Number of measured steps from which on the mean of a point is reliable."""
_MAX_AGE: Final = 100
"""Steps after which a point's mean is stale if no step had its row count."""
_REFRESH: Final = 16
"""Steps between two updates of the table, after the first ones."""


def _point_of(rows: int) -> int:
    """Return the index of the last point of the grid at or below a row count of at least 1."""
    if rows < _NUM_EXACT:
        return rows - 1
    octave = rows.bit_length() - _NUM_EXACT.bit_length()
    return _NUM_EXACT - 1 + 8 * octave + ((rows >> (octave + 2)) - 8)


def _grid() -> list[int]:
    octaves = [(32 + 4 * part) << octave for octave in range(_NUM_OCTAVES) for part in range(8)]
    return [*range(1, _NUM_EXACT), *octaves, _MAX_ROWS]


class StepCost:
    """The time of a step by its number of rows, learnt from steps, as multiples of a unit.

    How long all steps take changes with the lengths of their contexts, so the unit follows every
    step, and a point of the grid the steps of its own row count, relative to the unit. The table
    is made monotone by pooling adjacent violators. Between points it is linear; beyond those that
    were seen it has the slope of the prior.

    unit_seconds: time of a step with one row; 0 before any step was seen.
    """

    def __init__(self) -> None:
        self._rows = _grid()
        self._means = [0.0] * len(self._rows)
        self._weights = [0.0] * len(self._rows)
        self._costs = [_prior_cost(rows) for rows in self._rows]
        self._seen_at = [0] * len(self._rows)  # in steps learnt
        self.unit_seconds = 0.0
        self._num_learnt = 0

    def cost(self, rows: int) -> float:
        """Return the time of a step with `rows` rows, as a multiple of that of one row."""
        if rows >= _MAX_ROWS:
            return self._costs[-1]
        if rows <= 0:
            return self._costs[0]
        point = _point_of(rows)
        cost, first = self._costs[point], self._rows[point]
        if rows == first:
            return cost
        share = (rows - first) / (self._rows[point + 1] - first)
        return cost + share * (self._costs[point + 1] - cost)

    def is_stale(self, rows: int) -> bool:
        """Return whether the time for this row count comes from few steps, or from old ones.

        False without any steps, whose times are not reported then.
        """
        point = _point_of(min(rows, _MAX_ROWS))
        if self._weights[point] < _FIRST_WEIGHT:
            return self._num_learnt > 0
        return self._num_learnt - self._seen_at[point] > _MAX_AGE

    def learn_step(self, rows: int, seconds: float) -> None:
        """Learn from a step; ignores steps without rows or time."""
        if rows <= 0 or seconds <= 0.0:
            return
        rows = min(rows, _MAX_ROWS)
        cost = self.cost(rows)
        if self.unit_seconds == 0.0:
            self.unit_seconds = seconds / cost
        ratio = min(4.0, max(0.25, seconds / (self.unit_seconds * cost)))
        point = _point_of(rows)
        weight = self._weights[point] = min(self._weights[point] + 1.0, _MAX_WEIGHT)
        self._means[point] += (self._costs[point] * ratio - self._means[point]) / weight
        self.unit_seconds *= 1.0 + _UNIT_RATE * (ratio - 1.0)
        self._num_learnt += 1
        self._seen_at[point] = self._num_learnt
        if self._num_learnt <= _REFRESH or self._num_learnt % _REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        """Make the table from the means of the points that were seen."""
        seen = [point for point, weight in enumerate(self._weights) if weight > 0.0]
        self._interpolate(seen, self._pooled_means(seen))
        unit = self._costs[0]
        self._costs = [cost / unit for cost in self._costs]
        self._means = [mean / unit for mean in self._means]
        self.unit_seconds *= unit

    def _pooled_means(self, seen: list[int]) -> list[float]:
        """Return the means of these points, made monotone; weighted means of those out of order."""
        sizes: list[int] = []
        means: list[float] = []
        weights: list[float] = []
        for point in seen:
            size, mean, weight = 1, self._means[point], self._weights[point]
            while means and means[-1] >= mean:
                pooled = weights.pop()
                mean = (mean * weight + means.pop() * pooled) / (weight + pooled)
                weight += pooled
                size += sizes.pop()
            sizes.append(size)
            means.append(mean)
            weights.append(weight)
        return [mean for mean, size in zip(means, sizes, strict=True) for _ in range(size)]

    def _interpolate(self, seen: list[int], means: list[float]) -> None:
        """Fill the table from points that were seen, between them and beyond."""
        rows, costs = self._rows, self._costs
        first, last = seen[0], seen[-1]
        for point in range(first):
            costs[point] = means[0] * _prior_cost(rows[point]) / _prior_cost(rows[first])
        for index in range(len(seen) - 1):
            left, right = seen[index], seen[index + 1]
            step = (means[index + 1] - means[index]) / (rows[right] - rows[left])
            for point in range(left, right):
                costs[point] = means[index] + step * (rows[point] - rows[left])
        for point in range(last, len(rows)):
            costs[point] = means[-1] * _prior_cost(rows[point]) / _prior_cost(rows[last])
        for point in range(1, len(rows)):
            least = _LEAST_SLOPE * costs[0] * (rows[point] - rows[point - 1])
            costs[point] = max(costs[point], costs[point - 1] + least)


def _prior_cost(rows: int) -> float:
    return 1.0 + _PRIOR_SLOPE * (rows - 1)


MIN_GAIN: Final = 0.02
"""Tokens that drafts must add to a step, for each of its requests. It is more than the noise of
acceptance and cost, so that a choice between equals does not alternate."""
MAX_EXTRA_SECONDS: Final = 0.1
"""Time by which drafts may lengthen a step, which every stream of the batch waits for. A step that
long is limited by computing, so more drafts would hardly bring more tokens per time."""


def needed_acceptance_prob(
    num_requests: int, num_other: int, max_drafts: int, cost: StepCost
) -> float:
    """Return the lowest mean acceptance probability at which verifying any number of drafts pays,
    approximately.

    If it is more than 1, no draft can pay. Parameters as in `choose_lengths`.
    """
    rows = num_requests + num_other
    price = num_requests / cost.cost(num_requests)
    without = cost.cost(rows)
    least = price * (cost.cost(rows + 1) - without)
    number = 2
    while number < 2 * max_drafts:
        drafts = min(number, max_drafts)
        least = min(least, price * (cost.cost(rows + drafts) - without) / drafts)
        number *= 2
    return least


def choose_lengths(
    acceptance_probs: Sequence[list[float]], num_requests: int, num_other: int, cost: StepCost
) -> list[int]:
    """Return how many tokens of each draft to verify.

    acceptance_probs: of the drafts, corrected. num_requests: requests that decode, with or
    without a draft; each has a row. num_other: rows of the step that belong to prompts.

    A step with n requests and the k draft tokens that survive most likely brings n + S(k) tokens
    in the time c(n + k). Of all k the one is taken with the most tokens per time, which is the one
    with the highest gain S(k) - r · (c(n + k) - c(n)) at this rate r. In a step with prompts the
    rate is that of a step without, and only the difference of the times is due to the drafts; it
    is at most MAX_EXTRA_SECONDS.
    """
    lengths = [0] * len(acceptance_probs)
    values = [value for of_draft in acceptance_probs for value in of_draft]
    values.sort(reverse=True)
    best_rate = num_requests / cost.cost(num_requests)
    total = 0.0
    for number, value in enumerate(values, 1):
        total += value
        best_rate = max(best_rate, (num_requests + total) / cost.cost(num_requests + number))
    rows = num_requests + num_other
    without = cost.cost(rows)
    total = 0.0
    best_gain, best = MIN_GAIN * num_requests, 0
    for number, value in enumerate(values, 1):
        extra = cost.cost(rows + number) - without
        if extra * cost.unit_seconds > MAX_EXTRA_SECONDS:
            break
        total += value
        gain = total - best_rate * extra
        if gain > best_gain:
            best_gain, best = gain, number
    if best == 0:
        return lengths
    least = values[best - 1]
    num_equal = 0  # tokens with the least acceptance probability that are taken
    while num_equal < best and values[best - 1 - num_equal] == least:
        num_equal += 1
    for index, of_draft in enumerate(acceptance_probs):
        length = 0
        for value in of_draft:
            if value < least or (value == least and num_equal == 0):
                break
            num_equal -= value == least
            length += 1
        lengths[index] = length
    return lengths
