"""Figures of `python -m tests.benchmarks.offload --cost`, without daemons."""

import argparse
import json
from collections.abc import Sequence

import pytest

from tests.benchmarks import offload
from tests.benchmarks import offload as offload_bench
from tests.benchmarks.command import run
from tests.benchmarks.offload import Cost, CostLoad, CostRound, TakeTurn, Turn, play_rounds

LOAD = CostLoad(num_clients=3, num_requests=2, prompt_tokens=5)


def test_both_daemons_get_the_same_prompts_and_alternate() -> None:
    calls: list[tuple[str, Sequence[Sequence[int]]]] = []

    def taker(name: str, speed: float) -> TakeTurn:
        def turn(prompts: Sequence[Sequence[int]]) -> Turn:
            calls.append((name, prompts))
            return Turn(speed + len(calls), 1.0)

        return turn

    rounds = play_rounds(taker("without", 100.0), taker("connected", 200.0), 3, LOAD)
    names = [name for name, _ in calls]
    assert names == ["without", "connected", "connected", "without", "without", "connected"]
    asked = [prompts for _, prompts in calls]
    assert asked[0::2] == asked[1::2]
    assert all(len(prompts) == 6 for prompts in asked)
    everything = [tuple(prompt) for prompts in asked[0::2] for prompt in prompts]
    assert len(set(everything)) == len(everything), "no prompt is repeated, so there are no hits"
    assert {len(prompt) for prompt in everything} == {5}
    assert [each.without.tokens_per_second for each in rounds] == [101.0, 104.0, 105.0]
    assert [each.connected.tokens_per_second for each in rounds] == [202.0, 203.0, 206.0]


def test_the_cost_is_the_median_of_pairs() -> None:
    rounds = [
        CostRound(Turn(100.0, 2.0), Turn(99.0, 2.02)),
        CostRound(Turn(50.0, 2.0), Turn(10.0, 4.0)),
        CostRound(Turn(200.0, 1.0), Turn(200.0, 1.0)),
    ]
    cost = Cost(rounds, loads=0, stores=7)
    assert cost.speed == pytest.approx(0.99)
    assert cost.cpu == pytest.approx(1.01)
    document = offload_bench._cost_document(cost)
    assert (document["speed"], document["stores"], len(document["rounds"])) == (cost.speed, 7, 3)
    json.dumps(document)


@pytest.mark.parametrize(
    ("given", "plain", "connector"),
    [
        (["--dtype", "float32"], ["--dtype", "float32"], None),
        (["--kv-transfer-config", "{}", "--port", "1"], ["--port", "1"], ["{}"]),
        (["--kv-transfer-config={}"], [], ["--kv-transfer-config={}"]),
    ],
)
def test_the_reference_daemon_has_all_flags_but_the_connector(
    given: list[str], plain: list[str], connector: list[str] | None
) -> None:
    flags, of_connector = offload_bench._flags(argparse.Namespace(serve_flags=given))
    assert flags == plain
    if connector is None:
        assert json.loads(of_connector[1])["kv_connector"] == "OffloadingConnector"
    else:
        assert of_connector[-1:] == connector


def test_cost_and_trace_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(offload.main, ["--cost", "--only-trace"]) == 2
    assert "--only-trace" in capsys.readouterr().err
