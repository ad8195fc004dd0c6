"""Health, version, models, metrics, the API key, the log line."""

import asyncio
import hmac
import importlib
import json
import logging
import pkgutil
import time

import httpx
import pytest
from fastapi import APIRouter
from prometheus_client.parser import text_string_to_metric_families

from api_server import middleware, routes
from api_server.app import create_app
from api_server.errors import error_body
from api_server.routes import completions
from proto.config import FrontEndConfig
from proto.engine_io import FinishReason
from proto.errors import ErrorInfo, RequestError
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


OPEN = {"/health", "/health/live", "/health/ready", "/ping", "/version"}
"""What may be open; a path that is not here must not be opened by the way."""
TRICKS = (
    *("//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/health/../v1/models"),
    *("/v1/%6dodels", "/%76%31/models", "/v1%2fmodels", "/health%2f..%2fmetrics", "/metrics%00"),
    *("/metrics;/health", "/metrics?/health", "/health;/../metrics", "/HEALTH", "/health%20"),
    *("/health/", "//health", "/version/../metrics", "\\health", "/openapi.json", "/docs"),
    *("http://x/metrics", "http://health/v1/models", "/nowhere", "*"),
)
"""Ways to name a path that is guarded, or one that is not there."""


def all_paths(app) -> set[str]:
    """Of the application itself and of every module with routes."""
    modules = [
        importlib.import_module(f"{routes.__name__}.{each.name}")
        for each in pkgutil.iter_modules(routes.__path__)
    ]
    routers = [each.__dict__.get("router", APIRouter()) for each in modules]
    found = [*app.routes, *(route for router in routers for route in router.routes)]
    return {route.path for route in found if hasattr(route, "path")}


async def test_the_key_guards_every_other_route(start):
    """Every route that the application has, whether or not it is documented."""
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        paths = all_paths(create_app(front_end.services))
        assert {"/v1/completions", "/v1/chat/completions", "/metrics"} <= paths
        assert OPEN & paths >= middleware.OPEN_PATHS
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE")
        for path in sorted(paths):
            for method in methods:
                response = await front_end.http.request(method, path.replace("{name:path}", "x"))
                is_open = path in middleware.OPEN_PATHS
                assert (response.status_code != 401) == is_open, (method, path)


async def raw_status(front_end, target: str, *lines: str) -> int:
    """The status for a request target that no client library would send as it is."""
    url = httpx.URL(front_end.url)
    reader, writer = await asyncio.open_connection("127.0.0.1", url.port)
    head = [f"GET {target} HTTP/1.1", *(lines or ["Host: x"]), "Connection: close", "", ""]
    writer.write("\r\n".join(head).encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


async def test_no_way_of_writing_a_path_or_a_host_gets_past_the_key(start):
    async with start(config=FrontEndConfig(api_key="k")) as front_end:
        for target in TRICKS:
            assert await raw_status(front_end, target) in (400, 401), target
        for host in ("", "localhost", "127.0.0.1", "/health", "health", "x:y", "x@health"):
            assert await raw_status(front_end, "/metrics", f"Host: {host}") in (400, 401), host
        for name in ("X-Forwarded-Prefix", "X-Original-URL", "X-Rewrite-URL", "X-HTTP-Method"):
            lines = ("Host: x", f"{name}: /health")
            assert await raw_status(front_end, "/metrics", *lines) == 401, name
        assert await raw_status(front_end, "/health") == 200
        assert await raw_status(front_end, "/metrics", "Host: x", "X-Api-Key: k") == 200


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


def test_no_error_shows_where_anything_lies_in_memory():
    error = RequestError(f"{object()} took {hex(id(error_body))} of 0x10 bytes")
    message = error_body(error)["error"]["message"]
    assert message == "<object object at 0x…> took 0x… of 0x10 bytes"


async def test_requests_of_one_name_have_nothing_to_do_with_each_other(start):
    """Two clients call theirs alike, a third one by a prefix of it; one of them leaves."""
    async with start(accepts=True) as front_end:
        names = ("mine", "mine", "min")
        asking = [
            asyncio.create_task(front_end.complete(request_id=name, max_tokens=2)) for name in names
        ]
        requests = [await front_end.engine.requests.get() for _ in names]
        assert len({each.request_id for each in requests}) == 3
        asking[0].cancel()
        abort = await front_end.engine.aborts.get()
        gone = [each for each in requests if each.request_id == abort.request_id]
        assert len(gone) == 1
        for number, request in enumerate(requests):
            if request is not gone[0]:
                tokens = [40 + number, 50 + number]
                front_end.engine.emit(request, tokens, finish=FinishReason.LENGTH)
        answers = [(await each).json() for each in asking[1:]]
        assert {each["id"] for each in answers} == {"cmpl-mine", "cmpl-min"}
        assert len({each["choices"][0]["text"] for each in answers}) == 2
        assert front_end.engine.aborts.empty()


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
