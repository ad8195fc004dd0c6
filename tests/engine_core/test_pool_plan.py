"""How the pool is sized, and what its size means for requests."""

import itertools

import msgspec
import pytest

from engine_core.kv_cache.coordinator import longest_request, max_blocks_of_request
from engine_core.pool_plan import check_ranks, plan_pool, weight_memory
from engine_core.scheduler.limits import ChunkRule
from proto.errors import ConfigError, ModelError
from proto.messages.lifecycle import KVGroup, WeightFormatMemory
from proto.settings.config import CacheConfig, ModelConfig, SchedulerConfig, ServeConfig
from tests.fakes import lifecycle_messages


def worker(kv_cache_bytes, bytes_per_token=100, windows=(None,)):
    ready = lifecycle_messages.worker_ready(kv_cache_bytes=kv_cache_bytes)
    groups = tuple(KVGroup(window) for window in windows)
    geometry = msgspec.structs.replace(
        ready.geometry, bytes_per_token=bytes_per_token, groups=groups
    )
    return msgspec.structs.replace(ready, geometry=geometry)


def plan(workers, max_position=4096, max_model_len=None, budget=512, **cache):
    config = ServeConfig(
        cache=CacheConfig(**cache),
        model=ModelConfig(max_model_len=max_model_len),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget),
    )
    return plan_pool(workers, config, max_position)


def test_the_pool_fills_the_memory_that_is_granted():
    result = plan([worker(1_000_000_000)])
    assert result.num_blocks == 1_000_000_000 // 1600
    assert result.num_usable_blocks == result.num_blocks - 1
    assert (result.max_model_len, result.notice) == (4096, "")


def test_the_smallest_rank_decides():
    assert plan([worker(1_000_000), worker(160_000)]).num_blocks == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 7}, "vocabulary size 1000 and 7"),
        ({"model_fingerprint": b"h" * 32}, "fingerprint of model and weights .* and 6868"),
        ({"draft_fingerprint": b"h" * 32}, "fingerprint of the draft model  and 6868"),
        ({"dtype": "int8"}, "KV dtype float32 and int8"),
        ({"head_dim": 3}, "head size .* and 3"),
        ({"num_slots": 9}, "layers per KV group .* and 9"),
        ({"groups": (KVGroup(64),)}, r"windows of the KV groups \[None\] and \[64\]"),
        ({"groups": (KVGroup(kind="state"),)}, "kinds of the KV groups .*state"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_with_both_values(changes, message):
    first = lifecycle_messages.worker_ready()
    geometry = {name: value for name, value in changes.items() if hasattr(first.geometry, name)}
    second = msgspec.structs.replace(
        first,
        rank=1,
        geometry=msgspec.structs.replace(first.geometry, **geometry),
        **{name: value for name, value in changes.items() if name not in geometry},
    )
    with pytest.raises(ModelError, match=f"rank 0 and rank 1 do not fit together: {message}"):
        check_ranks([first, second])


def test_ranks_may_have_different_numbers_of_kv_heads():
    first = worker(160_000)
    geometry = msgspec.structs.replace(first.geometry, num_kv_heads=9, bytes_per_token=900)
    check_ranks([first, msgspec.structs.replace(first, rank=1, geometry=geometry, fingerprint=b"")])


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


@pytest.mark.parametrize(
    ("cache", "way_out"),
    [
        ({}, "raise --kv-cache-memory to 1M"),
        ({"num_gpu_blocks_override": 100}, "raise --num-gpu-blocks-override to 101"),
    ],
)
def test_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_the_sum(cache, way_out):
    with pytest.raises(ConfigError) as caught:
        plan([worker(160_000), worker(160_000)], max_model_len=1585, **cache)
    assert caught.value.param == "max_model_len"
    assert str(caught.value) == (
        "--max-model-len 1585 needs 100 KV blocks of 16 tokens (0.3 MiB), and the KV pool has "
        f"99 KV blocks of 16 tokens (0.3 MiB): {way_out} or lower --max-model-len to 1584"
    )
    fits = {"kv_cache_memory": 1 << 20} if not cache else {"num_gpu_blocks_override": 101}
    granted = [worker(1 << 19), worker(1 << 19)]
    assert plan(granted, max_model_len=1585, **fits).max_model_len == 1585


def test_a_pool_without_one_usable_block_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"3200 bytes.* has 3199") as caught:
        plan([worker(3199)])
    assert caught.value.param == "kv_cache_memory"


