"""--preemption: swap or recompute, by the measured times of loads and steps."""

import pytest

from engine_core.scheduler.preemption import SwapRule
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.kv_connector import FakeConnector, always
from tests.fakes.paged_runner import undisturbed


def measured(setup: float, load_token: float, compute_token: float) -> SwapRule:
    """Return a rule with measured loads of several sizes, and steps."""
    rule = SwapRule("auto")
    for num_tokens in (1, 256, 1024, 4096) * 6:
        rule.learn_load(num_tokens, setup + num_tokens * load_token)
        rule.learn_step(256, 256 * compute_token)
    return rule


def test_the_settings_decide_alone() -> None:
    recompute, swap = SwapRule("recompute"), SwapRule("swap")
    for rule in (recompute, swap):
        rule.learn_load(100, 1000.0)
        rule.learn_step(100, 0.001)
    assert not recompute.loads(100)
    assert swap.loads(100)


def test_auto_loads_until_both_rates_are_known() -> None:
    rule = SwapRule("auto")
    assert rule.loads(1)
    rule.learn_load(100, 1000.0)
    assert rule.loads(1)
    rule.learn_step(256, 0.001)
    assert not rule.loads(1)


@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 4096, 16384])
def test_a_fast_bus_wins_at_every_length_of_the_table(num_tokens: int) -> None:
    """46.8 ms for 4,096 tokens, and 4,000 tokens a second: 22 times faster (seed 002)."""
    rule = measured(setup=1e-4, load_token=46.8e-3 / 4096, compute_token=1 / 4000)
    assert rule.loads(num_tokens)


def test_a_slow_bus_loses() -> None:
    assert not measured(setup=1e-4, load_token=1e-3, compute_token=1 / 4000).loads(4096)


def test_short_ones_are_computed_where_a_load_takes_long_to_begin() -> None:
    rule = measured(setup=0.05, load_token=2e-5, compute_token=1 / 4000)
    break_even = 0.05 / (1 / 4000 - 2e-5)
    assert not rule.loads(int(break_even * 0.5))
    assert rule.loads(int(break_even * 2.0))


def test_the_rule_follows_what_changes() -> None:
    rule = measured(setup=1e-4, load_token=1e-5, compute_token=1 / 4000)
    assert rule.loads(1024)
    for _ in range(40):
        rule.learn_load(1024, 2.0)
    assert not rule.loads(1024)


def test_one_outlier_changes_little() -> None:
    rule = measured(setup=1e-4, load_token=1e-5, compute_token=1 / 4000)
    rule.learn_load(1024, 100.0)
    assert rule.loads(1024)


def test_steps_without_information_are_not_learnt_from() -> None:
    rule = SwapRule("auto")
    rule.learn_load(0, 1.0)
    rule.learn_load(10, 0.0)
    rule.learn_step(1, 1.0)
    rule.learn_step(256, 0.0)
    assert rule.loads(1)
    rule.learn_load(10, 10.0)
    assert rule.loads(1), "no step time was measured"


def computed_again(preemption: str, load_seconds: float = 0.0, step_seconds: float = 0.0) -> int:
    """Return the recomputed tokens of a preempted request of 40, of which 32 are in the connector.

    load_seconds, step_seconds: measured times of loads and steps of 32 tokens.
    """
    connector = FakeConnector(always(32, is_async=False))
    engine = EngineHarness(connector=connector, preemption=preemption)
    rule = engine.scheduler._swap_rule
    rule.learn_load(32, load_seconds)
    rule.learn_step(32, step_seconds)
    request = engine.add_one([7 * each % 900 for each in range(40)], max_tokens=3)
    assert scheduled(engine.step()) == {request.seq_id: 8}, "new requests are always loaded"
    engine.scheduler.reset_prefix_cache(preempting=True)
    num_tokens = scheduled(engine.step())[request.seq_id] - 1  # the token that was sampled
    while engine.scheduler.num_unfinished:
        engine.step()
    assert engine.tokens_of(request) == undisturbed(request.prompt_token_ids, 3)
    return num_tokens


def test_a_preempted_request_is_loaded_according_to_the_setting() -> None:
    assert computed_again("recompute") == 40
    assert computed_again("swap") == 8


def test_a_preempted_request_is_loaded_where_loading_was_faster() -> None:
    assert computed_again("auto") == 8
    assert computed_again("auto", load_seconds=1.0, step_seconds=2.0) == 8
    assert computed_again("auto", load_seconds=2.0, step_seconds=1.0) == 40
