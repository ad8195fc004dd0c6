"""Queue limits and deadlines: status, events and metrics."""

import asyncio
import json
import logging

import pytest

from api_server.engine import engine_client
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from proto.messages.stats import SchedulerStats
from proto.runtime import sockets
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import samples
from tests.fakes import lifecycle_messages

FULL = ErrorInfo(
    "queue_full",
    "the queue is full: 9 requests wait, this would add 1, and --max-num-queued-reqs is 9",
    "max_num_queued_reqs",
    retry_after_seconds=17,
)
LATE = ErrorInfo("time_limit", "the request did not finish within 1 s", "timeout_ms")
WAITED = ErrorInfo(
    "queue_timeout", "the request was still queued after 1 s, its limit", "queue_timeout_ms"
)


async def begin(front_end, **fields):
    """Start a completion; return its task and the engine's request."""
    task = asyncio.create_task(front_end.complete(**fields))
    return task, await front_end.engine.requests.get()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_503_with_retry_after(start, stream):
    async with start() as front_end:
        answer, request = await begin(front_end, stream=stream)
        front_end.engine.refuse(request, FULL)
        response = await answer
        assert response.status_code == 503
        assert response.headers["retry-after"] == "17"
        error = response.json()["error"]
        assert error == {
            "message": FULL.message,
            "type": "overloaded_error",
            "param": "max_num_queued_reqs",
            "code": 503,
        }
        found = await samples(front_end)
        assert found["vllm:admission_rejections_total,max_num_queued_reqs"] == 1
        assert found["vllm:admission_rejections_total,max_num_queued_tokens"] == 0
        assert found["tokend:requests_cut_short_total,timeout"] == 0
        assert sum(found[f"vllm:request_success_total,{each}"] for each in ("abort", "error")) == 0


async def test_a_prompt_refused_by_the_queue_aborts_the_others(start):
    async with start() as front_end:
        answer = asyncio.create_task(front_end.complete(prompt=["one", "two"]))
        first = await front_end.engine.requests.get()
        second = await front_end.engine.requests.get()
        front_end.engine.accept(first)
        front_end.engine.refuse(second, FULL)
        assert (await answer).status_code == 503
        assert (await front_end.engine.aborts.get()).request_id == first.request_id


async def test_more_prompts_than_the_queue_limit_are_refused_without_retry(start, scripted):
    async with start(scripted("!"), ready=False) as front_end:
        vocab_size = front_end.engine.vocab_size
        front_end.engine._send(
            lifecycle_messages.engine_ready(
                vocab_size=vocab_size, max_num_queued_reqs=4, max_num_queued_tokens=30
            )
        )
        await front_end.app_state.client.wait_ready()
        for fields, word in (
            ({"prompt": ["one"] * 5}, "--max-num-queued-reqs lets 4 wait"),
            ({"prompt": ["one"] * 3, "n": 2}, "6 choices"),
            ({"prompt": [[5] * 16] * 2}, "--max-num-queued-tokens lets 30 wait"),
        ):
            response = await front_end.complete(**fields)
            assert response.status_code == 400
            assert word in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "prompt"
        assert (await front_end.complete(prompt=["one"] * 4)).status_code == 200
        assert (await front_end.complete(prompt=[5] * 200, n=9)).status_code == 200
        found = await samples(front_end)
        assert found["tokend:max_num_queued_reqs"] == 4
        assert found["tokend:max_num_queued_tokens"] == 30


async def test_gauges_of_the_queue(start):
    async with start() as front_end:
        stats = SchedulerStats(1, 5, 0.5, num_queued_reqs=3, num_queued_tokens=70)
        front_end.engine.send_outputs(stats=stats)
        while (found := await samples(front_end))["vllm:num_requests_waiting"] != 5:
            pass
        assert found["tokend:queued_reqs"] == 3
        assert found["tokend:queued_tokens"] == 70


async def test_timeouts_become_deadlines(start):
    config = FrontEndConfig(queue_timeout=60.0)
    async with start(config=config, accepts=True) as front_end:
        for fields, headers, total, queue in (
            ({}, {}, None, 60.0),
            ({"timeout_ms": 2500, "queue_timeout_ms": 1000}, {}, 2.5, 1.0),
            ({"queue_timeout_ms": 90_000}, {}, None, 60.0),
            ({}, {"X-Request-Timeout-Ms": "1500"}, 1.5, 60.0),
            ({"timeout_ms": 99}, {"X-Request-Timeout-Ms": "1500"}, 0.099, 60.0),
        ):
            body = {"prompt": "hello", **fields}
            post = front_end.http.post("/v1/completions", json=body, headers=headers)
            answer = asyncio.create_task(post)
            request = await front_end.engine.requests.get()
            expected = request.arrival_time + (float("inf") if total is None else total)
            assert request.deadline == pytest.approx(expected)
            assert request.queue_deadline == pytest.approx(request.arrival_time + queue)
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
            assert (await answer).status_code == 200


