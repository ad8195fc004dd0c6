"""Tools with the packaged model, whose template has none: calls are prompted for and valid."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.daemon import Daemon

pytestmark = pytest.mark.suite("daemons")

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["words", "where"],
    "$defs": {
        "place": {"type": "object", "properties": {"path": {"type": "string", "maxLength": 30}}}
    },
}
SCHEMAS = {"get_weather": WEATHER, "search": SEARCH}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use a tool."}]


def chat(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 600} | fields
    response = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def check(calls: list[Any]) -> None:
    for call in calls:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


def test_tool_choice_required(daemon: Daemon) -> None:
    choice = chat(daemon, tool_choice="required", parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1
    check(choice["message"]["tool_calls"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_tool_choice_by_name(daemon: Daemon, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    choice = chat(daemon, tool_choice=named)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name
    check([call])


def test_parallel_tool_calls(daemon: Daemon) -> None:
    """As many calls as the model makes within its tokens."""
    choice = chat(daemon, tool_choice="required", temperature=1, seed=5)
    check(choice["message"]["tool_calls"])
    if choice["finish_reason"] == "tool_calls":
        assert choice["message"]["content"] is None


def test_strict_tools_enforce_their_schemas(daemon: Daemon) -> None:
    """Calls are valid by their schema, although no call is required."""
    strict = [each | {"function": each["function"] | {"strict": True}} for each in TOOLS]
    opened = {"role": "assistant", "content": "I use a tool: <tool_call>\n"}
    for seed in range(2):
        fields = {"temperature": 1, "seed": seed, "tools": strict, "max_tokens": 200}
        check(chat(daemon, **fields)["message"].get("tool_calls", []))
        choice = chat(daemon, **fields, messages=[*MESSAGES, opened, *MESSAGES])
        check(choice["message"].get("tool_calls", []))


def test_a_conversation_with_the_public_client(daemon: Daemon) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="x", timeout=120) as client:
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        with client.chat.completions.stream(
            model="smollm2-135m-instruct",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=named,
            temperature=0,
            max_tokens=300,
        ) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
        assert choice.finish_reason == "tool_calls"
        whole = chat(daemon, tool_choice=named, max_tokens=300)["message"]["tool_calls"]
        (call,) = choice.message.tool_calls or []
        assert call.function.arguments == whole[0]["function"]["arguments"]
        answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "3 degrees, rain"}
        last = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[*MESSAGES, choice.message, answer],
            tools=TOOLS,
            tool_choice="none",
            temperature=0,
            max_tokens=40,
        )
        assert last.choices[0].message.content
