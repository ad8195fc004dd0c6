"""The WebSocket at /v1/sessions, with the client of the `websockets` package."""

import asyncio
import json

import pytest
from starlette.requests import ClientDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api_server.generation import request_builder
from api_server.generation import session as sessions
from api_server.http import http_protocol
from api_server.routes import sessions as route
from api_server.turns import CLIENT
from proto.errors import ErrorInfo
from proto.messages.engine_io import EngineCoreOutput, FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import closed, message, websocket


def opened(front_end, **headers):
    return websocket(front_end, "/v1/sessions", **headers)


async def give(client, prompt, **fields):
    await client.send(json.dumps({"type": "input", "prompt": prompt, **fields}))


async def end(client):
    await client.send(json.dumps({"type": "end"}))


async def error_of(client):
    return (await message(client))["error"]


async def test_each_input_is_a_turn_and_the_end_closes(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        engine = front_end.engine
        fields = {"return_token_ids": True, "stream_options": {"include_usage": True}}
        fields["return_accepted_drafts"] = True
        fields["response_format"] = {"type": "text"}
        await give(client, [5, 6, 7], max_tokens=4, temperature=0.5, seed=9, **fields)
        request = await engine.requests.get()
        assert request.resumable
        assert (request.prompt_token_ids, request.seed) == ([5, 6, 7], 9)
        engine.emit(request, [20])
        first = await message(client)
        assert first["object"] == "text_completion"
        assert first["choices"][0]["token_ids"] == [20]
        assert first["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        engine.emit(request, [21], finish=FinishReason.LENGTH, goes_on=True)
        last = await message(client)
        assert (last["id"], last["choices"][0]["finish_reason"]) == (first["id"], "length")
        usage = (await message(client))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2)

        await give(client, [8, 9], max_tokens=6)
        following = await engine.inputs.get()
        assert (following.prompt_token_ids, following.last) == ([8, 9], False)
        params = following.sampling_params
        assert (params.max_tokens, params.temperature) == (6, 0.5), "everything else is unchanged"
        engine.emit(
            request, [29, 30], num_accepted_drafts=1, finish=FinishReason.STOP, goes_on=True
        )
        chunk = await message(client)
        assert chunk["id"] == first["id"]
        assert chunk["choices"][0]["accepted_drafts"] == [True, False]
        assert chunk["choices"][0]["prompt_token_ids"] == [5, 6, 7, 20, 8, 9], "21 was not computed"
        assert (await message(client))["usage"]["prompt_tokens"] == 6

        await end(client)
        last_input = await engine.inputs.get()
        assert (last_input.prompt_token_ids, last_input.last) == ([], True)
        engine.emit(request, [], finish=FinishReason.STOP)
        assert await closed(client) == 1000
        assert front_end.app_state.client.num_open == 0
        assert engine.aborts.empty()


async def test_inputs_may_be_sent_before_the_session_is_accepted(start):
    async with start() as front_end, opened(front_end) as client:
        engine = front_end.engine
        await give(client, [5])
        await give(client, [6])
        await end(client)
        request = await engine.requests.get()
        await asyncio.sleep(0.02)
        assert engine.inputs.empty(), "an engine that lacks the session would drop them"
        engine.accept(request)
        assert (await engine.inputs.get()).prompt_token_ids == [6]
        assert (await engine.inputs.get()).last
        engine.emit(request, [20], finish=FinishReason.LENGTH, goes_on=True)
        engine.emit(request, [30], finish=FinishReason.LENGTH)
        texts = [(await message(client))["choices"][0]["finish_reason"] for _ in range(2)]
        assert texts == ["length", "length"]
        assert await closed(client) == 1000


async def test_a_form_of_the_answer_is_not_available_and_not_read(start):
    forms = {"structured_outputs": {"regex": "("}, "guided_choice": ["a"], "guided_json": "{"}
    forms |= dict.fromkeys(("grammar", "json_schema", "guided_regex", "guided_grammar"), "(")
    forms["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}
    async with start(accepts=True) as front_end, opened(front_end) as client:
        for name, form in forms.items():
            await give(client, "a", **{name: form})
            error = await error_of(client)
            assert error["param"] == name
            assert error["message"] == f"{name} is not available in a session"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "stop": ["x"]}, "stop"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "return_routed_experts": True}, "return_routed_experts"),
        ({"prompt": "a", "stream": False}, "stream"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "timeout_ms": 5}, "timeout_ms"),
        ({"prompt": "a", "agent_hint": {"job_id": "j"}}, "agent_hint"),
        ({"prompt": "a", "tokens_max": 3}, "tokens_max"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "model": "another"}, "model"),
        ({"type": "stop"}, "type"),
    ],
)
async def test_an_invalid_message_is_an_error_and_the_session_continues(start, fields, param):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await client.send(json.dumps({"type": "input", "event_id": "e1", **fields}))
        error = await error_of(client)
        assert (error["param"], error["event_id"]) == (param, "e1")
        assert front_end.engine.requests.empty()
        await give(client, [5])
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [20], finish=FinishReason.LENGTH, goes_on=True)
        assert (await message(client))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"type": "end", "type": "end"}', b"\x00"])
