"""Faults and limits of `tokend bench chaos`, and its output."""

import io
import json
import signal

import pytest
from rich.console import Console

from deploy.bench.chaos.bench import ChaosFindings, show
from deploy.bench.chaos.killer import ENGINE, WORKER, ClientCounts, Disruption, DisruptionResult
from deploy.bench.chaos.streams import CompletionStream, StreamComparison, TokenDifference

EXPECTED = CompletionStream({"prompt": "The sea", "temperature": 0}, choices={0: [1, 2, 3]})
DIFFERENCE = TokenDifference(EXPECTED, 0, 1, 9)


def findings(**changes: object) -> ChaosFindings:
    counts = ClientCounts(num_requests=5, comparison=StreamComparison(num_tokens=2_000))
    return ChaosFindings(**({"counts": counts, "disruptions": []} | changes))


def test_a_clean_run_has_no_faults() -> None:
    assert findings().faults == []


def test_a_tie_is_not_a_fault_but_a_difference_is() -> None:
    assert findings(differences=[(DIFFERENCE, 1e-4)]).faults == []
    (fault,) = findings(differences=[(DIFFERENCE, 2e-3)]).faults
    assert "token 1: 9 instead of 2" in fault


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": ClientCounts(failures=["ReadError"])},
        {
            "counts": ClientCounts(
                comparison=StreamComparison(other_errors=["2 tokens instead of 3"])
            )
        },
        {"leftovers": ["tokend: api 0: 30 open descriptors instead of 20"]},
        {"aborted": ["waited 120 s for a process"]},
    ],
)
def test_every_finding_is_a_fault(changes: dict[str, object]) -> None:
    assert len(findings(**changes).faults) == 1


def missed(found: ChaosFindings) -> list[str]:
    return [each.name for each in found.limits if not each.met]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"counts": ClientCounts(failures=["ReadError"])}, "failed requests"),
        (
            {
                "counts": ClientCounts(
                    comparison=StreamComparison(other_errors=["2 tokens instead of 3"])
                )
            },
            "different answers",
        ),
        ({"differences": [(DIFFERENCE, 2e-3)]}, "different answers"),
        ({"differences": [(DIFFERENCE, 1e-4)] * 5}, "ties"),
        ({"leftovers": ["tokend: api 0: gone"]}, "left over"),
        ({"aborted": ["waited 120 s for a process"]}, "ended early"),
    ],
)
def test_every_fault_misses_its_limit(changes: dict[str, object], name: str) -> None:
    assert missed(findings(**changes)) == [name]


def test_recovery_gaps_have_limits_by_role() -> None:
    """Medians: 2 s after an engine's death, a worker's start time plus 2 s after a worker's.

    Of one or two deaths there is no limit.
    """

    def run(engine: float, worker: float, number: int = 3) -> list[str]:
        disruptions = [
            *[DisruptionResult(Disruption((ENGINE,), signal.SIGKILL), (engine, 9.0))] * number,
            *[DisruptionResult(Disruption((WORKER,), signal.SIGSEGV), (worker,))] * number,
            DisruptionResult(Disruption((ENGINE,), signal.SIGSTOP), (7.0,)),
            DisruptionResult(Disruption((ENGINE, WORKER), signal.SIGKILL), (9.0,)),
        ]
        return missed(findings(disruptions=disruptions, lines=["worker 0 is back after 1.5 s"]))

    assert run(2.0, 3.5) == []
    assert run(2.1, 3.5) == ["engine 0: median gap"]
    assert run(2.0, 3.6) == ["worker 0: median gap"]
    assert run(2.1, 3.6, number=2) == []


def test_figures_are_written_as_json() -> None:
    disruptions = [DisruptionResult(Disruption((ENGINE,), signal.SIGKILL), (2.0, 3.0))]
    read = json.loads(json.dumps(findings(disruptions=disruptions).to_dict()))
    assert read["kills"] == [{"kind": "engine SIGKILL", "gap": 2.0, "gaps": [2.0, 3.0]}]
    assert (read["requests"], read["tokens"], read["faults"]) == (5, 2_000, [])


def test_printed_report() -> None:
    disruptions = [
        DisruptionResult(Disruption((WORKER,), signal.SIGKILL), (2.0, 3.0)),
        DisruptionResult(Disruption((ENGINE, WORKER), signal.SIGSEGV), (4.0,)),
    ]
    lines = ["worker 0 is back after 1.5 s", "engine 0 (pid 3) was killed", "nothing"]
    text = io.StringIO()
    show(Console(file=text, width=110), findings(disruptions=disruptions, lines=lines))
    assert "worker: ready 1.5 s after its death" in text.getvalue()
    assert "engine and worker SIGSEGV" in text.getvalue()
    assert "met" in text.getvalue()
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
