"""Ceilings: the steps of a load, their cost, and the comparison that shows them."""

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.compare import ClosedLoad
from deploy.bench.servers import ServerSpec, tokend
from proto.errors import ConfigError
from proto.settings.config import SchedulerConfig, ServeConfig
from tests.benchmarks import ceilings
from tests.benchmarks.ceilings import (
    Budget,
    CeilingBench,
    Hardware,
    Step,
    between,
    budget_of,
    row_counts,
    settings_of,
    steps_of,
)
from tests.benchmarks.messages import LimitsTimings
from tests.benchmarks.sizes import parse, specs_of
from tests.deploy.bench.test_compare import SMALL
from tests.fakes.openai_server import fake_openai

TIMINGS = LimitsTimings(
    device="a machine",
    num_threads=2,
    weights="packed",
    rows=[1, 4, 8],
    layer_products_ms=[2.0, 5.0, 7.0],
    head_product_ms=[1.0, 2.0, 4.0],
    attention_ns_per_pair=1e6,
    read_gb_per_s=0.001,
    weight_bytes=7_000,
    kv_bytes_per_token=[(10, None), (100, 3)],
)
"""Reading 1,000 bytes takes a millisecond, and so does a pair of tokens."""


@given(
    concurrency=st.integers(1, 9),
    num_requests=st.integers(1, 30),
    input_tokens=st.integers(1, 40),
    output_tokens=st.integers(1, 20),
    longest=st.integers(1, 64),
    more=st.integers(0, 64),
)
def test_every_token_is_computed_once(
    concurrency: int,
    num_requests: int,
    input_tokens: int,
    output_tokens: int,
    longest: int,
    more: int,
) -> None:
    """More rows fit into a step than decode, so that prompts are included."""
    load = ClosedLoad(concurrency, num_requests, input_tokens, output_tokens)
    budget = Budget(concurrency + longest + more, longest)
    steps = list(steps_of(load, budget))
    assert sum(step.prompt_tokens for step in steps) == num_requests * input_tokens
    assert sum(step.num_sampled for step in steps) == num_requests * output_tokens
    pairs = input_tokens * (input_tokens + 1) // 2
    assert sum(step.prompt_pairs for step in steps) == num_requests * pairs
    seen = range(input_tokens + 1, input_tokens + output_tokens)
    assert sum(sum(step.contexts) for step in steps) == num_requests * sum(seen)
    assert all(0 < step.num_rows <= budget.step_tokens for step in steps)
    assert all(len(step.contexts) <= concurrency for step in steps)


def test_prompts_are_chunked_and_follow_decodes() -> None:
    """Two requests of 5 tokens; at most 6 tokens in a step and 4 of one prompt."""
    assert list(steps_of(ClosedLoad(2, 2, 5, 2), Budget(6, 4))) == [
        Step([], prompt_tokens=6, prompt_pairs=10 + 3, num_sampled=0),
        Step([], prompt_tokens=4, prompt_pairs=5 + 12, num_sampled=2),
        Step([6, 6], num_sampled=2),
    ]


def test_the_cost_of_a_step_is_the_sum_of_its_parts() -> None:
    cost = Hardware(TIMINGS).cost(Step([2, 5], prompt_tokens=4, prompt_pairs=9, num_sampled=2))
    assert cost.layers == pytest.approx(6.0)  # 6 rows, between 4 and 8
    assert cost.head == pytest.approx(1.0 + 1 / 3)
    assert cost.kv == pytest.approx(0.01 * (2 + 5) + 0.1 * (2 + 3))  # a window of 3
    assert cost.attention == pytest.approx(9.0)
    assert cost.total == pytest.approx(16.0 + 1 / 3 + 0.57)


def test_the_ceiling_sums_all_steps() -> None:
    load, budget = ClosedLoad(2, 4, 3, 5), Budget(8, 8)
    hardware = Hardware(TIMINGS)
    ceiling = hardware.ceiling(load, budget)
    costs = [hardware.cost(step).total for step in steps_of(load, budget)]
    assert ceiling.output_tokens_per_s == pytest.approx(1e3 * 20 / sum(costs))
    assert ceiling.num_steps == len(costs) > ceiling.num_decode_steps > 0
    assert hardware.weights_ms == pytest.approx(7.0)


