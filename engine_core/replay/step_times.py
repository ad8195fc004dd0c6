"""How long steps take, fitted to those of a trace.

A step's time is from its decision, or from the result before it where that came later, to its
result. Without overlap the engine itself takes some time between a result and the next decision;
its median is part of every step.

    overlapped     decide 1, 2     result 1 ├──── step 2 ────┤ result 2
    otherwise      decide 1 ├──── step 1 ────┤ result 1 ├ engine ┤ decide 2
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proto.replay import StepModel
from proto.sched_trace import Result, Step, TraceLine

Matrix = NDArray[np.float64]

FEWEST = 8
"""Steps that something can be fitted to."""
_TRIMMED = 0.98
"""Part of the steps that counts in the end: the others are those that fit worst."""


class TooFewStepsError(ValueError):
    """There is nothing to fit a model to."""


def fit(lines: Sequence[TraceLine], overlapped: bool) -> StepModel:
    """Least squares, without negative terms; raises TooFewStepsError."""
    shapes, times = _samples(lines)
    if len(times) < FEWEST:
        raise TooFewStepsError(f"{len(times)} steps are too few to know how long they take")
    features, measured = np.array(shapes, dtype=np.float64), np.array(times)
    weights = _least_squares(features, measured)
    errors = np.abs(features @ weights - measured)
    kept = errors <= np.quantile(errors, _TRIMMED)
    weights = _least_squares(features[kept], measured[kept])
    base, per_token, per_row, per_context = (float(each) / 1e3 for each in weights)
    return StepModel(
        base_ms=base + (0.0 if overlapped else _turnaround(lines) / 1e3),
        per_token_ms=per_token,
        per_row_ms=per_row,
        per_context_ms=per_context,
    )


def _samples(lines: Sequence[TraceLine]) -> tuple[list[tuple[int, ...]], list[int]]:
    """(1, tokens, sequences, context) and microseconds of each step that has a result."""
    shapes: list[tuple[int, ...]] = []
    times: list[int] = []
    open_steps: dict[int, Step] = {}
    before = 0
    for line in lines:
        if isinstance(line, Step):
            open_steps[line.step] = line
        elif isinstance(line, Result):
            step = open_steps.pop(line.step, None)
            if step is not None:
                made = step.decision
                num_rows = len(made.new) + len(made.resumed) + len(made.running)
                shapes.append((1, made.num_tokens, num_rows, made.context_tokens))
                times.append(line.time_us - max(step.time_us, before))
            before = line.time_us
    return shapes, times


def _turnaround(lines: Sequence[TraceLine]) -> float:
    """Microseconds, median, from a result to the next decision where somebody runs."""
    result: Result | None = None
    found: list[int] = []
    for line in lines:
        if isinstance(line, Result):
            result = line
        elif isinstance(line, Step):
            if result is not None and line.snapshot.running:
                found.append(line.time_us - result.time_us)
            result = None
    return float(np.median(found)) if found else 0.0


def _least_squares(features: Matrix, measured: Matrix) -> Matrix:
    """Terms that would be negative are left out, the worst one first."""
    used = list(range(features.shape[1]))
    weights = np.zeros(features.shape[1])
    while used:
        scale = np.maximum(np.abs(features[:, used]).max(axis=0), 1.0)
        solved = np.linalg.lstsq(features[:, used] / scale, measured, rcond=None)[0]
        if (solved >= 0).all():
            weights[used] = solved / scale
            break
        del used[int(solved.argmin())]
    return weights
