"""Health, version, models, metrics, the API key, the log line."""

import asyncio
import hmac
import json
import logging
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_server import middleware
from api_server.routes import completions
from proto.config import FrontEndConfig
from proto.errors import ErrorInfo
from proto.lifecycle import Condition, NotReady
from proto.stats import KVEviction, SchedulerStats
from tests.api_server.conftest import MODEL


async def test_before_the_engine_is_ready(start):
    async with start(ready=False) as front_end:
        for response in (
            await front_end.http.get("/health"),
            await front_end.http.get("/ping"),
            await front_end.http.get("/v1/models"),
            await front_end.complete(),
            await front_end.chat(),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
            assert response.headers["retry-after"]
        assert (await front_end.http.get("/version")).status_code == 200
        assert (await front_end.http.get("/metrics")).status_code == 200
        assert (await front_end.http.head("/health")).status_code == 503
        front_end.engine.announce()
        await front_end.services.client.wait_ready()
        assert (await front_end.http.get("/health")).status_code == 200
        head = await front_end.http.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert (await front_end.http.post("/ping")).status_code == 200


async def readiness(front_end) -> tuple[int, list[str]]:
    response = await front_end.http.get("/health/ready")
    head = await front_end.http.head("/health/ready")
    assert (head.status_code, head.content) == (response.status_code, b"")
    body = response.json()
    assert body["ready"] == (not body["reasons"]) == (response.status_code == 200)
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    return response.status_code, body["reasons"]


async def test_ready_follows_this_front_ends_own_engine(start):
    async with start(ready=False) as front_end:
        assert (await front_end.http.get("/health/live")).status_code == 200
        assert await readiness(front_end) == (503, ["the server is starting"])
        front_end.engine.announce()
        await front_end.services.client.wait_ready()
        assert await readiness(front_end) == (200, [])
        engine = await front_end.lose_engine()
        assert await readiness(front_end) == (503, ["no engine is connected"])
        assert (await front_end.http.get("/health")).status_code == 200, "requests wait for it"
        engine.announce()
        while not front_end.services.client.connected:
            await asyncio.sleep(0)
        assert await readiness(front_end) == (200, [])
        front_end.services.client.close()
        assert await readiness(front_end) == (503, ["the server is shutting down"])
        assert (await front_end.http.get("/health")).status_code == 503
        assert (await front_end.http.head("/health/live")).status_code == 200


async def test_ready_says_what_the_supervisor_said(start):
    async with start() as front_end:
        now = time.monotonic()
        front_end.services.health.hear(
            Condition(
                (NotReady("worker 0: no completed step", now - 42), NotReady("draining", now))
            )
        )
        status, reasons = await readiness(front_end)
        assert status == 503
        assert reasons == ["worker 0: no completed step for 42 s", "draining for 0 s"]
        front_end.services.health.hear(Condition())
        assert await readiness(front_end) == (200, [])


async def test_models_and_version(start):
    async with start() as front_end:
        body = (await front_end.http.get("/v1/models")).json()
        (card,) = body["data"]
        assert body["object"] == "list"
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
        assert {"created", "owned_by", "root", "parent"} <= set(card)
        assert (await front_end.http.get(f"/v1/models/{MODEL}")).json() == card
        assert (await front_end.http.get("/v1/models/other")).status_code == 404
        assert set((await front_end.http.get("/version")).json()) == {"version"}


async def samples(front_end) -> dict[str, float]:
    response = await front_end.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == MODEL
                assert labels.pop("engine") == "0"
            found[sample.name + "".join(f",{value}" for value in labels.values())] = sample.value
    return found


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
            stats=SchedulerStats(1, 5, 0.5, 1, 4, 2, kv_evictions=evictions, num_deferred=2)
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


async def test_only_whole_answers_have_a_latency(start):
    async with start(accepts=True) as front_end:
        waiting = asyncio.create_task(front_end.complete())
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("internal", "broken"))
        assert (await waiting).status_code >= 400
        assert (await samples(front_end))["vllm:e2e_request_latency_seconds_count"] == 0


async def test_api_key(start, say):
    config = FrontEndConfig(api_key="sésame")
    key = "sésame".encode()
    async with start(say("!"), config=config) as front_end:
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
            assert (await front_end.http.get(path)).status_code == 200
        guarded = ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "//health", "/health/")
        for path in guarded:
            assert (await front_end.http.get(path)).status_code == 401, path
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": b"Basic " + key},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
        ):
            response = await front_end.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "AuthenticationError"
        for headers in ({"authorization": b"Bearer " + key}, {"x-api-key": key}):
            response = await front_end.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert response.status_code == 200


async def test_keys_are_compared_in_constant_time(start, monkeypatch):
    compared = []

    def watched(given, key):
        compared.append((given, key))
        return compare_digest(given, key)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(middleware.hmac, "compare_digest", watched)
    async with start(config=FrontEndConfig(api_key="right")) as front_end:
        for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wr"}):
            assert (await front_end.http.get("/v1/models", headers=headers)).status_code == 401
    assert compared == [(b"wrong", b"right"), (b"wr", b"right")]


async def test_the_key_guards_every_other_route(start):
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        document = await front_end.http.get("/openapi.json", headers={"x-api-key": "k"})
        paths = document.json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/metrics"} <= set(paths)
        for path, methods in paths.items():
            for method in methods:
                response = await front_end.http.request(method, path)
                is_open = path.startswith("/health") or path in ("/ping", "/version")
                assert (response.status_code != 401) == is_open, (method, path)


async def test_one_line_per_request(start, say, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(say("private answer")) as front_end:
        await front_end.complete(prompt="private question", request_id="r1")
        await front_end.events("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "tokend.requests"]
    assert len(lines) == 2
    assert "id=cmpl-r1" in lines[0]
    assert "finish=stop" in lines[0]
    assert not any("private" in line for line in lines)


async def test_no_lines_when_they_are_off(start, say, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(say("!"), config=FrontEndConfig(disable_log_requests=True)) as front_end:
        await front_end.complete()
    assert not [record for record in caplog.records if record.name == "tokend.requests"]


async def test_a_bug_is_a_500_without_details(start, monkeypatch, caplog):
    def broken(*_args, **_fields):
        raise RuntimeError("/secret/path 0x7f00")

    monkeypatch.setattr(completions, "parse", broken)
    async with start() as front_end:
        response = await front_end.complete()
        assert response.status_code == 500
        assert json.loads(response.text)["error"]["message"] == "internal error"
        assert "secret" not in response.text
        assert "secret" in caplog.text


@pytest.mark.parametrize(("key", "status"), [(None, 405), ("secret", 401)])
async def test_browsers_of_other_origins_are_not_let_in(start, key, status):
    headers = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    async with start(config=FrontEndConfig(api_key=key)) as front_end:
        preflight = await front_end.http.options("/v1/completions", headers=headers)
        health = await front_end.http.get("/health", headers=headers)
    assert preflight.status_code == status
    assert health.status_code == 200
    for response in (preflight, health):
        assert not [name for name in response.headers if name.startswith("access-control")]
