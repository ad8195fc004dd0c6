"""Conversations with tools over /v1/responses, with OpenAI's client and a coding agent."""

import json

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api_server.responses_client import PATH, client, decoded, error, prompt_of

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SAID = "It is 21 degrees."


@pytest.fixture
def model_calls(tokenizer):
    """A script of a model that makes this call, and answers after the result."""

    def script_for(call: str):
        first = [*tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>").ids, 2]
        then = [*tokenizer.encode(SAID).ids, 2]

        def script(request, choice):
            prompt = tokenizer.decode(request.prompt_token_ids)
            return then if "<tool_response>" in prompt else first

        return script

    return script_for


async def streamed(api, **fields) -> tuple[list, object]:
    """Return the validated events of OpenAI's client and the final response."""
    stream = await api.responses.create(model="toy", stream=True, **fields)
    events = [event async for event in stream]
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    assert events[-1].type == "response.completed"
    return events, events[-1].response


async def test_a_streamed_conversation(start, model_calls, tokenizer):
    async with start(model_calls(CALL), max_model_len=2048) as front_end, client(front_end) as api:
        items = [{"role": "user", "content": "How warm is it in Paris?"}]
        events, response = await streamed(api, input=items, tools=[WEATHER], tool_choice="required")
        assert front_end.engine.requests.get_nowait().grammar is not None
        (call,) = response.output
        deltas = [each.delta for each in events if each.type.endswith("arguments.delta")]
        assert "".join(deltas) == call.arguments
        assert json.loads(call.arguments) == {"city": "Paris"}
        assert (call.name, call.status) == ("weather", "completed")
        items += [
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"},
        ]
        _, response = await streamed(api, input=items, tools=[WEATHER])
        assert response.output_text == SAID
        prompt = prompt_of(front_end, tokenizer)
        assert "<tool_response>\n21 degrees\n</tool_response>" in prompt
        assert CALL in prompt


async def test_a_stored_conversation(start, model_calls):
    async with start(model_calls(CALL), max_model_len=2048) as front_end, client(front_end) as api:
        ask = {"model": "toy", "tools": [WEATHER], "store": True}
        first = await api.responses.create(**ask, input="How warm is it in Paris?")
        (call,) = first.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        second = await api.responses.create(**ask, input=[output], previous_response_id=first.id)
        assert second.output_text == SAID


async def test_the_clients_stream_helper_with_tools(start, model_calls):
    async with start(model_calls(CALL), max_model_len=2048) as front_end, client(front_end) as api:
        async with api.responses.stream(model="toy", input="?", tools=[WEATHER]) as stream:
            final = await stream.get_final_response()
        assert final.output[0].parsed_arguments == {"city": "Paris"}


async def test_order_and_content_of_events(start, model_calls):
    async with start(model_calls(CALL), max_model_len=2048) as front_end:
        body = {"input": "?", "tools": [WEATHER], "stream": True}
        found = decoded((await front_end.http.post(PATH, json=body)).text)
        (item,) = found[-1]["response"]["output"]
        (whole,) = (await front_end.http.post(PATH, json=body | {"stream": False})).json()["output"]
        done = next(each["item"] for each in found if each["type"].endswith("item.done"))
        added = next(each["item"] for each in found if each["type"].endswith("item.added"))
        assert item == done == added | {"arguments": done["arguments"], "status": "completed"}
        for call in (item, whole):
            assert call.pop("id").startswith("fc_")
            assert call.pop("call_id").startswith("call_")
            assert json.loads(call.pop("arguments")) == {"city": "Paris"}
            assert call == {"type": "function_call", "name": "weather", "status": "completed"}
        names = [each["type"].removeprefix("response.") for each in found]
        assert list(dict.fromkeys(names)) == [
            "created",
            "in_progress",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]


PATCH = "*** Begin Patch\n*** End Patch"
AGENT = {
    "model": "toy",
    "instructions": "You are a coding agent.",
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
        },
        {
            "type": "namespace",
            "name": "mcp__files__",
            "description": "Tools in the mcp__files__ namespace.",
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "description": "", "parameters": {}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a0000-0000-7000-8000-000000000000",
    "client_metadata": {"x-codex-installation-id": "y"},
}
HISTORY = [
    {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions instructions>"}],
    },
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "<environment_context>"},
            {"type": "input_text", "text": "Fix it."},
        ],
    },
]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            {"name": "shell", "arguments": {"command": ["ls", "-l"]}},
            {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls", "-l"]}'},
        ),
        (
            {"name": "apply_patch", "arguments": {"input": PATCH}},
            {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
        ),
        (
            {"name": "mcp__files__read", "arguments": {}},
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__files__",
                "arguments": "{}",
            },
        ),
    ],
)
async def test_a_coding_agent(start, model_calls, tokenizer, call, expected):
    """The agent's requests: a call, then the same conversation with its result."""
    async with start(model_calls(json.dumps(call)), max_model_len=4096) as front_end:
        response = await front_end.http.post(PATH, json={**AGENT, "input": HISTORY})
        assert response.status_code == 200, response.text
        assert set(response.headers["x-tokend-ignored"].split(", ")) == {
            "client_metadata",
            "include.reasoning.encrypted_content",
            "reasoning.effort",
            "tools.format",
            "tools.tool_search",
            "tools.web_search",
        }
        prompt = prompt_of(front_end, tokenizer)
        assert "You are a coding agent.\n\n<permissions instructions>" in prompt
        assert "web_search" not in prompt
        done = [each for each in decoded(response.text) if each["type"].endswith("item.done")]
        (item,) = (each["item"] for each in done)
        assert expected.items() <= item.items()
        output = {
            "type": f"{item['type']}_output",
            "call_id": item["call_id"],
            "output": "it is done",
        }
        body = {**AGENT, "input": [*HISTORY, item, output]}
        response = await front_end.http.post(PATH, json=body)
        last = decoded(response.text)[-1]["response"]
        assert last["output"][0]["content"][0]["text"] == SAID
        assert json.dumps(call) in prompt_of(front_end, tokenizer)