@pytest.mark.parametrize("name", ["timeout_ms", "queue_timeout_ms"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 1 << 31, 10**400])
async def test_invalid_timeouts(start, name, value):
    async with start() as front_end:
        response = await front_end.complete(**{name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name


async def test_invalid_timeout_headers(start):
    async with start() as front_end:
        for value in ("soon", "1.5", "0", "9" * 30):
            headers = {"X-Request-Timeout-Ms": value}
            response = await front_end.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "timeout_ms"


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_a_deadline_without_streaming_is_a_504(start, has_tokens):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end)
        if has_tokens:
            front_end.engine.emit(request, [40])
        front_end.engine.refuse(request, LATE)
        response = await answer
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        assert "retry-after" not in response.headers
        assert response.headers["x-should-retry"] == "false"
        found = await samples(front_end)
        assert found["tokend:requests_cut_short_total,timeout"] == 1
        assert found["vllm:request_success_total,error"] == 1


async def test_a_deadline_in_a_stream_is_an_error_event(start):
    async with start(accepts=True) as front_end:
        body = {"prompt": "hello", "stream": True}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [40])
            front_end.engine.refuse(request, LATE)
            events = (await response.aread()).decode().strip().split("\n\n")
        assert response.status_code == 200
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 504
        assert not any('"finish_reason": "' in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queue_timeout_is_a_status_also_for_streams(start, stream):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, stream=stream, queue_timeout_ms=1000)
        for _ in range(3):
            assert (await front_end.http.get("/version")).status_code == 200
        assert not answer.done(), "a status was sent before the first token"
        front_end.engine.refuse(request, WAITED)
        response = await answer
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "overloaded_error"
        found = await samples(front_end)
        assert found["tokend:requests_cut_short_total,queue_timeout"] == 1


async def test_a_stream_with_a_queue_timeout_begins_with_its_first_token(start):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, stream=True, queue_timeout_ms=1000)
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        response = await answer
        assert response.status_code == 200
        assert response.text.endswith("data: [DONE]\n\n")


async def test_deadlines_continue_without_an_engine(start, monkeypatch):
    monkeypatch.setattr(engine_client, "DEADLINE_CHECK_SECONDS", 0.001)
    async with start(accepts=True) as front_end:
        short, _ = await begin(front_end, timeout_ms=1)
        long, _ = await begin(front_end, timeout_ms=1_000_000)
        engine = await front_end.lose_engine()
        assert (await short).status_code == 504
        engine.announce()
        again = await engine.requests.get()
        assert engine.requests.empty()
        engine.emit(again, [40], finish=FinishReason.LENGTH)
        assert (await long).status_code == 200


async def test_queue_timeouts_continue_without_an_engine(start, monkeypatch):
    """But not for requests with a token, which have left the queue."""
    monkeypatch.setattr(engine_client, "DEADLINE_CHECK_SECONDS", 0.001)
    async with start(accepts=True) as front_end:
        waiting, _ = await begin(front_end, queue_timeout_ms=1)
        begun, request = await begin(front_end, queue_timeout_ms=1)
        front_end.engine.emit(request, [40])
        stream = front_end.app_state.client._open[request.request_id].stream
        while not stream.output_token_ids[0]:
            await asyncio.sleep(0)
        engine = await front_end.lose_engine()
        async with asyncio.timeout(20):
            refused = await waiting
        assert refused.status_code == 503
        assert refused.json()["error"]["param"] == "queue_timeout_ms"
        assert (await samples(front_end))["tokend:requests_cut_short_total,queue_timeout"] == 1
        engine.announce()
        again = await engine.requests.get()
        assert engine.requests.empty()
        engine.emit(again, [41], finish=FinishReason.LENGTH)
        assert (await begun).status_code == 200


def stall(monkeypatch, client):
    """Make the engine stop reading; return a function that resumes it."""
    # One request is too much, but not the message about a new engine, which may be delayed.
    monkeypatch.setattr(sockets, "MAX_PENDING_BYTES", 40)
    link = client._current[0]._link
    monkeypatch.setattr(link, "_try_send", lambda frame: False)
    return lambda: monkeypatch.delattr(link, "_try_send")


async def test_requests_not_sent_to_a_stalled_engine_are_never_aborted_there(
    start, monkeypatch, caplog
):
    async with start(accepts=True) as front_end:
        resume = stall(monkeypatch, front_end.app_state.client)
        first = asyncio.create_task(front_end.complete(prompt="hello"))
        async with asyncio.timeout(20):
            while not front_end.app_state.client.num_open:
                await asyncio.sleep(0.001)
        with caplog.at_level(logging.INFO, logger="tokend.requests"):
            refused = await front_end.complete(prompt="fox")
        assert refused.status_code == 503
        assert "keep up" in refused.json()["error"]["message"]
        assert "finish=error 503" in caplog.text
        resume()
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await first).status_code == 200
        assert front_end.engine.requests.empty()
        assert front_end.engine.aborts.empty()


async def test_waiting_requests_are_sent_as_fast_as_the_next_engine_reads(start, monkeypatch):
    """They are not refused, because their status may have been sent."""
    async with start(accepts=True) as front_end:
        answers = [(await begin(front_end, max_tokens=1))[0] for _ in range(3)]
        engine = await front_end.lose_engine()
        client = front_end.app_state.client
        resume = stall(monkeypatch, client)
        engine.announce()
        while not client.connected:
            await asyncio.sleep(0.001)
        assert sorted(entry.sent_to for entry in client._open.values()) == [0, 0, 2]
        resume()
        async with asyncio.timeout(20):
            for _ in answers:
                again = await engine.requests.get()
                engine.emit(again, [40], finish=FinishReason.LENGTH)
            for answer in answers:
                assert (await answer).status_code == 200


async def test_accepted_requests_are_marked_for_a_new_engine(start):
    async with start() as front_end:
        answers = [await begin(front_end, timeout_ms=1_000_000) for _ in range(2)]
        (_, accepted), (_, other) = answers
        front_end.engine.accept(accepted)
        while not front_end.app_state.client._open[accepted.request_id].accepted:
            await asyncio.sleep(0)
        engine = await front_end.lose_engine()
        engine.announce()
        again = {each.request_id: each for each in [await engine.requests.get() for _ in range(2)]}
        assert again[accepted.request_id].accepted
        assert not again[other.request_id].accepted
        assert again[accepted.request_id].deadline == accepted.deadline
        for answer, request in answers:
            engine.refuse(request, FULL)
            assert (await answer).status_code == 503
