"""/v1/messages: responses and events checked with Anthropic's types and client, and errors."""

import asyncio
import json
from dataclasses import replace

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from pydantic import TypeAdapter

from api_server.protocol.fields import HARMLESS
from api_server.protocol.messages.request import MessagesRequest
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import concurrently

PATH = "/v1/messages"
TEXT = "Hi 😀 there"
EVENT = TypeAdapter(RawMessageStreamEvent)
USER = [{"role": "user", "content": "hello"}]
BODY = {"model": "toy", "max_tokens": 64, "messages": USER}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def ask(front_end, path=PATH, **fields):
    body = {name: value for name, value in (BODY | fields).items() if value != "absent"}
    headers = {"content-type": "application/json"}
    return await front_end.http.post(path, content=json.dumps(body), headers=headers)


async def answer(front_end, **fields) -> dict:
    """Return the message after validation by Anthropic's types."""
    response = await ask(front_end, **fields)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    assert response.headers["request-id"] == response.json()["id"]
    return response.json()


def decoded(text: str) -> list[dict]:
    """Return the events of a stream, validated by Anthropic's types; at most one block is open."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        if fields["type"] not in ("error", "ping"):
            EVENT.validate_python(fields)
        found.append(fields)
    return found


async def events(front_end, **fields) -> list[dict]:
    body = BODY | fields | {"stream": True}
    async with front_end.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, await response.aread()
        return decoded((await response.aread()).decode())


async def error(front_end, status=400, path=PATH, **fields) -> str:
    """Return the message of an error in Anthropic's shape."""
    response = await ask(front_end, path, **fields)
    assert response.status_code == status, response.text
    found = response.json()
    ErrorResponse.model_validate(found)
    assert found["request_id"] == response.headers["request-id"]
    if status == 400:
        assert found["error"]["type"] == "invalid_request_error"
    return found["error"]["message"]


def client(front_end, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=front_end.url, api_key=key, max_retries=0, timeout=20)


def prompt_of(front_end, tokenizer) -> str:
    """Return the last request that the engine got."""
    request = front_end.engine.requests.get_nowait()
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def test_non_streaming_response(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        found = await answer(front_end)
        assert found["id"].startswith("msg_")
        assert found["content"] == [{"type": "text", "text": TEXT}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        assert found["usage"]["input_tokens"] > 0
        assert found["usage"]["output_tokens"] > 0


async def test_the_order_of_events(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        found = await events(front_end)
        names = [each["type"] for each in found]
        texts = [each["delta"]["text"] for each in found if each["type"] == "content_block_delta"]
        assert "".join(texts) == TEXT
        assert names == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * len(texts),
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start_usage = found[0]["message"]["usage"]
        whole = await answer(front_end)
        assert found[-2]["usage"] == whole["usage"]
        assert start_usage["input_tokens"] == whole["usage"]["input_tokens"]
        assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_cached_tokens_are_not_input_tokens(start, scripted):
    async with start(scripted(TEXT)) as front_end:
        fresh = (await answer(front_end))["usage"]
        front_end.engine.num_cached_tokens = 3
        usage = (await answer(front_end))["usage"]
        assert usage["cache_read_input_tokens"] == 3
        assert usage["input_tokens"] == fresh["input_tokens"] - 3
        assert (await events(front_end))[-2]["usage"] == usage


async def test_messages_are_rendered_for_the_model(start, scripted, tokenizer):
    async with start(scripted("!")) as front_end:
        await answer(
            front_end,
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be brief."},
            ],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "one"}]},
                {"role": "user", "content": "more"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "two"},
                    ],
                },
                {"role": "user", "content": "three"},
                {"role": "system", "content": "9 tokens left"},
            ],
        )
        assert prompt_of(front_end, tokenizer) == (
            "<|im_start|>system\nYou help.\n\nBe brief.<|im_end|>\n"
            "<|im_start|>user\none\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
            "<|im_start|>user\nthree<|im_end|>\n<|im_start|>system\n9 tokens left<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


async def test_an_assistant_prefill_is_continued(start, scripted, tokenizer):
    async with start(scripted("!")) as front_end:
        await answer(front_end, messages=[*USER, {"role": "assistant", "content": "The answer:"}])
        assert prompt_of(front_end, tokenizer).endswith("<|im_start|>assistant\nThe answer:")


async def test_parameters_reach_the_engine(start, scripted):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    async with start(scripted(TEXT)) as front_end:
        await answer(
            front_end,
            max_tokens=9,
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            seed=5,
            cache_salt="x",
            output_config={"format": form},
        )
        request = front_end.engine.requests.get_nowait()
        params = request.sampling_params
        assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.25, 0.5)
        assert (params.top_k, request.seed) == (7, 5)
        assert request.cache_salt
        assert json.loads(request.grammar.source) == schema
        await answer(front_end, output_format=form)
        assert json.loads(front_end.engine.requests.get_nowait().grammar.source) == schema