async def test_errors_name_the_clients_tool(start):
    async with start() as front_end:
        wrong = {**WEATHER, "parameters": {"type": "array"}}
        found = await error(front_end, tools=[{"type": "web_search"}, wrong])
        assert found["param"].startswith("tools[1].parameters")
        assert "tools[1].parameters" in found["message"]
        found = await error(front_end, tools=[{**WEATHER, "name": "no spaces"}])
        assert "tools[0].name" in found["message"]


async def test_tool_choice_none_prevents_calls(start, model_calls, tokenizer):
    async with start(model_calls(CALL), max_model_len=2048) as front_end, client(front_end) as api:
        found = await api.responses.create(
            model="toy", input="?", tools=[WEATHER], tool_choice="none"
        )
        assert CALL in found.output_text
        assert "weather" not in prompt_of(front_end, tokenizer)


async def test_a_tool_choice_of_an_unsupported_type_is_refused(start):
    async with start() as front_end, client(front_end) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.responses.create(
                model="toy",
                input="?",
                tools=[{"type": "web_search"}],
                tool_choice={"type": "web_search"},
            )
        assert caught.value.param == "tool_choice"


async def test_ignored_tools_are_named_in_the_body(start, model_calls):
    """Clients rarely display response headers."""
    tools = [WEATHER, {"type": "web_search"}]
    async with start(model_calls(CALL), max_model_len=2048) as front_end, client(front_end) as api:
        events, response = await streamed(api, input="?", tools=tools)
        expected = ["tools.web_search"]
        assert events[0].response.ignored_fields == response.ignored_fields == expected
        whole = await api.responses.create(model="toy", input="?", tools=tools)
        assert whole.ignored_fields == expected
        assert (await api.responses.retrieve(whole.id)).ignored_fields == expected
        ordinary = await api.responses.create(model="toy", input="?", tools=[WEATHER])
        assert not hasattr(ordinary, "ignored_fields")


async def test_ignored_tools_are_named_in_a_message(start, scripted):
    body = {
        "model": "toy",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "stream": True,
    }
    async with start(scripted(SAID)) as front_end:
        sent = (await front_end.http.post("/v1/messages", json=body)).text
        (data,) = [line for line in sent.splitlines() if '"message_start"' in line]
        message = json.loads(data.removeprefix("data: "))["message"]
        assert message["ignored_fields"] == ["tools.web_search_20250305"]
