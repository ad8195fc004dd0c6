"""Health, version, models, request log lines, errors without internals."""

import asyncio
import json
import logging
import time

import pytest

from api_server.errors import error_body
from api_server.routes import completions
from proto.errors import RequestError
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import HealthStatus, NotReady
from proto.runtime.log_lines import JsonLines, formatter
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import MODEL, samples


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
        await front_end.app_state.client.wait_ready()
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
    assert (await samples(front_end))["tokend:ready"] == body["ready"]
    return response.status_code, body["reasons"]


async def test_readiness_follows_the_front_ends_engine(start):
    async with start(ready=False) as front_end:
        assert (await front_end.http.get("/health/live")).status_code == 200
        assert await readiness(front_end) == (503, ["the server is starting"])
        front_end.engine.announce()
        await front_end.app_state.client.wait_ready()
        assert await readiness(front_end) == (200, [])
        engine = await front_end.lose_engine()
        assert await readiness(front_end) == (503, ["no engine is connected"])
        assert (await front_end.http.get("/health")).status_code == 200, (
            "requests wait for the engine"
        )
        engine.announce()
        while not front_end.app_state.client.connected:
            await asyncio.sleep(0)
        assert await readiness(front_end) == (200, [])
        front_end.app_state.client.close()
        assert await readiness(front_end) == (503, ["the server is shutting down"])
        assert (await front_end.http.get("/health")).status_code == 503
        assert (await front_end.http.head("/health/live")).status_code == 200


async def test_readiness_reports_the_supervisors_reasons(start, monkeypatch):
    async with start() as front_end:
        now = time.monotonic()
        monkeypatch.setattr(front_end.app_state.health, "_clock", lambda: now)
        front_end.app_state.health.supervisor_status = HealthStatus(
            (NotReady("worker 0: no completed step", now - 42), NotReady("draining", now))
        )
        status, reasons = await readiness(front_end)
        assert status == 503
        assert reasons == ["worker 0: no completed step for 42 s", "draining for 0 s"]
        front_end.app_state.health.supervisor_status = HealthStatus()
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


async def test_one_line_per_request(start, scripted, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(scripted("private answer")) as front_end:
        await front_end.complete(prompt="private question", request_id="r1")
        await front_end.events("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    lines = [record.getMessage() for record in caplog.records if record.name == "tokend.requests"]
    assert len(lines) == 2
    assert "id=cmpl-r1" in lines[0]
    assert "finish=stop" in lines[0]
    assert not any("private" in line for line in lines)


SECRET = "xyzzy-plugh"
BODIES = [
    ("/v1/completions", {"prompt": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "stop": [SECRET], "user": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "mystery": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "structured_outputs": {"regex": SECRET + "("}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
    ("/v1/responses", {"input": SECRET, "instructions": SECRET}),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": SECRET}]}),
    ("/tokenize", {"prompt": SECRET}),
]


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_line_has_a_prompt_an_answer_or_a_key(start, scripted, caplog, log_format):
    """In lines of any logger, also for refused requests."""
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(formatter(log_format, "api 0"))
    config = FrontEndConfig(api_key=f"key-{SECRET}")
    async with start(scripted(f" {SECRET}"), config=config) as front_end:
        front_end.http.headers["authorization"] = f"Bearer key-{SECRET}"
        statuses = set()
        for path, body in BODIES:
            for stream in ({}, {"stream": True}):
                answer = await front_end.http.post(path, json={**body, **stream})
                statuses.add(answer.status_code)
        await front_end.http.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"})
        assert {200, 400} <= statuses
    assert caplog.text.count("finish=") >= 10
    assert SECRET not in caplog.text


async def test_json_log_line(start, scripted, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(scripted("!")) as front_end:
        await front_end.complete(request_id="r1", n=2)
    (record,) = [each for each in caplog.records if each.name == "tokend.requests"]
    line = json.loads(JsonLines("api 0").format(record))
    assert (line["process"], line["id"], line["finish"]) == ("api 0", "cmpl-r1", "stop")
    assert (line["prompts"], line["choices"]) == (1, 2)
    assert min(line["prompt_tokens"], line["completion_tokens"]) > 0
    assert 0 <= line["queue"] <= line["ttft"] <= line["total"]


async def test_request_logging_can_be_disabled(start, scripted, caplog):
    caplog.set_level(logging.INFO, logger="tokend.requests")
    async with start(scripted("!"), config=FrontEndConfig(disable_log_requests=True)) as front_end:
        await front_end.complete()
    assert not [record for record in caplog.records if record.name == "tokend.requests"]


async def test_a_bug_is_a_500_without_details(start, monkeypatch, caplog):
    def broken(*_args, **_fields):
        raise RuntimeError("/secret/path 0x7f00")

    monkeypatch.setattr(completions, "read_request", broken)
    async with start() as front_end:
        response = await front_end.complete()
        assert response.status_code == 500
        assert json.loads(response.text)["error"]["message"] == "internal error"
        assert "secret" not in response.text
        assert "secret" in caplog.text


def test_errors_contain_no_memory_addresses():
    error = RequestError(f"{object()} took {hex(id(error_body))} of 0x10 bytes")
    message = error_body(error)["error"]["message"]
    assert message == "<object object at 0x…> took 0x… of 0x10 bytes"


async def test_requests_with_the_same_id_are_independent(start):
    """Two clients use the same id, a third one a prefix of it; one of them disconnects."""
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
