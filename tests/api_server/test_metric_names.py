"""vLLM's metrics: names, types, labels and buckets; and their documentation."""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from api_server.routes import completions
from proto.messages.stats import KVCopy, KVMediumStats, SchedulerStats
from tests.fakes import lifecycle_messages

MODEL = ("model_name", "engine")
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
STEP = tuple(float(each) for each in (1, *(1 << power for power in range(3, 15))))
BLOCK = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)

GAUGES = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_waiting_by_reason": ("reason",),
    "kv_cache_usage_perc": (),
    "kv_offload_cpu_cache_usage_perc": (),
    "cache_config_info": ("block_size", "num_gpu_blocks"),
    "lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
}
COUNTERS = {
    "prefix_cache_queries": (),
    "prefix_cache_hits": (),
    "external_prefix_cache_queries": (),
    "external_prefix_cache_hits": (),
    "prompt_tokens": (),
    "generation_tokens": (),
    "prompt_tokens_by_source": ("source",),
    "prompt_tokens_cached": (),
    "prompt_tokens_cached_by_source": ("source",),
    "num_preemptions": (),
    "request_success": ("finished_reason",),
    "admission_rejections": ("reason",),
    "corrupted_requests": (),
    "estimated_flops_per_gpu": (),
    "estimated_read_bytes_per_gpu": (),
    "estimated_write_bytes_per_gpu": (),
    "spec_decode_num_drafts": (),
    "spec_decode_num_draft_tokens": (),
    "spec_decode_num_accepted_tokens": (),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
    "tool_call_parser_invocations": ("outcome",),
    "kv_offload_load_bytes": ("medium",),
    "kv_offload_load_time": ("medium",),
    "kv_offload_store_bytes": ("medium",),
    "kv_offload_store_time": ("medium",),
    "kv_offload_stores_skipped": ("medium",),
    "kv_offload_allocation_failure": ("medium",),
}
COPY_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_num_preemptions": (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
    "iteration_tokens_total": STEP,
    "kv_block_lifetime_seconds": BLOCK,
    "kv_block_idle_before_evict_seconds": BLOCK,
    "kv_block_reuse_gap_seconds": BLOCK,
    "kv_offload_load_size": COPY_BYTES,
    "kv_offload_store_size": COPY_BYTES,
    "kv_offload_lookup_sync_delay_seconds": (
        *(1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
    ),
    "kv_offload_lookup_async_delay_seconds": (
        *(1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0),
    ),
}
ABSENT = {
    *("num_requests_kv_fetch_by_stage", "engine_sleep_state"),
    *("mm_cache_queries", "mm_cache_hits", "kv_offload_tiering_"),
}
"""Metrics of vLLM that do not apply to tokend; docs/metrics.md says why."""
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    """Return all metrics, with every optional one present."""
    metrics = Metrics("toy", MetricSheet.of_one())
    http = metrics.register_http_metrics(completions.router.routes)
    metrics.max_loras = 8
    metrics.set_engine_info(0, lifecycle_messages.engine_ready())
    metrics.record_scheduler_stats(
        SchedulerStats(0, 0, 0.0, kv_media=[KVMediumStats("CPU", [KVCopy(7, 0.5)])]), 1, 1.0
    )
    http.record_response({"path": "/v1/completions", "method": "POST"}, 200, 0.2)
    return {each.name: each for each in text_string_to_metric_families(metrics.render().decode())}


def labels(family: Metric, suffix: str = "") -> set[str]:
    return {
        name
        for sample in family.samples
        if sample.name == family.name + suffix
        for name in sample.labels
    }


@pytest.mark.parametrize("name", GAUGES)
def test_gauges(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == "gauge"
    assert labels(family) == {*MODEL, *GAUGES[name]}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == "counter"
    assert labels(family, "_total") == {*MODEL, *COUNTERS[name]}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == "histogram"
    medium = {"medium"} if name.startswith("kv_offload_") else set()
    assert labels(family, "_count") == {*MODEL, *medium}
    bounds = [each.labels["le"] for each in family.samples if each.name.endswith("_bucket")]
    assert [float(each) for each in bounds[:-1]] == list(HISTOGRAMS[name])
    assert bounds[-1] == "+Inf"


def test_http_metrics(families: dict[str, Metric]) -> None:
    assert labels(families["http_requests"], "_total") == {"handler", "method", "status"}
    durations = families["http_request_duration_seconds"]
    assert labels(durations, "_count") == {"handler", "method"}


def test_the_documentation_lists_exactly_these_metrics(families: dict[str, Metric]) -> None:
    expected = {f"vllm:{name}" for name in (*GAUGES, *COUNTERS, *HISTOGRAMS)}
    assert {each for each in families if each.startswith("vllm:")} == expected
    shown = {each for each in families if not each.startswith(("process_", "python_"))}
    present, absent = DOCUMENT.split("## What vLLM has and tokend does not")
    assert set(re.findall(r"^\| `([\w:]+)` \|", present, re.MULTILINE)) == shown
    missing = {
        each
        for row in re.findall(r"^\| (`.*?) \|", absent, re.MULTILINE)
        for each in re.findall(r"`vllm:(\w+)`", row)
    }
    assert missing == ABSENT
