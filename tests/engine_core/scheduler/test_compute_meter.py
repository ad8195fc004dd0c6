"""FLOPs and bytes of steps, counted by hand."""

import pytest

from engine_core.scheduler.compute_meter import ComputeMeter, num_attention_pairs
from proto.messages.lifecycle import ComputeShape, KVCacheGeometry, KVGroup, WeightFormatMemory
from tests.fakes import lifecycle_messages
from tests.fakes.engine_harness import EngineHarness

LINEAR, HEAD, PAIR, WINDOW_PAIR = 1000, 300, 40, 20
WEIGHT_BYTES, DRAFT_BYTES, KV_BYTES = 5000, 700, 64


def meter(**peaks):
    geometry = KVCacheGeometry(1, 1, 8, "float32", KV_BYTES, (KVGroup(), KVGroup(4)))
    shape = ComputeShape(LINEAR, HEAD, ((None, PAIR), (4, WINDOW_PAIR)))
    weights = (WeightFormatMemory("f32", WEIGHT_BYTES), WeightFormatMemory("packed", DRAFT_BYTES))
    worker = lifecycle_messages.worker_ready(
        geometry=geometry, compute=shape, weights=weights, draft_weight_bytes=DRAFT_BYTES
    )
    return ComputeMeter(worker, peaks.get("tflops", 0.0), peaks.get("gbps", 0.0))


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("num_computed", "num_new"), [(0, 1), (0, 7), (5, 1), (5, 9), (40, 3)])
def test_pairs_are_those_of_the_mask(num_computed, num_new, window):
    queries = range(num_computed, num_computed + num_new)
    pairs = sum(
        key <= query and (window is None or key > query - window)
        for query in queries
        for key in range(num_computed + num_new)
    )
    assert num_attention_pairs(num_computed, num_new, window) == pairs


def test_a_prompt_and_a_decode_step():
    engine = EngineHarness(compute_meter=meter())
    engine.add_one(list(range(10, 16)), max_tokens=2)
    engine.step()
    stats = engine.scheduler.pop_stats()
    pairs, window_pairs = 1 + 2 + 3 + 4 + 5 + 6, 1 + 2 + 3 + 4 + 4 + 4
    flops = 6 * LINEAR + HEAD + pairs * PAIR + window_pairs * WINDOW_PAIR
    assert stats.estimated_flops == flops
    assert stats.estimated_read_bytes == WEIGHT_BYTES + (6 + 6) * KV_BYTES
    assert stats.estimated_write_bytes == 6 * 2 * KV_BYTES
    assert stats.flops_shares == stats.bandwidth_shares == []
    engine.step()
    stats = engine.scheduler.pop_stats()
    assert stats.estimated_flops == LINEAR + HEAD + 7 * PAIR + 4 * WINDOW_PAIR
    assert stats.estimated_read_bytes == WEIGHT_BYTES + (7 + 4) * KV_BYTES
    assert engine.scheduler.pop_stats().estimated_flops == 0


def test_the_share_of_the_peak_rates():
    engine = EngineHarness(compute_meter=meter(tflops=1e-6, gbps=1e-3))
    engine.step_seconds = lambda output: 0.5
    engine.add_one(list(range(10, 16)), max_tokens=1)
    engine.step()
    stats = engine.scheduler.pop_stats()
    num_bytes = stats.estimated_read_bytes + stats.estimated_write_bytes
    assert stats.flops_shares == [pytest.approx(stats.estimated_flops / 0.5 / 1e6)]
    assert stats.bandwidth_shares == [pytest.approx(num_bytes / 0.5 / 1e6)]


def test_without_a_meter_nothing_is_counted():
    engine = EngineHarness()
    engine.add_one(list(range(10, 16)), max_tokens=1)
    engine.step()
    assert engine.scheduler.pop_stats().estimated_flops == 0