async def test_a_message_that_is_not_a_json_object_is_an_error(start, text):
    async with start() as front_end, opened(front_end) as client:
        await client.send(text)
        assert (await error_of(client))["code"] == 400


async def test_session_wide_fields_cannot_change(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await give(client, [5], seed=3)
        await front_end.engine.requests.get()
        await give(client, [6], seed=4)
        assert (await error_of(client))["param"] == "seed"
        await give(client, [6], seed=3)
        assert (await front_end.engine.inputs.get()).prompt_token_ids == [6]


async def test_the_context_limits_all_turns_together(start):
    async with start(accepts=True, max_model_len=20) as front_end, opened(front_end) as client:
        await give(client, [5] * 9, max_tokens=2)
        await front_end.engine.requests.get()
        await give(client, [6] * 9, max_tokens=3)
        first = await error_of(client)
        await give(client, [6] * 12)
        second = await error_of(client)
        assert [first["param"], second["param"]] == ["max_tokens", "prompt"]
        assert first["code"] == second["code"] == "context_length_exceeded"
        await give(client, [6] * 9, max_tokens=None)
        assert (await front_end.engine.inputs.get()).sampling_params.max_tokens == 2


async def test_queued_inputs_are_limited(start, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_WAITING_TURNS", 2)
    async with start(accepts=True) as front_end, opened(front_end) as client:
        for _ in range(3):
            await give(client, [5])
        assert (await error_of(client))["param"] == "prompt"


async def test_input_after_the_end_is_refused(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await give(client, [5])
        await end(client)
        await give(client, [5])
        assert (await error_of(client))["param"] == "type"


async def test_an_end_without_input_closes(start):
    async with start() as front_end, opened(front_end) as client:
        await end(client)
        assert await closed(client) == 1000


async def test_a_client_that_sends_nothing_is_disconnected(start, monkeypatch):
    monkeypatch.setattr(route, "HEADER_SECONDS", 0.05)
    async with start() as front_end, opened(front_end) as client:
        assert (await error_of(client))["code"] == 408
        assert await closed(client) == 1008


async def test_the_input_of_a_client_that_left_is_not_read(start, monkeypatch, caplog):
    began, gone = asyncio.Event(), asyncio.Event()

    async def read_in_turns(*args: object) -> None:
        began.set()
        while True:
            await asyncio.sleep(0.01)
            try:
                CLIENT.get().check_goes_on()
            except ClientDisconnect:
                gone.set()
                raise

    monkeypatch.setattr(request_builder, "logit_edits", read_in_turns)
    async with start() as front_end, asyncio.timeout(5):
        async with opened(front_end) as client:
            await give(client, [5])
            await began.wait()
            client.transport.abort()
            await gone.wait()
        while front_end.app_state.open_streams:
            await asyncio.sleep(0.01)
    assert "failed" not in caplog.text


async def test_a_client_that_leaves_aborts_the_session(start):
    async with start(accepts=True) as front_end:
        async with opened(front_end) as client:
            await give(client, [5])
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [20])
            await message(client)
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        assert front_end.app_state.client.num_open == 0
        assert not front_end.app_state.open_streams
        async with asyncio.timeout(5):
            await front_end.app_state.in_flight.wait_until_idle()
        assert front_end.app_state.metrics.connections.own_value <= 1  # of httpx


@pytest.mark.parametrize(
    ("between_turns", "fields", "status", "code"),
    [
        (False, {"error": ErrorInfo("invalid_request", "long", "max_tokens")}, 400, 1008),
        (True, {"error": ErrorInfo("invalid_request", "idle", None)}, 400, 1008),
        (False, {"finish_reason": FinishReason.ERROR}, 500, 1011),
        (True, {"finish_reason": FinishReason.ERROR}, 500, 1011),
        (True, {"finish_reason": FinishReason.ABORT}, 410, 1008),
        (False, {"token_index": 5, "new_token_ids": [21]}, 500, 1011),
    ],
)
async def test_a_failure_of_the_engine_ends_the_session(start, between_turns, fields, status, code):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        engine = front_end.engine
        await give(client, [5])
        request = await engine.requests.get()
        if between_turns:
            engine.emit(request, [20], finish=FinishReason.LENGTH, goes_on=True)
            await message(client)
        defaults = {"choice": 0, "token_index": 0, "new_token_ids": []}
        engine.send_outputs(EngineCoreOutput(request.request_id, **(defaults | fields)))
        assert (await error_of(client))["code"] == status
        assert await closed(client) == code


async def test_the_death_of_the_engine_ends_the_session_with_an_error(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await give(client, [5])
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [20])
        await message(client)
        await front_end.lose_engine()
        assert "engine" in (await error_of(client))["message"]
        assert await closed(client) == 1011


async def test_an_operators_abort_ends_the_session(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await give(client, [5], request_id="mine")
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [20])
        assert (await message(client))["id"] == "cmpl-mine"
        front_end.app_state.abort_streams(["cmpl-mine"], None)
        assert (await error_of(client))["code"] == 410
        assert await closed(client) == 1008
        assert (await front_end.engine.aborts.get()).request_id == request.request_id


async def test_a_drain_finishes_the_turn_and_refuses_input(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        engine = front_end.engine
        await give(client, [5])
        request = await engine.requests.get()
        front_end.app_state.health.start_drain()
        assert (await engine.inputs.get()).last
        await give(client, [6])
        assert (await error_of(client))["code"] == 503
        engine.emit(request, [20], finish=FinishReason.LENGTH)
        assert (await message(client))["choices"][0]["finish_reason"] == "length"
        assert (await error_of(client))["code"] == 503
        assert await closed(client) == 1012


async def test_a_session_needs_a_key_and_no_drain(start):
    config = FrontEndConfig(api_key="secret")
    async with start(accepts=True, config=config) as front_end:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(front_end):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == 401
        key = {"Authorization": "Bearer secret"}
        async with opened(front_end, **key) as client:
            await give(client, [5])
            await front_end.engine.requests.get()
        front_end.app_state.health.start_drain()
        with pytest.raises(InvalidStatus) as refused:
            async with opened(front_end, **key):
                pass
        assert refused.value.response.status_code == 503


async def test_pages_of_other_sites_are_refused(start):
    async with start() as front_end:
        with pytest.raises(InvalidStatus) as refused:
            async with opened(front_end, Origin="https://evil.example"):
                pass
        assert refused.value.response.status_code == 403
        async with opened(front_end, Origin=front_end.url):
            pass


async def test_other_paths_have_no_websocket(start):
    async with start() as front_end:
        url = front_end.url.replace("http", "ws", 1) + "/v1/completions"
        with pytest.raises(InvalidStatus) as refused:
            async with connect(url):
                pass
        assert refused.value.response.status_code == 404
        assert "/v1/completions" in json.loads(refused.value.response.body)["error"]["message"]


async def test_a_websocket_outlives_the_header_timeout(start, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.05)
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await asyncio.sleep(0.2)
        await give(client, [5])
        await front_end.engine.requests.get()


async def test_shutdown_ends_a_session(start):
    async with start(accepts=True) as front_end, opened(front_end) as client:
        await give(client, [5])
        await front_end.engine.requests.get()
        front_end.app_state.client.close()
        assert "shutting down" in (await error_of(client))["message"]
        assert await closed(client) == 1012
