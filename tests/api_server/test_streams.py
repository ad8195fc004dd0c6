"""The course of a request: acceptance, failures, disconnects."""

import asyncio
import json
import socket

import httpx
import pytest

from api_server.text.detokenizer import ByteLevelDetokenizer
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from tests.api_server.conftest import samples

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


def post(front_end, path: str, **fields) -> asyncio.Task[httpx.Response]:
    body = PATHS[path] | fields
    return asyncio.create_task(front_end.http.post(path, json=body))


async def quiet_until(event: asyncio.Task, front_end) -> None:
    """Wait until messages in transit have arrived, by a round trip of another request."""
    for _ in range(3):
        assert (await front_end.http.get("/version")).status_code == 200
    assert not event.done()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"), [("invalid_request", 400), ("overloaded", 503), ("internal", 500)]
)
async def test_an_error_before_acceptance_is_a_status(start, path, stream, kind, status):
    async with start() as front_end:
        answer = post(front_end, path, stream=stream)
        request = await front_end.engine.requests.get()
        await quiet_until(answer, front_end)
        front_end.engine.refuse(request, ErrorInfo(kind, "not this one", "prompt", None, "secret"))
        response = await answer
        assert response.status_code == status
        error = response.json()["error"]
        assert (error["message"], error["param"]) == ("not this one", "prompt")
        assert ("retry-after" in response.headers) == (status == 503)
        assert "secret" not in response.text
        assert front_end.app_state.client.num_open == 0


async def test_the_status_is_sent_on_acceptance(start):
    async with start(accepts=True) as front_end:
        body = PATHS["/v1/completions"] | {"stream": True}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            request = front_end.engine.requests.get_nowait()
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")


async def test_one_refused_prompt_aborts_all(start):
    async with start() as front_end:
        answer = post(front_end, "/v1/completions", prompt=[[40], [41]])
        first = await front_end.engine.requests.get()
        second = await front_end.engine.requests.get()
        front_end.engine.accept(first)
        front_end.engine.refuse(second, ErrorInfo("overloaded", "full"))
        assert (await answer).status_code == 503
        abort = await front_end.engine.aborts.get()
        assert abort.request_id == first.request_id
        assert front_end.app_state.client.num_open == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_a_stream(start, path):
    async with start(accepts=True) as front_end:
        body = PATHS[path] | {"stream": True, "stream_options": {"include_usage": True}}
        async with front_end.http.stream("POST", path, json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [40])
            front_end.engine.send_outputs(
                front_end.engine.output(request, [], error=ErrorInfo("internal", "broken"))
            )
            events = (await response.aread()).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["message"] == "broken"
        assert error["code"] == 500
        assert not any('"finish_reason": "' in event for event in events)
        assert front_end.app_state.client.num_open == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_without_streaming(start, path):
    async with start(accepts=True) as front_end:
        answer = post(front_end, path)
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        front_end.engine.emit(request, [], error=ErrorInfo("internal", "broken"))
        response = await answer
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "broken"


async def test_a_gap_fails_only_its_request(start):
    async with start(accepts=True) as front_end:
        bad, good = post(front_end, "/v1/completions"), post(front_end, "/v1/completions")
        first = await front_end.engine.requests.get()
        second = await front_end.engine.requests.get()
        lost = front_end.engine.output(first, [40])
        assert lost.token_index == 0
        front_end.engine.send_outputs(
            front_end.engine.output(first, [41]),
            front_end.engine.output(second, [42], finish=FinishReason.LENGTH),
        )
        statuses = sorted([(await bad).status_code, (await good).status_code])
        assert statuses == [200, 500]
        assert (await front_end.engine.aborts.get()).request_id == first.request_id


async def test_a_detokenizer_that_fails_ends_only_its_request(start, monkeypatch):
    healthy = ByteLevelDetokenizer.decode_token

    def decode_token(self, token_id):
        if token_id == 41:
            raise RuntimeError("the text at /secret/path is cracked")
        return healthy(self, token_id)

    monkeypatch.setattr(ByteLevelDetokenizer, "decode_token", decode_token)
    async with start(accepts=True) as front_end:
        bad, good = post(front_end, "/v1/completions"), post(front_end, "/v1/completions")
        first = await front_end.engine.requests.get()
        second = await front_end.engine.requests.get()
        front_end.engine.send_outputs(
            front_end.engine.output(first, [41]),
            front_end.engine.output(second, [42], finish=FinishReason.LENGTH),
        )
        answers = sorted([await bad, await good], key=lambda each: each.status_code)
        assert [each.status_code for each in answers] == [200, 500]
        assert answers[1].json()["error"]["message"] == "internal error"
        assert (await front_end.engine.aborts.get()).request_id == first.request_id
        assert front_end.app_state.client.num_open == 0