def test_product_times_are_interpolated() -> None:
    rows, values = [2, 4, 8], [3.0, 4.0, 10.0]
    assert [between(rows, values, at) for at in (0, 1, 2, 3, 4, 6, 8, 16)] == [
        *(0.0, 3.0, 3.0, 3.5, 4.0, 7.0, 10.0, 20.0)
    ]
    assert row_counts([1, 12, 99], Budget(48, 48)) == [1, 2, 4, 8, 12, 16, 32, 48]


def test_settings_come_from_the_command_of_a_started_daemon() -> None:
    config = settings_of(tokend("x", ["--max-num-batched-tokens", "64"]), {"seed": 5})
    assert config is not None
    assert budget_of(config) == Budget(64, 64)
    assert config.scheduler.max_num_batched_tokens == 64
    module = ServerSpec.parse("x=python -m deploy.cli serve --port {port}", "/health", 1.0)
    assert settings_of(module, {}) == ServeConfig(frontend=ServeConfig().frontend.__class__(port=0))
    for other in ("x=llama-server --port {port}", "x=vllm serve m --port {port}"):
        assert settings_of(ServerSpec.parse(other, "/health", 1.0), {}) is None
    with pytest.raises(ConfigError, match="--max-num-sets"):
        settings_of(tokend("x", ["--max-num-sets", "3"]), {})


def test_long_prefill_token_threshold_limits_chunks() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, long_prefill_token_threshold=16)
    assert budget_of(ServeConfig(scheduler=scheduler)) == Budget(64, 16)


class FakeLimits:
    """Fixed limits. num_measured: number of calls of `measure`."""

    name = "one"
    budget = Budget(8, 8)

    def __init__(self) -> None:
        self.num_measured = 0
        self.program = nullcontext()

    def measure(self) -> Hardware:
        self.num_measured += 1
        return Hardware(TIMINGS)


def test_a_comparison_shows_the_ceiling_of_every_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = FakeLimits()

    def settings(spec: ServerSpec, settings: object) -> ServeConfig | None:
        return ServeConfig() if spec.name == "one" else None

    monkeypatch.setattr(ceilings, "settings_of", settings)
    monkeypatch.setattr(ceilings, "limits_program", lambda *args, **options: limits)
    file = tmp_path / "figures.json"
    with fake_openai() as one, fake_openai() as other:
        servers = ["--server", f"one={one.url}", "--server", f"other={other.url}"]
        ceilings.main([*servers, *SMALL, "--rounds", "2", "--json", str(file)])
    assert limits.num_measured == 2
    found = json.loads(file.read_text())
    ceiling = limits.measure().ceiling(ClosedLoad(2, 3, 6, 3), limits.budget)
    for each in found["rounds"]:
        turn = each["one"]
        assert turn["at_2_ceiling_output_tokens_per_s"] == pytest.approx(
            ceiling.output_tokens_per_s
        )
        assert turn["at_2_share_of_ceiling"] == pytest.approx(
            turn["at_2_output_tokens_per_s"] / ceiling.output_tokens_per_s
        )
        assert turn["alone_tpot_of_weights_read"] == pytest.approx(turn["alone_tpot_ms_p50"] / 7)
        prompt = limits.measure().cost(Step([], prompt_tokens=5, prompt_pairs=15, num_sampled=1))
        assert turn["alone_ttft_of_prompt"] == pytest.approx(
            turn["alone_ttft_ms_p50"] / prompt.total
        )
        assert turn["limits"]["weights"] == "packed"
        assert "limits" not in each["other"]
    assert found["figures"]["at_2_share_of_ceiling"]["medians"]["other"] is None
    shown = capsys.readouterr().out
    assert "share of the ceiling, concurrency 2 (>= 0.8)" in shown
    assert "client's part of a core, concurrency 2" in shown
    assert "one, last measured: weights packed, 2 threads" in shown


def test_without_daemons_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "worker_program", None)
    servers = ["--server", "x=http://127.0.0.1:9", "--server", "y=http://127.0.0.1:9"]
    with ExitStack() as stack:
        options = parse([*servers, *SMALL], "ceilings", None)
        bench = CeilingBench(options, specs_of(options, ""), stack)
        assert bench.extra_figures("alone", "alone") == ()
        bench.before_turn(bench.specs[0])
        assert bench.after_turn(bench.specs[0], {"x": 1.0}) == {"x": 1.0}
        assert bench.notes() == []