async def test_stop_reasons(start, scripted):
    async with start(scripted("one two three")) as front_end:
        found = await answer(front_end, stop_sequences=[" two"])
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " two")
        assert found["content"][0]["text"] == "one"
        assert (await answer(front_end, max_tokens=2))["stop_reason"] == "max_tokens"


async def test_max_tokens_is_capped_by_the_context(start, tokenizer):
    """Agents request more tokens than small models support."""
    async with start(lambda request, choice: [5] * request.sampling_params.max_tokens) as front_end:
        found = await answer(front_end, max_tokens=32_000)
        assert found["stop_reason"] == "model_context_window_exceeded"
        assert found["usage"]["input_tokens"] + found["usage"]["output_tokens"] == 256


async def test_a_truncated_prompt_leaves_room_for_the_answer(start, scripted):
    long = [{"role": "user", "content": "the quick brown fox " * 200}]
    async with start(scripted("!")) as front_end:
        for most, left in ((6, 6), (5000, 64)):
            found = await answer(
                front_end, messages=long, max_tokens=most, truncate_prompt_tokens=-1
            )
            assert found["usage"]["input_tokens"] == 256 - left


async def test_the_error_for_a_long_prompt_has_the_text_that_agents_match(start):
    async with start() as front_end:
        message = await error(front_end, messages=[{"role": "user", "content": "🦊" * 300}])
        assert message.startswith("prompt is too long: ")
        assert message.endswith("tokens > 256 maximum")
        message = await error(front_end, messages=[{"role": "user", "content": "x" * 99_999}])
        assert message.startswith("prompt is too long: ")


async def test_a_call_and_its_result(start, scripted, tokenizer):
    """The official client: tool_use, tool_result, answer."""
    async with start(scripted(f"Let me look.{CALL}"), max_model_len=8192) as front_end:
        asked = {"model": "toy", "max_tokens": 200, "tools": [WEATHER]}
        async with client(front_end).messages.stream(**asked, messages=USER) as stream:
            async for _ in stream:
                pass
            first = await stream.get_final_message()
        said, call = first.content
        assert said.text == "Let me look."
        assert (call.name, call.input, first.stop_reason) == (
            "weather",
            {"city": "Paris"},
            "tool_use",
        )
        assert "Tells the weather" in prompt_of(front_end, tokenizer)
        result = [{"type": "tool_result", "tool_use_id": call.id, "content": "21 °C"}]
        messages = [*USER, first.to_param(), {"role": "user", "content": result}]
        second = await client(front_end).messages.create(**asked, messages=messages)
        assert second.content[0].text == "Let me look."
        prompt = prompt_of(front_end, tokenizer)
        assert prompt.index('"arguments": {"city": "Paris"}') < prompt.index("21 °C")


