"""The invariants of the scheduler hold after every step of random runs.

`invariants.py` has the checks, `lives.py` the operations.
"""

import pytest

from tests.engine_core.scheduler.lives import KINDS, lives

SEEDS = 4
OPERATIONS = 600


@pytest.mark.parametrize("kind", KINDS)
def test_random_request_sequences_keep_the_invariants(kind):
    totals = lives(kind, range(SEEDS), OPERATIONS)
    print(dict(totals))
    for what, fewest in KINDS[kind].expects.items():
        assert totals[what] >= fewest, f"too few for a proof: {totals[what]} {what}"


@pytest.mark.suite("lives")
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_request_sequences_keep_the_invariants(kind):
    lives(kind, range(SEEDS, 60), 2 * OPERATIONS)
