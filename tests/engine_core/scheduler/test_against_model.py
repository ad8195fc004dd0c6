"""Thousands of random steps: hits, victims, token counts and blocks are the model's."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.engine_core.scheduler.side_by_side import (
    Draw,
    SideBySide,
    overlapped,
    pressure,
    windows,
)

STEPS = 500
SEEDS = range(22)
KINDS: dict[str, tuple[Draw, ...]] = {
    "plain": (),
    "windows": (windows,),
    "overlapped": (overlapped,),
    "pressure": (pressure,),
    "all of it": (windows, overlapped, pressure),
}


def lives(kind: str, num_tenants: int, seeds: Iterable[int]) -> Counter[str]:
    """Compare every step of so many lives; returns how much happened in them."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        both = SideBySide(seed, num_tenants, KINDS[kind])
        for _ in range(STEPS):
            step = both.step()
            totals["steps"] += 1
            totals["victims"] += len(step.victims)
            totals["hits"] += sum(step.hits.values())
            totals["held"] += len(both.model.waits.held)
            totals["copies"] += len(step.copies) // 2
        both.assert_sound()
    print(dict(totals))
    return totals


@pytest.mark.parametrize("num_tenants", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_the_model(kind, num_tenants):
    totals = lives(kind, num_tenants, SEEDS)
    assert totals["steps"] >= 10_000
    assert totals["victims"] > 100
    assert totals["hits"] > 10_000
    assert totals["held"] > 30
    assert totals["copies"] > 100