async def test_a_streamed_call(start, scripted):
    async with start(scripted(CALL), max_model_len=8192) as front_end:
        found = await events(front_end, tools=[WEATHER], max_tokens=200)
        begun = found[1]["content_block"]
        assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "weather", {})
        pieces = [
            each["delta"]["partial_json"] for each in found if each["type"] == "content_block_delta"
        ]
        assert json.loads("".join(pieces)) == {"city": "Paris"}
        assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_choices_of_tools(start, scripted, tokenizer):
    other = {"name": "clock", "input_schema": {"type": "object"}}
    async with start(scripted("!"), max_model_len=8192) as front_end:
        for choice, has_grammar in (
            ({"type": "auto"}, False),
            ({"type": "none"}, False),
            ({"type": "any"}, True),
            ({"type": "tool", "name": "clock"}, True),
            ({"type": "auto", "disable_parallel_tool_use": True}, True),
        ):
            await answer(front_end, tools=[WEATHER, other], tool_choice=choice)
            request = front_end.engine.requests.get_nowait()
            assert (request.grammar is not None) is has_grammar, choice


async def test_tool_errors_and_tool_references(start, scripted, tokenizer):
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    blocks = [
        {
            "type": "tool_result",
            "tool_use_id": "t1",
            "is_error": True,
            "content": [
                {"type": "text", "text": "no network"},
                {"type": "tool_reference", "tool_name": "clock"},
                {"type": "image", "source": {"type": "base64", "data": "eA=="}},
            ],
        },
        {"type": "text", "text": "go on"},
    ]
    messages = [
        *USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": blocks},
    ]
    async with start(scripted("!"), max_model_len=8192) as front_end:
        response = await ask(front_end, messages=messages, tools=[WEATHER])
        assert response.status_code == 200, response.text
        assert response.headers["x-tokend-ignored"] == "messages.content.tool_result.image"
        prompt = prompt_of(front_end, tokenizer)
        assert "Error: no network\nclock\n[image: not shown" in prompt
        assert prompt.index("clock") < prompt.index("go on")


async def test_fields_sent_by_agents_are_accepted(start, scripted):
    """Fields that have no effect must not cause an error."""
    async with start(scripted(TEXT), max_model_len=8192) as front_end:
        response = await ask(
            front_end,
            max_tokens=32_000,
            system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            tools=[
                WEATHER | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            ],
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "user_1"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            output_config={"effort": "high"},
            cache_control={"type": "ephemeral"},
            service_tier="auto",
            betas=["a-2025", "b-2026"],
        )
        assert response.status_code == 200, response.text
        named = response.headers["x-tokend-ignored"].split(", ")
        assert sorted(named) == [
            "betas",
            "context_management",
            "context_management.clear_thinking_20251015",
            "output_config.effort",
            "thinking",
            "tools.web_search_20250305",
        ]
        assert response.json()["ignored_fields"] == named
        found = await client(front_end).beta.messages.create(
            model="toy", max_tokens=9, messages=USER, betas=["some-2099-01-01"]
        )
        assert found.content[0].text


async def test_token_counts_are_exact_without_the_engine(start, scripted):
    async with start(scripted("!"), max_model_len=8192) as front_end:
        fields = {"messages": USER, "system": "be brief", "tools": [WEATHER]}
        counted = await client(front_end).messages.count_tokens(model="toy", **fields)
        assert front_end.engine.requests.empty()
        usage = (await answer(front_end, **fields))["usage"]
        assert counted.input_tokens == usage["input_tokens"]
        long = [{"role": "user", "content": "🦊" * 9000}]
        counted = await client(front_end).messages.count_tokens(model="toy", messages=long)
        assert counted.input_tokens > 8192


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "absent"}, "model is missing"),
        ({"max_tokens": "absent"}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "takes text only: this model reads no part of the type image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content: holds half"),
        (
            {
                "messages": [
                    *USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}],
                    },
                ]
            },
            "messages[1]: calls a tool",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": " "}]}, "messages[1]"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": ["a"] * 1025}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 2}, "n is not available here"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not available here"),
        ({"container": "c"}, "container is not available here"),
        ({"speed": "fast"}, "speed is not available here"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "no tool x"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, WEATHER | {"name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [WEATHER | {"input_schema": {"type": "string"}}]},
            "tools[0].input_schema.type must be object",
        ),
        ({"tool_choice": {"type": {}}}, "tool_choice.type"),
        ({"output_config": {"effort": {}}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}, "type \\ud800"),
    ],
)
async def test_invalid_requests_are_refused(start, fields, words):
    async with start() as front_end:
        assert words in await error(front_end, **fields)


