"""What `tokend bench fairness` says of what it measured."""

import pytest

from deploy.loadtest.overload.fairness import Verdict
from deploy.loadtest.overload.offers import Offer, Outcome

FLOOD = Outcome([Offer(200, 0.1, 5.0), Offer(200, 0.1, 7.0)], 10.0)


@pytest.mark.parametrize(("flooded", "word"), [(0.29, "kept"), (0.31, "MISSED")])
def test_the_delay_is_compared_with_two_median_steps(flooded: float, word: str) -> None:
    verdict = Verdict([0.1, 0.1, 9.0], [flooded, flooded, 0.2], [0.1, 0.1, 3.0])
    assert verdict.delay == pytest.approx(flooded - 0.1)
    assert verdict.limit == pytest.approx(0.2)
    caption = verdict.table(FLOOD).caption
    assert isinstance(caption, str)
    assert caption.endswith(word)