@pytest.mark.parametrize(
    ("windows", "num_blocks"),
    [((None,), 1024), ((1024,), 129), ((None, 1024), 1024 + 129), ((1024, 1024, None), 1282)],
)
def test_blocks_of_a_request(windows, num_blocks):
    """HY-20: 16,384 tokens, at most 1,024 of them in a step."""
    groups = [KVGroup(window) for window in windows]
    assert max_blocks_of_request(groups, 16384, 16, 1024) == num_blocks
    # One that is shorter than the window needs no more than full attention would.
    assert max_blocks_of_request(groups, 100, 16, 1024) == 7 * len(windows)
    assert max_blocks_of_request(groups, 16384, 16, None) == 1024 * len(windows)


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_a_window_group_holds_as_many_blocks_as_a_step_can_touch(block_size):
    for window, chunk in itertools.product(range(1, 12), range(1, 8)):
        most = max(
            len({token // block_size for token in range(start, start + window - 1 + chunk)})
            for start in range(block_size)
        )
        assert max_blocks_of_request([KVGroup(window)], 1000, block_size, chunk) == most


def test_the_longest_request_is_the_last_one_that_fits():
    groups = [KVGroup(None), KVGroup(512), KVGroup(512)]
    for num_usable in range(3, 400):
        longest = longest_request(groups, num_usable, 16, 256, 10_000)
        assert max_blocks_of_request(groups, longest, 16, 256) <= num_usable
        assert max_blocks_of_request(groups, longest + 1, 16, 256) > num_usable
    assert longest_request(groups, 100_000, 16, 256, 10_000) == 10_000
    assert longest_request([KVGroup(512)], 49, 16, 256, 1_000_000) == 1_000_000


def test_windows_make_the_same_pool_hold_longer_requests():
    """One full group and five windows of 512: Gemma 3's 3 and 15 layers, three to a group."""
    gemma = (None, 512, 512, 512, 512, 512)
    mixed = plan([worker(1_600 * 400, windows=gemma)], 32768, budget=256)
    # Five windows hold ceil(767 / 16) + 1 = 49 blocks each; the rest is for full attention.
    assert mixed.max_model_len == (399 - 5 * 49) * 16
    assert "requests are limited to 2464 tokens instead of 32768" in mixed.notice
    full = plan([worker(1_600 * 400, windows=(None,) * 6)], 32768, budget=256)
    assert full.max_model_len == 399 // 6 * 16


def test_every_group_needs_a_block():
    with pytest.raises(ConfigError, match=r"4800 bytes for 3 blocks.* has 4799") as caught:
        plan([worker(4799, windows=(None, 8))])
    assert caught.value.param == "kv_cache_memory"
    with pytest.raises(ConfigError, match="at least 3 for this model") as caught:
        plan([worker(160_000, windows=(None, 8))], num_gpu_blocks_override=2)
    assert caught.value.param == "num_gpu_blocks_override"
    assert plan([worker(160_000, windows=(None, 8))], num_gpu_blocks_override=3).max_model_len == 16


def test_the_longest_chunk_is_bounded_by_threshold_and_budget():
    assert ChunkRule.from_config(SchedulerConfig(max_num_batched_tokens=64)).longest_chunk == 64
    for threshold in (16, 640):
        config = SchedulerConfig(max_num_batched_tokens=64, long_prefill_token_threshold=threshold)
        assert ChunkRule.from_config(config).longest_chunk == min(threshold, 64)


def test_weight_memory_is_summed_by_format():
    first = lifecycle_messages.worker_ready(
        weights=(WeightFormatMemory("packed", 5), WeightFormatMemory("bf16", 7))
    )
    second = lifecycle_messages.worker_ready(weights=(WeightFormatMemory("packed", 6),))
    expected = (WeightFormatMemory("packed", 11), WeightFormatMemory("bf16", 7))
    assert weight_memory([first, second]) == expected
    assert weight_memory([lifecycle_messages.worker_ready()]) == ()
    shared = lifecycle_messages.worker_ready(weights=(WeightFormatMemory("packed", 4, True),))
    expected = (WeightFormatMemory("packed", 8, True), WeightFormatMemory("packed", 6))
    assert weight_memory([shared, second, shared]) == expected
