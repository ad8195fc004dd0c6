"""The WebSocket at /v1/responses, with the client of the `websockets` package."""

import asyncio
import dataclasses
import json

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus

from api_server.engine.health import InFlightCounter
from api_server.http.connection import Uploads
from api_server.routes import responses_websocket as route
from proto.errors import ErrorInfo
from proto.messages.engine_io import EngineCoreOutput, FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import closed, message, websocket

PATH = "/v1/responses"
TEXT = "Hi there"
EVENT = TypeAdapter(ResponseStreamEvent)
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


async def create(client, **fields):
    body = {"type": "response.create", "input": "hello", "store": False, **fields}
    await client.send(json.dumps(body))


async def events(client, **fields) -> list[dict]:
    """Return the events of a response, up to the last one."""
    await create(client, **fields)
    return await events_of_next(client)


async def events_of_next(client) -> list[dict]:
    found = [await message(client)]
    while found[-1]["type"] not in LAST:
        found.append(await message(client))
    return found


async def answer(client, **fields) -> dict:
    found = (await events(client, **fields))[-1]
    assert found["type"] == "response.completed", found
    return found["response"]


async def error(client, **fields) -> dict:
    (found,) = await events(client, **fields)
    assert found["type"] == "error"
    assert found["status"] == 400
    return found["error"]


def text_of(response: dict) -> str:
    return response["output"][0]["content"][0]["text"]


def prompt_of(front_end, tokenizer) -> str:
    request = front_end.engine.requests.get_nowait()
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def test_events_equal_those_of_the_http_stream(start, scripted):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        for _ in range(2):
            found = await events(client, model="toy")
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            for event in found:
                EVENT.validate_python(event)
            assert [event["type"] for event in found[:2]] == [
                "response.created",
                "response.in_progress",
            ]
            assert text_of(found[-1]["response"]) == TEXT
        assert front_end.app_state.client.num_open == 0


async def test_a_response_that_is_not_stored_can_be_continued_on_its_connection(
    start, scripted, tokenizer
):
    async with start(scripted(TEXT)) as front_end:
        async with websocket(front_end, PATH) as client:
            first = await answer(client, input="one")
            prompt_of(front_end, tokenizer)
            second = await answer(client, input="two", previous_response_id=first["id"])
            prompt = prompt_of(front_end, tokenizer)
            assert [part in prompt for part in ("one", TEXT, "two")] == [True] * 3
            assert second["previous_response_id"] == first["id"]
            found = await error(client, previous_response_id=first["id"])
            assert found["code"] == "previous_response_not_found", "only the last one is kept"
            assert found["param"] == "previous_response_id"
            await answer(client, input=[], previous_response_id=second["id"])
            assert prompt_of(front_end, tokenizer).count(TEXT) == 2
        async with websocket(front_end, PATH) as client:
            found = await error(client, previous_response_id=second["id"])
            assert found["code"] == "previous_response_not_found"
        assert (await front_end.http.get(f"{PATH}/{second['id']}")).status_code == 404


async def test_a_stored_response_can_be_continued_from_anywhere(start, scripted, tokenizer):
    async with start(scripted(TEXT)) as front_end:
        async with websocket(front_end, PATH) as client:
            first = await answer(client, input="one", store=True)
        async with websocket(front_end, PATH) as client:
            await answer(client, input="two", previous_response_id=first["id"])
        stored = await front_end.http.get(f"{PATH}/{first['id']}")
        assert stored.json() == first


async def test_a_failed_continuation_forgets_the_response(start, scripted):
    orphan = [{"type": "function_call_output", "call_id": "x", "output": "21"}]
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        first = await answer(client)
        found = await error(client, input="a", temperature=-1)
        assert found["param"] == "temperature"
        second = await answer(client, previous_response_id=first["id"])
        found = await error(client, input=orphan, previous_response_id=second["id"])
        assert "call_id" in found["message"]
        found = await error(client, previous_response_id=second["id"])
        assert found["code"] == "previous_response_not_found"


async def test_a_warm_up_computes_the_prompt_and_has_no_output(start, scripted, tokenizer):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        found = await events(
            client, input=[], instructions="be brief", generate=False, min_tokens=5
        )
        assert [event["type"] for event in found] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = found[-1]["response"]
        EVENT.validate_python(found[-1])
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        request = front_end.engine.requests.get_nowait()
        assert request.sampling_params.max_tokens == 1
        assert warm["usage"]["input_tokens"] == len(request.prompt_token_ids)
        await answer(client, input="one", previous_response_id=warm["id"])
        assert "one" in prompt_of(front_end, tokenizer)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("{", None),
        ("[]", None),
        (b"\x00", None),
        ('{"type": "input", "input": "a"}', "type"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "input": "a", "stream": false}', "stream"),
        ('{"type": "response.create", "input": "a", "background": true}', "background"),
        ('{"type": "response.create", "input": "a", "generate": 1}', "generate"),
        ('{"type": "response.create", "input": "a", "previous_response_id": 5}', None),
    ],
)
async def test_an_invalid_message_is_an_error_and_the_connection_continues(
    start, scripted, text, param
):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        await client.send(text)
        found = await message(client)
        assert (found["type"], found["status"]) == ("error", 400)
        assert isinstance(found["error"]["code"], str)
        assert param in (None, found["error"]["param"])
        assert text_of(await answer(client, stream=True)) == TEXT


async def test_messages_sent_ahead_are_answered_in_order(start, scripted):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        for name in "abc":
            await create(client, metadata={"name": name})
        for name in "abc":
            found = await events_of_next(client)
            assert {event["response"]["metadata"]["name"] for event in found[:2]} == {name}
            assert found[-1]["type"] == "response.completed"


