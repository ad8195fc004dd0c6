"""Verdict and figures of `python -m tests.benchmarks.fairness`."""

import pytest

from tests.benchmarks.arrivals import Attempt, PartResult
from tests.benchmarks.fairness import Verdict

FLOOD = PartResult([Attempt(200, 0.1, 5.0), Attempt(200, 0.1, 7.0)], 10.0)


@pytest.mark.parametrize(("flooded", "word"), [(0.29, "met"), (0.31, "MISSED")])
def test_the_delay_is_compared_with_two_median_steps(flooded: float, word: str) -> None:
    verdict = Verdict([0.1, 0.1, 9.0], [flooded, flooded, 0.2], [0.1, 0.1, 3.0])
    assert verdict.delay == pytest.approx(flooded - 0.1)
    assert verdict.limit == pytest.approx(0.2)
    caption = verdict.table(FLOOD).caption
    assert isinstance(caption, str)
    assert caption.endswith(word)


def test_figures_are_written_in_milliseconds() -> None:
    found = Verdict([0.1], [0.4], [0.2]).plain(FLOOD, 3)
    assert found == {
        "command": "python -m tests.benchmarks.fairness",
        "quiet_idle_first_token_ms_p50": pytest.approx(100.0),
        "quiet_idle_first_token_ms_p99": pytest.approx(100.0),
        "quiet_flooded_first_token_ms_p50": pytest.approx(400.0),
        "quiet_flooded_first_token_ms_p99": pytest.approx(400.0),
        "flood_first_token_ms_p50": pytest.approx(6000.0),
        "flood_first_token_ms_p99": pytest.approx(6980.0),
        "step_ms_p50": pytest.approx(200.0),
        "step_ms_p99": pytest.approx(200.0),
        "delay_ms": pytest.approx(300.0),
        "limit_ms": pytest.approx(400.0),
        "num_flood_requests": 2,
        "num_failed": 3,
    }
