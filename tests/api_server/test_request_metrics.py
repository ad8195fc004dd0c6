"""Request metrics: phases, sources of prompt tokens, HTTP status."""

import asyncio
import logging

import pytest

from api_server.metrics.http_metrics import HttpMetrics
from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from api_server.routes import completions
from proto.messages.engine_io import EngineCoreEvent, EngineCoreOutput, EventType, FinishReason
from proto.messages.stats import METRIC_CELLS, SchedulerStats
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import samples
from tests.fakes.events import first_events


async def test_request_phases_and_parameters(start, scripted):
    async with start(scripted(" world")) as front_end:
        await front_end.complete(n=3, max_tokens=7)
        found = await samples(front_end)
        assert found["vllm:request_params_n_sum"] == 3
        assert found["vllm:request_params_max_tokens_sum"] == 7
        longest = found["vllm:request_max_num_generation_tokens_sum"]
        assert 3 * longest == found["vllm:generation_tokens_total"]
        assert found["vllm:request_time_per_output_token_seconds_count"] == 1
        prefill, decode, both = (
            found[f"vllm:request_{phase}_time_seconds_sum"]
            for phase in ("prefill", "decode", "inference")
        )
        assert both == pytest.approx(prefill + decode)
        assert decode == pytest.approx(
            found["vllm:request_time_per_output_token_seconds_sum"] * (longest - 1)
        )


async def test_aborted_and_refused_requests_are_in_no_phase(start):
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete())
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        front_end.engine.emit(request, [], finish=FinishReason.ERROR)
        assert (await waiting).status_code >= 400
        found = await samples(front_end)
        assert found["vllm:request_prefill_time_seconds_count"] == 0
        assert found["vllm:request_params_n_count"] == 0
        assert found["vllm:time_to_first_token_seconds_count"] == 1


async def test_prompt_tokens_by_source_add_up(start, scripted):
    async with start(scripted("!")) as front_end:
        metrics = front_end.app_state.metrics
        metrics.engines[0].record_first_step(0.0, 100, 64, 48)
        metrics.engines[0].record_first_step(0.0, 10, 0, 0)
        found = await samples(front_end)
        name = "vllm:prompt_tokens_by_source_total"
        assert found[f"{name},local_compute"] == 46
        assert found[f"{name},local_cache_hit"] == 16
        assert found[f"{name},external_kv_transfer"] == 48
        assert found["vllm:prompt_tokens_cached_total"] == 64
        assert found["vllm:prompt_tokens_cached_by_source_total,device"] == 16
        assert found["vllm:prompt_tokens_cached_by_source_total,external"] == 48
        assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 46


async def test_a_prompt_counts_once_across_engines(start):
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete(max_tokens=3))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        await front_end.app_state.client.call_admin("check_integrity")
        before = await samples(front_end)
        engine = await front_end.lose_engine()
        engine.announce()
        again = await engine.requests.get()
        engine.send_outputs(
            EngineCoreOutput(
                again.request_id, 0, 1, [41, 42], FinishReason.LENGTH, events=first_events(0, 1, 2)
            )
        )
        assert (await waiting).status_code == 200
        after = await samples(front_end)
        name = "vllm:prompt_tokens_by_source_total,local_compute"
        assert before[name] == after[name] > 0
        assert after["vllm:prompt_tokens_total"] == before["vllm:prompt_tokens_total"]
        assert after["vllm:generation_tokens_total"] == 3
        counters = [each for each in before if each.endswith(("_total", "_count", "_sum"))]
        assert not [each for each in counters if after[each] < before[each]]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ERROR])
async def test_preemptions_are_counted_and_logged(start, caplog, finish):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    preempted = EngineCoreEvent(EventType.PREEMPTED, 5.0)
    again = EngineCoreEvent(EventType.SCHEDULED, 7.5)
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete(n=2))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH, events=(preempted, again))
        front_end.engine.emit(request, [], choice=1, finish=finish)
        await waiting
        found = await samples(front_end)
    assert found["vllm:request_num_preemptions_count"] == 2
    assert found["vllm:request_num_preemptions_sum"] == 1
    assert found["tokend:preempted_seconds_sum"] == 2.5
    assert "preemptions=1 preempted=2.500s" in caplog.text


def test_discarded_tokens():
    metrics = Metrics("toy", MetricSheet.of_one())

    def discarded(cause: str) -> float | None:
        return metrics._registry.get_sample_value("tokend:discarded_tokens_total", {"cause": cause})

    metrics.record_scheduler_stats(SchedulerStats(0, 0, 0.0, num_discarded_tokens=3), 1, 1.0)
    assert discarded("late") == 3
    metrics.engines[0].count_discarded_tokens("after_stop", 2)
    metrics.engines[0].count_discarded_tokens("repeated", 1)
    assert (discarded("after_stop"), discarded("repeated")) == (2, 1)


async def test_http_requests_by_route_and_status(start, scripted):
    config = FrontEndConfig(api_key="k", metrics_open=True)
    async with start(scripted("!"), config=config) as front_end:
        front_end.http.headers["authorization"] = "Bearer k"
        await front_end.complete()
        await front_end.events("/v1/completions", prompt="x")
        await front_end.complete(max_tokens=-1)
        await front_end.complete()
        await front_end.http.get("/v1/models/other")
        await front_end.http.get("/nowhere")
        await front_end.http.post("/v1/completions", headers={"authorization": "Bearer x"})
        await front_end.http.get("/health")
        found = await samples(front_end)
        name = "http_requests_total"
        assert found[f"{name},/v1/completions,POST,2xx"] == 3
        assert found[f"{name},/v1/completions,POST,4xx"] == 2
        (of_models,) = [each for each in found if "/v1/models/{" in each and "4xx" in each]
        assert found[of_models] == 1
        assert found[f"{name},none,none,4xx"] == 1
        duration = "http_request_duration_seconds_count,/v1/completions,POST"
        assert found[duration] == 5
        assert not any("/health" in each or "/metrics" in each for each in found)


async def test_a_bug_is_a_500_of_its_route(start, monkeypatch):
    def broken(*_args: object, **_fields: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(completions, "read_request", broken)
    async with start() as front_end:
        await front_end.complete()
        found = await samples(front_end)
        assert found["http_requests_total,/v1/completions,POST,5xx"] == 1


def test_front_ends_share_the_same_metric_cells():
    memory = bytearray(2 * 8 * METRIC_CELLS)
    both = [HttpMetrics(MetricSheet(memory, row), completions.router.routes) for row in (0, 1)]
    for each in both:
        each.record_response({"path": "/v1/completions", "method": "POST"}, 200, 0.2)
    requests, durations = both[0].collect()
    assert [each.value for each in requests.samples] == [2]
    assert [each.value for each in durations.samples if each.name.endswith("_count")] == [2]


def test_accepted_drafts_by_position():
    metrics = Metrics("toy", MetricSheet.of_one())
    for per_pos in ([2, 1], [1] * 20):
        metrics.record_scheduler_stats(SchedulerStats(0, 0, 0.0, accepted_per_pos=per_pos), 1, 1.0)

    def accepted(position: int) -> float | None:
        labels = {"model_name": "toy", "engine": "0", "position": str(position)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return metrics._registry.get_sample_value(name, labels)

    assert [accepted(position) for position in (0, 1, 2, 15, 16)] == [3, 2, 1, 1, None]