async def test_every_anthropic_field_is_accepted_or_refused_by_name(start, scripted):
    """With any value: no server error, and no error that names another field."""
    taken = MessagesRequest.model_fields.keys() | HARMLESS | {"cache_control"}
    async with start(scripted("!")) as front_end:

        async def check(case: tuple[str, str]) -> None:
            path, name = case
            for value in (5, "x", True, ["x"], [{}], {"type": "x"}):
                response = await ask(front_end, path, **{name: value})
                if response.status_code == 200:
                    ignored = response.headers.get("x-tokend-ignored", "")
                    assert name in taken or name in ignored, name
                elif response.status_code == 404:
                    assert name == "model"
                else:
                    assert response.status_code == 400, (name, value, response.text)
                    assert response.json()["error"]["message"].startswith(name)

        counted = f"{PATH}/count_tokens"
        await concurrently(
            check,
            [
                *((PATH, name) for name in MessageCreateParamsBase.__annotations__),
                *((counted, name) for name in MessageCountTokensParams.__annotations__),
            ],
        )


async def test_error_types_of_anthropic(start, scripted):
    config = FrontEndConfig(api_key="secret")
    async with start(scripted("!"), config=config) as front_end:
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await client(front_end).messages.create(**BODY)
        assert denied.value.body["error"]["type"] == "authentication_error"
        assert denied.value.request_id == denied.value.body["request_id"]
        assert denied.value.response.headers["x-should-retry"] == "false"  # agents retry ten times
        known = client(front_end, "secret")
        assert (await known.messages.create(**BODY)).content
        with pytest.raises(anthropic.NotFoundError) as missing:
            await known.messages.create(**BODY | {"model": "gpt"})
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client(front_end).messages.count_tokens(model="toy", messages=USER)
        response = await front_end.http.get(PATH, headers={"x-api-key": "secret"})
        assert response.status_code == 405
        assert ErrorResponse.model_validate(response.json())
        others = await front_end.http.post("/v1/chat/completions", json=BODY)
        assert others.json()["error"]["code"] == 401


async def test_an_unreadable_body_is_an_error_in_this_shape(start):
    async with start() as front_end:
        for path in (PATH, f"{PATH}/count_tokens"):
            headers = {"content-type": "application/json"}
            response = await front_end.http.post(path, content=b"{", headers=headers)
            assert response.status_code == 400
            ErrorResponse.model_validate(response.json())
            response = await front_end.http.post(path, content=b"[]", headers=headers)
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (ErrorInfo("queue_full", "full", "max_num_queued_reqs"), 503, "overloaded_error"),
        (ErrorInfo("engine_dead", "dead"), 503, "overloaded_error"),
        (ErrorInfo("internal", "broke"), 500, "api_error"),
        (ErrorInfo("time_limit", "late"), 504, "timeout_error"),
        (ErrorInfo("invalid_request", "response_format: no"), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine(start, refusal, status, kind, stream):
    async with start() as front_end:
        asking = asyncio.create_task(ask(front_end, stream=stream))
        front_end.engine.refuse(await front_end.engine.requests.get(), refusal)
        response = await asking
        assert response.status_code == status
        retries = status not in (400, 504)
        assert response.headers.get("x-should-retry") == (None if retries else "false")
        found = response.json()
        assert found["error"]["type"] == kind
        if status == 400:
            assert found["error"]["message"] == "output_format: no"


async def test_draining_is_an_overloaded_error(start):
    async with start() as front_end:
        front_end.app_state.health.start_drain()
        response = await ask(front_end)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "overloaded_error"


async def test_a_stream_that_fails(start):
    async with start(accepts=True) as front_end:
        body = BODY | {"stream": True}
        async with front_end.http.stream("POST", PATH, json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [5])
            front_end.engine.refuse(request, ErrorInfo("internal", "it broke"))
            found = decoded((await response.aread()).decode())
        assert found[0]["type"] == "message_start"
        ErrorResponse.model_validate(found[-1])
        assert found[-1]["error"] == {"type": "api_error", "message": "it broke"}
        assert found[-1]["request_id"] == found[0]["message"]["id"]


async def test_a_disconnect_ends_the_stream(start):
    async with start(accepts=True) as front_end:
        async with front_end.http.stream("POST", PATH, json=BODY | {"stream": True}) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, [5])
            pieces = response.aiter_raw()  # a generator that is collected closes the connection
            await anext(pieces)
            assert front_end.engine.aborts.empty()
        abort = await asyncio.wait_for(front_end.engine.aborts.get(), 10)
        assert abort.request_id == request.request_id