async def test_repeated_outputs_change_nothing(start, tokenizer):
    ids = tokenizer.encode("one two three").ids
    async with start(accepts=True) as front_end:
        answer = post(front_end, "/v1/completions", max_tokens=60)
        request = await front_end.engine.requests.get()
        output = front_end.engine.output(request, ids)
        front_end.engine.send_outputs(output, output)
        front_end.engine.emit(request, [2], finish=FinishReason.STOP)
        body = (await answer).json()
        assert body["choices"][0]["text"] == "one two three"
        assert body["usage"]["completion_tokens"] == len(ids) + 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["queued", "accepted", "running"])
async def test_a_disconnect_aborts_the_request(start, path, stream, state):
    async with start() as front_end:
        async with httpx.AsyncClient(base_url=front_end.url, timeout=20) as client:
            body = PATHS[path] | {"stream": stream, "n": 2}
            answer = asyncio.create_task(client.post(path, json=body))
            request = await front_end.engine.requests.get()
            if state != "queued":
                front_end.engine.accept(request)
            if state == "running":
                front_end.engine.emit(request, [40])
            await quiet_until(answer, front_end)
            answer.cancel()
        abort = await asyncio.wait_for(front_end.engine.aborts.get(), 10)
        assert abort.request_id == request.request_id
        assert (abort.reason, abort.choice) == ("disconnect", None)
        assert front_end.app_state.client.num_open == 0
        front_end.engine.emit(request, [41])
        assert (await front_end.http.get("/health")).status_code == 200
        metrics = front_end.app_state.metrics.render().decode()
        aborted = 0.0 if state == "queued" else 2.0
        line = f'finished_reason="abort",model_name="toy"}} {aborted}'
        assert line in metrics
        assert front_end.engine.aborts.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_before_submission_sends_nothing_to_the_engine(start, stream):
    async with start() as front_end:
        host, port = front_end.url.removeprefix("http://").split(":")
        body = json.dumps(PATHS["/v1/completions"] | {"stream": stream}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
        name = "tokend:requests_cut_short_total,disconnect"
        async with asyncio.timeout(10):
            while not (await samples(front_end))[name]:
                await asyncio.sleep(0)
        assert front_end.engine.requests.empty()
        assert front_end.engine.aborts.empty()
        assert front_end.app_state.client.num_open == 0


async def test_a_finished_request_is_not_aborted(start, scripted):
    async with start(scripted("!")) as front_end:
        await front_end.complete()
        await front_end.events("/v1/completions", prompt="hello")
        assert (await front_end.http.get("/health")).status_code == 200
        assert front_end.engine.aborts.empty()
        assert front_end.app_state.client.num_open == 0


async def test_a_slow_reader_gets_everything_in_few_chunks(start, tokenizer):
    """With small socket buffers and no reads outputs are merged; then all of them arrive."""
    piece = tokenizer.encode(" number").ids
    async with start(accepts=True, max_model_len=200_000) as front_end:
        host, port = front_end.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**14)
        body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 100_000}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        request = await front_end.engine.requests.get()
        total = 30_000
        for number in range(total):
            front_end.engine.emit(request, piece)
            if number % 100 == 0:
                await asyncio.sleep(0)
        front_end.engine.emit(request, [2], finish=FinishReason.STOP)
        assert (await front_end.http.get("/health")).status_code == 200
        text = (await reader.read(-1)).decode()
        writer.close()
        events = [line for line in text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == " number" * total
        assert len(events) < total / 2
        assert text.count("data: [DONE]") == 1


async def test_shutdown_ends_streams_with_an_error(start):
    async with start(accepts=True) as front_end:
        body = PATHS["/v1/completions"] | {"stream": True}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [40])
            waiting = post(front_end, "/v1/completions")
            await front_end.engine.requests.get()
            front_end.app_state.client.close()
            text = (await response.aread()).decode()
        assert '"code": 503' in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await waiting).status_code == 503
        assert (await front_end.complete()).status_code == 503
        assert (await front_end.http.get("/health")).status_code == 503


async def test_messages_of_another_epoch_are_dropped(start):
    async with start(accepts=True) as front_end:
        answer = post(front_end, "/v1/completions")
        request = await front_end.engine.requests.get()
        front_end.engine.epoch = 9
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        await quiet_until(answer, front_end)
        answer.cancel()
        assert (await front_end.engine.aborts.get()).request_id == request.request_id


async def test_admin_calls(start):
    async with start() as front_end:
        reply = await front_end.app_state.client.call_admin("reset_prefix_cache")
        assert reply.ok
        assert reply.detail == ""
