"""What SIGHUP means."""

import pytest

from deploy.hang_up import HangUp


@pytest.mark.parametrize(
    ("before", "after", "meaning"),
    [(False, False, "reload"), (True, True, "reload"), (True, False, "end")],
)
def test_what_a_hang_up_means(before: bool, after: bool, meaning: str) -> None:
    answers = iter([before, after])
    assert HangUp(lambda: next(answers, after)).meaning() == meaning