async def test_idle_streams_get_pings(start):
    config = FrontEndConfig(sse_keep_alive=0.1)
    async with start(accepts=True, config=config) as front_end:
        async with front_end.http.stream("POST", PATH, json=BODY | {"stream": True}) as response:
            request = await front_end.engine.requests.get()
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if "event: ping" in text and not text.endswith("message_stop"):
                    break
            front_end.engine.emit(request, [], finish=FinishReason.LENGTH)
        found = decoded(text)
        assert [each["type"] for each in found[:2]] == ["message_start", "ping"]


async def test_the_session_header_names_the_agent_session(start, scripted):
    async with start(scripted("!")) as front_end:
        headers = {"x-session-id": "s1"}
        response = await front_end.http.post(PATH, json=BODY, headers=headers)
        assert response.status_code == 200
        assert front_end.engine.requests.get_nowait().agent.session


async def test_several_names_of_the_model(start, model):
    names = ("toy", "b", "c/d")
    async with start() as front_end:
        state = front_end.app.state
        state.app_state = replace(state.app_state, aliases=names[1:])
        async with client(front_end) as api:
            assert [listed.id async for listed in await api.models.list(limit=2)] == [*names]
            page = await api.models.list(limit=1, before_id="c/d")
            assert ([each.id for each in page.data], page.has_more) == (["b"], True)
            assert (await api.models.retrieve("c/d")).id == "c/d"
        listed = (await front_end.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            (name, model.name) for name in names
        ]
        error = (await front_end.complete(model="e")).json()["error"]
        assert error["message"] == "the model e does not exist; available: toy, b, c/d"


async def test_models_for_anthropics_clients(start):
    async with start(config=FrontEndConfig(api_key="key")) as front_end:
        async with client(front_end, "key") as api:
            page = await api.models.list()
            (model,) = page.data
            assert [listed.id async for listed in page] == ["toy"]
            assert (page.first_id, page.last_id, page.has_more) == ("toy", "toy", False)
            ModelInfo.model_validate(model.model_dump())
            assert (model.type, model.id, model.display_name) == ("model", "toy", "toy")
            assert int(model.created_at.timestamp()) == front_end.app_state.created
            assert (await api.models.retrieve("toy")) == model
            assert (await api.models.list(after_id="toy")).data == []
            assert (await api.models.list(before_id="toy")).data == []
            assert (await api.models.list(before_id="other")).data == []
            with pytest.raises(anthropic.NotFoundError, match="available: toy"):
                await api.models.retrieve("other")
            with pytest.raises(anthropic.BadRequestError, match="limit must be"):
                await api.models.list(limit=0)
        async with client(front_end, "wrong") as api:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await api.models.list()
            ErrorResponse.model_validate(caught.value.body)
