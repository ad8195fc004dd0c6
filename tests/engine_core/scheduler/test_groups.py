"""Requests of a model with windows, from the queue to the end."""

import pytest

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.events import num_cached_tokens
from tests.fakes.paged_runner import undisturbed

GEMMA = (None, 512, 512, 512, 512, 512)
"""KV groups of 3 full and 15 window layers, three layers to a group."""


def engine_of(windows, **options) -> EngineHarness:
    return EngineHarness(windows=windows, max_num_batched_tokens=256, **options)


def most_blocks_in_use(engine: EngineHarness) -> int:
    """Run to the end; return the peak of used blocks."""
    most = 0
    while engine.scheduler.num_unfinished:
        engine.step()
        pool = engine.kv_cache.pool
        most = max(most, pool.num_blocks - 1 - pool.num_free)
    return most


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_request_holds_fewer_blocks_than_full_attention_would(caching):
    prompt = [position % 900 for position in range(3000)]
    held = {}
    for windows in (GEMMA, (None,) * 6):
        engine = engine_of(windows, num_blocks=2000, enable_prefix_caching=caching)
        request = engine.add_one(prompt, max_tokens=20, ignore_eos=True)
        held[windows] = most_blocks_in_use(engine)
        assert engine.tokens_of(request) == undisturbed(prompt, 20)
        engine.run()
        engine.assert_idle()
    assert held[(None,) * 6] == 6 * 189
    assert held[GEMMA] <= 189 + 5 * 49
    assert held[GEMMA] < held[(None,) * 6] / 2


def test_cached_tokens_of_a_request_are_those_that_all_groups_hold():
    engine = engine_of(GEMMA, num_blocks=3000)
    prompt = [position % 900 for position in range(1000)]
    first = engine.add_one(prompt, max_tokens=4, ignore_eos=True)
    engine.run()
    second = engine.add_one(prompt[:990] + [7] * 30, max_tokens=4, ignore_eos=True)
    engine.run()
    assert num_cached_tokens(engine.outputs[(second.request_id, 0)][0]) == 976
    assert engine.tokens_of(first) == undisturbed(prompt, 4)
    assert engine.tokens_of(second) == undisturbed(second.prompt_token_ids, 4)
    stats = engine.scheduler.pop_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (1000 + 1020, 976)


def test_the_longest_request_that_the_pool_holds_runs_to_its_end():
    """In a pool that has just the blocks that the largest request may need, and the null block."""
    windows = (None, 40, 40)
    for length in (16, 200, 1000):
        most = engine_of(windows, max_model_len=length).kv_cache.max_blocks(length)
        engine = engine_of(windows, num_blocks=1 + most, max_model_len=length)
        request = engine.add_one([1] * (length // 2), max_tokens=length, ignore_eos=True)
        engine.run()
        assert request.num_tokens == length
        engine.assert_idle()
