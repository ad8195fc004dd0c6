"""How the pool is sized, and what its size means for requests."""

import pytest

from engine_core.pool_plan import plan_pool
from proto import PROTOCOL_VERSION
from proto.config import CacheConfig, ModelConfig, ServeConfig
from proto.errors import ConfigError
from proto.lifecycle import KVCacheGeometry, WorkerReady


def worker(kv_cache_bytes, bytes_per_token=100):
    geometry = KVCacheGeometry(1, 1, 8, "float32", bytes_per_token)
    return WorkerReady(PROTOCOL_VERSION, 1, 0, geometry, kv_cache_bytes, 1000, b"", "fake")


def plan(workers, max_position=4096, max_model_len=None, **cache):
    config = ServeConfig(cache=CacheConfig(**cache), model=ModelConfig(max_model_len=max_model_len))
    return plan_pool(workers, config, max_position)


def test_the_pool_fills_the_memory_that_is_granted():
    result = plan([worker(1_000_000_000)])
    assert result.num_blocks == 1_000_000_000 // 1600
    assert result.num_usable_blocks == result.num_blocks - 1
    assert (result.max_model_len, result.notice) == (4096, "")


def test_the_smallest_rank_decides():
    assert plan([worker(1_000_000), worker(160_000)]).num_blocks == 100


def test_an_override_decides_alone():
    assert plan([worker(160_000)], num_gpu_blocks_override=7).num_blocks == 7


def test_a_pool_shorter_than_the_model_lowers_the_usable_length_and_says_so():
    result = plan([worker(160_000)])
    assert result.max_model_len == 99 * 16
    assert "1584" in result.notice
    assert "4096" in result.notice
    assert "\n" not in result.notice


def test_a_length_that_was_asked_for_counts():
    result = plan([worker(1_000_000_000)], max_model_len=100)
    assert (result.max_model_len, result.notice) == (100, "")
    assert plan([worker(160_000)], max_model_len=1584).notice == ""
    assert plan([worker(1_000_000_000)], max_model_len=10_000).max_model_len == 4096


def test_a_pool_without_one_usable_block_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"3200 bytes.* has 3199") as caught:
        plan([worker(3199)])
    assert caught.value.parameter == "kv_cache_memory"