async def test_handshake_headers_apply_to_every_response(start, scripted):
    headers = {"x-session-id": "s", "x-request-id": "mine"}
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH, **headers) as client:
        found = [await events(client, unheard_of=1) for _ in range(2)]
        assert found[0][-1]["response"]["id"] != found[1][-1]["response"]["id"]
        assert found[0][0]["response"]["ignored_fields"] == ["unheard_of"]
        request = front_end.engine.requests.get_nowait()
        assert request.agent is not None


async def test_a_failure_of_the_engine_is_the_last_event(start):
    async with start(accepts=True) as front_end, websocket(front_end, PATH) as client:
        engine = front_end.engine
        await create(client)
        request = await engine.requests.get()
        engine.emit(request, [20])
        await message(client)
        failure = ErrorInfo("overloaded", "too much", None)
        engine.send_outputs(EngineCoreOutput(request.request_id, 0, 1, [], error=failure))
        found = await events_of_next(client)
        failed = found[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "rate_limit_exceeded")
        assert "error" not in [event["type"] for event in found]


async def test_an_error_before_acceptance_is_an_error_event(start):
    async with start() as front_end, websocket(front_end, PATH) as client:
        await create(client)
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("queue_full", "full", "max_num_queued_reqs"))
        found = await message(client)
        assert (found["type"], found["status"]) == ("error", 503)
        assert found["error"]["code"] == "overloaded_error"


async def test_a_disconnect_aborts_the_response(start):
    async with start(accepts=True) as front_end:
        async with websocket(front_end, PATH) as client:
            await create(client)
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [20])
            await message(client)
        assert (await front_end.engine.aborts.get()).request_id == request.request_id
        async with asyncio.timeout(5):
            await front_end.app_state.in_flight.wait_until_idle()
        assert not front_end.app_state.open_streams


async def test_a_running_response_can_be_cancelled(start):
    async with start(accepts=True) as front_end, websocket(front_end, PATH) as client:
        await create(client)
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [20])
        started = (await message(client))["response"]
        await front_end.http.post(f"{PATH}/{started['id']}/cancel")
        last = (await events_of_next(client))[-1]["response"]
        assert (last["id"], last["status"]) == (started["id"], "cancelled")


async def test_a_drain_closes_idle_connections_without_waiting(start, scripted):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        await answer(client)
        app_state = front_end.app_state
        async with asyncio.timeout(10):
            while (
                app_state.in_flight.number
            ):  # the client may have the end before the server goes on
                await asyncio.sleep(0.001)
        app_state.health.start_drain()
        assert await closed(client) == 1012
        assert client.close_reason.startswith("draining: ")


async def test_a_drain_waits_for_the_response(start):
    async with start(accepts=True) as front_end, websocket(front_end, PATH) as client:
        await create(client)
        request = await front_end.engine.requests.get()
        assert front_end.app_state.in_flight.number == 1
        front_end.app_state.health.start_drain()
        front_end.engine.emit(request, [20], finish=FinishReason.STOP)
        assert (await events_of_next(client))[-1]["type"] == "response.completed"
        assert await closed(client) == 1012
        assert client.close_reason.startswith("draining: ")


async def test_a_reload_between_two_responses_changes_the_engine(start, scripted):
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        first = await answer(client)
        old = front_end.app_state
        front_end.app.state.app_state = dataclasses.replace(
            old, model_name="newer", in_flight=InFlightCounter()
        )
        found = await answer(client, model="newer", previous_response_id=first["id"])
        assert found["model"] == "newer"
        assert old.in_flight.number == 0


async def test_a_connection_ends_after_an_hour(start, scripted, monkeypatch):
    monkeypatch.setattr(route, "CONNECTION_SECONDS", 0.2)
    async with start(scripted(TEXT)) as front_end, websocket(front_end, PATH) as client:
        found = await message(client)
        assert found["error"]["code"] == "websocket_connection_limit_reached"
        assert await closed(client) == 1008


async def test_a_key_and_the_same_origin_are_required(start, scripted):
    async with start(scripted(TEXT), config=FrontEndConfig(api_key="secret")) as front_end:
        key = {"Authorization": "Bearer secret"}
        refusals = [(401, {}), (403, {**key, "Origin": "https://evil.example"})]
        for status, headers in refusals:
            with pytest.raises(InvalidStatus) as refused:
                async with websocket(front_end, PATH, **headers):
                    pass
            assert refused.value.response.status_code == status
        async with websocket(front_end, PATH, **key) as client:
            await answer(client)


async def test_conversations_of_idle_connections_have_limits_together(start, scripted, monkeypatch):
    kept = Uploads()
    monkeypatch.setattr(kept, "_max_client_bytes", 100_000)
    monkeypatch.setattr(route, "kept_histories", kept)
    user = {"role": "user", "content": "hello"}
    async with start(scripted(TEXT)) as front_end:
        async with websocket(front_end, PATH) as large, websocket(front_end, PATH) as small:
            made = [
                await answer(client, input=[user, {"type": "unknown", "data": "x" * size}])
                for client, size in ((large, 70_000), (small, 60_000))
            ]
            async with asyncio.timeout(10):
                while not 60_000 < kept.num_bytes < 70_000:
                    await asyncio.sleep(0.001)
            lost = await error(large, previous_response_id=made[0]["id"])
            assert lost["code"] == "previous_response_not_found"
            await answer(small, previous_response_id=made[1]["id"])
        async with asyncio.timeout(10):
            while kept.num_bytes:
                await asyncio.sleep(0.001)
