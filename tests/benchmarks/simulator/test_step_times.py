"""Fitting the model of step times recovers its terms."""

import random

import pytest

from proto.messages.sched_trace import Decision, PoolUse, Result, Snapshot, Step
from tests.benchmarks.simulator.simulation import TooFewStepsError, fit


def steps(seconds, number=200, engine_us=0, overlapped=False, seed=0):
    """Return lines of steps that take `seconds(tokens, rows, context)`."""
    rng, now, lines, before = random.Random(seed), 0.0, [], None
    for step in range(1, number + 1):
        tokens, rows = rng.randrange(1, 256), rng.randrange(1, 32)
        context = rng.randrange(1, 100_000)
        line = Step(
            time_us=round(now),
            step=step,
            snapshot=Snapshot(pool=PoolUse(free=1), running=1, token_budget=256, seats=32),
            decision=Decision(running=list(range(rows)), num_tokens=tokens, context_tokens=context),
        )
        took = seconds(tokens, rows, context) * 1e6
        if overlapped and before is not None:
            lines += [line, before]
            now = before.time_us
            before = Result(time_us=round(now + took), step=step)
            continue
        lines.append(line)
        now += took
        before = Result(time_us=round(now), step=step)
        if not overlapped:
            lines.append(before)
            now += engine_us
    return lines


def test_four_terms_and_the_engine_time_are_recovered() -> None:
    lines = steps(lambda t, r, c: 1e-3 * (5 + 0.1 * t + 0.2 * r + 1e-4 * c), engine_us=700)
    model = fit(lines, overlapped=False)
    assert model.base_ms == pytest.approx(5.7, abs=0.01)
    assert model.per_token_ms == pytest.approx(0.1, rel=0.01)
    assert model.per_row_ms == pytest.approx(0.2, rel=0.01)
    assert model.per_context_ms == pytest.approx(1e-4, rel=0.01)


def test_stalled_steps_are_outliers() -> None:
    def seconds(tokens, rows, context):
        return 1e-3 * (4 + 0.1 * tokens) + (5.0 if tokens == 77 else 0.0)

    model = fit(steps(seconds), overlapped=False)
    assert model.base_ms == pytest.approx(4, abs=0.2)
    assert model.per_token_ms == pytest.approx(0.1, rel=0.05)


def test_no_term_is_negative() -> None:
    model = fit(steps(lambda t, r, c: 1e-3 * (50 - 0.1 * t)), overlapped=False)
    assert model.per_token_ms == 0
    assert min(model.base_ms, model.per_row_ms, model.per_context_ms) >= 0
    assert model.seconds(1, 1, 1) > 0


def test_overlapped_steps_begin_at_the_previous_result() -> None:
    lines = steps(lambda t, r, c: 1e-3 * (3 + 0.05 * t), overlapped=True)
    model = fit(lines, overlapped=True)
    assert model.base_ms == pytest.approx(3, abs=0.05)
    assert model.per_token_ms == pytest.approx(0.05, rel=0.02)


def test_too_few_steps() -> None:
    with pytest.raises(TooFewStepsError, match="3 steps"):
        fit(steps(lambda t, r, c: 0.01, number=3), overlapped=False)
