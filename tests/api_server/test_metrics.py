"""What /metrics shows."""

import asyncio

from proto.errors import ErrorInfo
from proto.lifecycle import WeightMemory
from proto.stats import KVEviction, SchedulerStats
from tests.api_server.conftest import samples
from tests.fakes import boots


async def test_metrics(start, say, tokenizer):
    async with start(say(" world")) as front_end:
        before = await samples(front_end)
        assert before["vllm:request_success_total,stop"] == 0
        assert before["vllm:corrupted_requests_total"] == 0
        assert "process_resident_memory_bytes" in before
        await front_end.complete(n=2)
        await front_end.complete(max_tokens=1)
        front_end.engine.send_outputs(
            stats=SchedulerStats(3, 4, 0.25, 5, 60, 30, num_scheduled_tokens=17, num_corrupted=2)
        )
        evictions = [KVEviction(12.0, 7.0, [2.0, 3.0]), KVEviction(0.25, 0.25)]
        front_end.engine.send_outputs(
            stats=SchedulerStats(
                1,
                5,
                0.5,
                1,
                4,
                2,
                kv_evictions=evictions,
                num_deferred=2,
                external_prefix_cache_queries=9,
                external_prefix_cache_hits=7,
            )
        )
        await front_end.services.client.admin("check_integrity")
        found = await samples(front_end)
        output = len(tokenizer.encode(" world").ids) + 1
        prompt = len(tokenizer.encode("hello").ids)
        assert found["vllm:num_requests_running"] == 1
        assert found["vllm:num_requests_waiting"] == 5
        assert found["vllm:num_requests_waiting_by_reason,capacity"] == 3
        assert found["vllm:num_requests_waiting_by_reason,deferred"] == 2
        assert found["vllm:kv_cache_usage_perc"] == 0.5
        assert found["vllm:num_preemptions_total"] == 6
        assert found["vllm:corrupted_requests_total"] == 2
        assert found["vllm:prefix_cache_queries_total"] == 64
        assert found["vllm:prefix_cache_hits_total"] == 32
        assert found["vllm:external_prefix_cache_queries_total"] == 9
        assert found["vllm:external_prefix_cache_hits_total"] == 7
        assert found["vllm:prompt_tokens_total"] == 2 * prompt
        assert found["vllm:generation_tokens_total"] == 2 * output + 1
        assert found["vllm:request_success_total,stop"] == 2
        assert found["vllm:request_success_total,length"] == 1
        assert found["vllm:time_to_first_token_seconds_count"] == 3
        assert found["vllm:inter_token_latency_seconds_count"] == 2 * (output - 1)
        assert found["vllm:e2e_request_latency_seconds_count"] == 2
        assert found["vllm:request_queue_time_seconds_count"] == 2
        assert found["vllm:request_prompt_tokens_sum"] == 2 * prompt
        assert found["vllm:request_generation_tokens_sum"] == 2 * output + 1
        assert found["vllm:iteration_tokens_total_count"] == 1
        assert found["vllm:iteration_tokens_total_bucket,16.0"] == 0
        assert found["vllm:iteration_tokens_total_bucket,32.0"] == 1
        assert found["vllm:iteration_tokens_total_bucket,+Inf"] == 1
        assert found["vllm:kv_block_lifetime_seconds_count"] == 2
        assert found["vllm:kv_block_lifetime_seconds_sum"] == 12.25
        assert found["vllm:kv_block_lifetime_seconds_bucket,0.5"] == 1
        assert found["vllm:kv_block_idle_before_evict_seconds_sum"] == 7.25
        assert found["vllm:kv_block_reuse_gap_seconds_count"] == 2
        assert found["vllm:kv_block_reuse_gap_seconds_sum"] == 5


async def test_pins_and_jobs(start):
    async with start() as front_end:
        first = SchedulerStats(
            0, 0, 0.5, num_pinned_blocks=7, num_pinned_jobs=2, num_pins_taken=4, num_pins_hit=1
        )
        second = SchedulerStats(
            *(0, 0, 0.5),
            num_pinned_blocks=3,
            num_pinned_jobs=1,
            num_pins_taken=1,
            num_pins_expired=5,
            num_pins_given_up=6,
            job_seconds=[12.0, 30.0],
            tool_seconds=[0.2],
        )
        for stats in (first, second):
            front_end.engine.send_outputs(stats=stats)
        await front_end.services.client.admin("check_integrity")
        found = await samples(front_end)
        assert found["tokend:pinned_blocks"] == 3
        assert found["tokend:pinned_jobs"] == 1
        assert found["tokend:pins_taken_total"] == 5
        assert found["tokend:pins_hit_total"] == 1
        assert found["tokend:pins_expired_total"] == 5
        assert found["tokend:pins_given_up_total"] == 6
        assert found["tokend:job_completion_seconds_count"] == 2
        assert found["tokend:job_completion_seconds_sum"] == 42
        assert found["tokend:job_completion_seconds_bucket,20.0"] == 1
        assert found["tokend:tool_duration_seconds_sum"] == 0.2
        assert found["tokend:tool_duration_seconds_bucket,0.25"] == 1
        await front_end.lose_engine()
        found = await samples(front_end)
        assert found["tokend:pinned_blocks"] == found["tokend:pinned_jobs"] == 0
        assert found["tokend:pins_taken_total"] == 5


async def test_only_whole_answers_have_a_latency(start):
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete())
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("internal", "broken"))
        assert (await waiting).status_code >= 400
        assert (await samples(front_end))["vllm:e2e_request_latency_seconds_count"] == 0


async def test_memory_of_the_weights_by_form(start):
    async with start(ready=False) as front_end:
        weights = (WeightMemory("packed", 90), WeightMemory("bf16", 250))
        front_end.engine._send(boots.engine_ready(weights=weights))
        await front_end.services.client.wait_ready()
        found = await samples(front_end)
        assert found["tokend:weights_bytes,packed"] == 90
        assert found["tokend:weights_bytes,bf16"] == 250
