"""When `tokend bench chaos` is not content, and what it prints."""

import io
import signal

import pytest
from rich.console import Console

from deploy.loadtest.chaos.crowd import Tally
from deploy.loadtest.chaos.killer import ENGINE, WORKER, Blow, Strike
from deploy.loadtest.chaos.oracle import Difference, Verdict
from deploy.loadtest.chaos.report import Findings, show
from deploy.loadtest.chaos.stream import Stream

EXPECTED = Stream({"prompt": "The sea", "temperature": 0}, choices={0: [1, 2, 3]})
DIFFERENCE = Difference(EXPECTED, 0, 1, 9)


def findings(**changes: object) -> Findings:
    tally = Tally(num_requests=5, verdict=Verdict(num_tokens=2_000))
    return Findings(**({"tally": tally, "strikes": []} | changes))


def test_nothing_to_complain_of() -> None:
    assert findings().faults == []


def test_a_tie_is_none_and_a_difference_is_one() -> None:
    assert findings(differences=[(DIFFERENCE, 1e-4)]).faults == []
    (fault,) = findings(differences=[(DIFFERENCE, 2e-3)]).faults
    assert "token 1: 9 instead of 2" in fault


def test_so_many_ties_are_none() -> None:
    (fault,) = findings(differences=[(DIFFERENCE, 1e-4)] * 5).faults
    assert "5 ties in 2000 tokens" in fault


@pytest.mark.parametrize(
    "changes",
    [
        {"tally": Tally(failures=["ReadError"])},
        {"tally": Tally(verdict=Verdict(wrong=["2 tokens instead of 3"]))},
        {"after": ["tokend: api 0: 30 open descriptors instead of 20"]},
        {"trouble": ["waited 120 s for a process"]},
    ],
)
def test_each_of_these_is_a_fault(changes: dict[str, object]) -> None:
    assert len(findings(**changes).faults) == 1


def test_what_is_printed() -> None:
    strikes = [
        Strike(Blow((WORKER,), signal.SIGKILL), (2.0, 3.0)),
        Strike(Blow((ENGINE, WORKER), signal.SIGSEGV), (4.0,)),
    ]
    lines = ["worker 0: is back after 1.5 s", "engine 0: (pid 3) was killed", "nothing"]
    text = io.StringIO()
    show(Console(file=text, width=110), findings(strikes=strikes, lines=lines))
    assert "worker: at work 1.5 s after its death" in text.getvalue()
    assert "engine and worker SIGSEGV" in text.getvalue()
    (row,) = [line for line in text.getvalue().splitlines() if "worker SIGKILL" in line]
    assert row.replace("│", "").split() == [
        "worker",
        "SIGKILL",
        "1",
        "2.00",
        "2.00",
        "2.00",
        "3.00",
    ]
