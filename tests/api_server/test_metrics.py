"""The content of /metrics."""

import asyncio
import re

import pytest

from proto.errors import ErrorInfo
from proto.messages.lifecycle import WeightFormatMemory
from proto.messages.stats import KVEviction, SchedulerStats
from tests.api_server.conftest import samples
from tests.fakes import lifecycle_messages


async def test_metrics(start, scripted, tokenizer):
    async with start(scripted(" world")) as front_end:
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
        await front_end.app_state.client.call_admin("check_integrity")
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


async def test_pins_and_agent_sessions(start):
    async with start() as front_end:
        first = SchedulerStats(
            0,
            0,
            0.5,
            num_pinned_blocks=7,
            num_pinned_agent_sessions=2,
            num_pins_taken=4,
            num_pins_hit=1,
        )
        second = SchedulerStats(
            0,
            0,
            0.5,
            num_pinned_blocks=3,
            num_pinned_agent_sessions=1,
            num_pins_taken=1,
            num_pins_expired=5,
            num_pins_given_up=6,
            agent_session_seconds=[12.0, 30.0],
            tool_seconds=[0.2],
        )
        for stats in (first, second):
            front_end.engine.send_outputs(stats=stats)
        await front_end.app_state.client.call_admin("check_integrity")
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


async def test_only_complete_answers_have_a_latency(start):
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete())
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("internal", "broken"))
        assert (await waiting).status_code >= 400
        assert (await samples(front_end))["vllm:e2e_request_latency_seconds_count"] == 0


async def test_weight_memory_by_format(start):
    async with start(ready=False) as front_end:
        weights = (WeightFormatMemory("packed", 90), WeightFormatMemory("bf16", 250))
        front_end.engine._send(lifecycle_messages.engine_ready(weights=weights))
        await front_end.app_state.client.wait_ready()
        found = await samples(front_end)
        assert found["tokend:weights_bytes,packed"] == 90
        assert found["tokend:weights_bytes,bf16"] == 250


BEGUN = (
    "time_to_first_token_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_prefill_kv_computed_tokens",
)
ENDED = (
    *("e2e_request_latency_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens"),
    *("request_time_per_output_token_seconds", "request_generation_tokens"),
)


async def test_request_phases(start, scripted, tokenizer):
    async with start(scripted(" world")) as front_end:
        prompt = len(tokenizer.encode("hello").ids)
        output = len(tokenizer.encode(" world").ids) + 1
        await front_end.complete(max_tokens=40)
        found = await samples(front_end)
        for name in (*BEGUN, *ENDED):
            assert found[f"vllm:{name}_count"] == 1, name
        parts = ("request_prefill_time_seconds", "request_decode_time_seconds")
        assert found["vllm:request_inference_time_seconds_sum"] == pytest.approx(
            sum(found[f"vllm:{name}_sum"] for name in parts)
        )
        assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(
            found["vllm:request_decode_time_seconds_sum"] / (output - 1)
        )
        assert found["vllm:request_params_max_tokens_sum"] == 40
        assert found["vllm:request_max_num_generation_tokens_sum"] == output
        assert found["vllm:request_params_n_bucket,1.0"] == 1
        cached = found["vllm:prompt_tokens_cached_total"]
        sources = {
            name.rpartition(",")[2]: value
            for name, value in found.items()
            if name.startswith("vllm:prompt_tokens_by_source_total")
        }
        assert sources.keys() == {"local_compute", "local_cache_hit", "external_kv_transfer"}
        assert sum(sources.values()) == prompt
        assert sources["local_cache_hit"] + sources["external_kv_transfer"] == cached
        assert found["vllm:request_prefill_kv_computed_tokens_sum"] == prompt - cached
        info = next(name for name in found if name.startswith("vllm:cache_config_info"))
        assert found[info] == 1


async def test_http_requests_by_route(start, scripted):
    async with start(scripted(" world")) as front_end:
        await front_end.complete()
        await front_end.complete(stream=True)
        await front_end.http.post("/v1/completions", json={"prompt": 3.5})
        await front_end.http.get("/v1/models")
        await front_end.http.get("/nowhere/secret")
        for path in ("/health", "/version", "/load", "/metrics"):
            await front_end.http.get(path)
        text = (await front_end.http.get("/metrics")).text
        shown = set(re.findall(r"^http_requests_total\{(.*)\} (.*)$", text, re.MULTILINE))
        assert shown == {
            ('handler="/v1/completions",method="POST",status="2xx"', "2.0"),
            ('handler="/v1/completions",method="POST",status="4xx"', "1.0"),
            ('handler="/v1/models",method="GET",status="2xx"', "1.0"),
            ('handler="none",method="none",status="4xx"', "1.0"),
        }
        durations = re.findall(r"^http_request_duration_seconds_count\{(.*)\} (.*)$", text, re.M)
        assert ('handler="/v1/completions",method="POST"', "3.0") in durations
        assert "secret" not in text
