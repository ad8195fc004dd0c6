"""/v1/responses: encoding of answers, and translation of tools and input items."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from api_server.generation.encoders.base import ResponseOptions
from api_server.generation.encoders.responses.encoder import ResponsesEncoder
from api_server.generation.encoders.responses.stored import History, ResponseRecord, StoredResponses
from api_server.generation.request_stream import Delta, Usage
from api_server.parsers.output import (
    ChoiceParser,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.responses.input import ItemTranslator, with_id
from api_server.protocol.responses.request import ResponsesTranslation, parse_request
from api_server.protocol.responses.tools import ResponseTools
from proto.errors import InvalidRequestError
from tests.api_server.responses_client import decoded

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "on this machine",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
}


class Parts:
    """A parser whose parts are given: the text is the number of the next parts."""

    def __init__(self, *steps: Sequence[OutputPart]) -> None:
        self._steps = list(steps)

    def parse_delta(self, text: str) -> Sequence[OutputPart]:
        return [part for _ in range(len(text)) for part in self._steps.pop(0)]

    def parse_end(self, *, is_cut: bool = False) -> Sequence[OutputPart]:
        return [part for step in self._steps for part in step]


def translated(request) -> ResponsesTranslation:
    return ResponsesTranslation(request, {}, [], IgnoredFields(), template_names=frozenset())


def chat_messages(items: list[dict], tools: ResponseTools) -> list[dict]:
    translator = ItemTranslator(None, tools, IgnoredFields())
    items = [with_id(item) for item in items]
    translator.append_items(items, {})
    return translator.build_messages()


def play(steps: Sequence[Sequence[OutputPart]], finish: str = "stop", **fields):
    """Return the events of a stream with these parts, one per step, and the whole response."""
    asked, _ = parse_request(
        {"input": "x", "tools": [WEATHER, PATCH, FILES], **fields}, IgnoredFields()
    )
    saved = []

    class Store(StoredResponses):
        def store_response(self, owner, response, history) -> None:
            saved.append(response)

    record = ResponseRecord(Store(0, 0, lambda: 0.0), (0, ""), History([], 2))

    def start(*steps: Sequence[OutputPart]) -> ResponsesEncoder:
        options = ResponseOptions("resp_1", 1, "toy", CompletionRequest(prompt=""), None, None)
        translation = translated(asked)
        return ResponsesEncoder(options, asked, ChoiceParser(Parts(*steps)), translation, record)

    usage, number = Usage(5, len(steps), 2, 2), len(steps)
    streamed = start(*steps)
    text = streamed.encode_start()
    for step in range(number):
        text += streamed.encode_delta(Delta(0, "x", [step], [], step + 1))
    text += streamed.encode_delta(Delta(0, "", [], [], number, finish)) + streamed.encode_end(usage)
    events = decoded(text)
    delta = Delta(0, "x" * number, list(range(number)), [], number, finish)
    whole = asyncio.run(start(*steps).encode_body([delta], usage))
    assert [saved[0], saved[1]] == [events[-1]["response"], whole]
    return events, whole


def names(events) -> list[str]:
    return [each["type"].removeprefix("response.") for each in events[2:-1]]


def bare(item: dict) -> dict:
    return {key: value for key, value in item.items() if key != "id"}


CALL = [
    [ToolCallStart(0, "call_1", "weather")],
    [ToolCallArguments(0, '{"city": ')],
    [ToolCallArguments(0, '"Paris"}')],
]


def test_reasoning_text_and_a_call():
    events, whole = play(
        [[ReasoningText("Hm")], [ReasoningText(". ")], [ContentText("Look.")], *CALL]
    )
    assert names(events) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    response = events[-1]["response"]
    thought, message, call = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm. "}]
    assert thought["summary"] == []
    assert message["content"][0]["text"] == "Look."
    assert bare(call) == {
        "type": "function_call",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city": "Paris"}',
        "status": "completed",
    }
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert [bare(item) for item in whole["output"]] == [bare(each) for each in response["output"]]
    places = [each["output_index"] for each in events if "output_index" in each]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}


def test_the_summary_contains_the_reasoning():
    events, _ = play([[ReasoningText("Hm")], [ContentText("Yes")]], reasoning={"summary": "auto"})
    assert names(events)[:10] == [
        "output_item.added",
        "content_part.added",
        "reasoning_summary_part.added",
        "reasoning_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    thought = events[-1]["response"]["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm"}]


def test_calls_of_different_types():
    begin = [
        ToolCallStart(1, "call_2", "apply_patch"),
        ToolCallArguments(1, '{"input": "*** Begin'),
    ]
    more = [ToolCallArguments(1, '\\nEnd"}'), ToolCallStart(2, "call_3", "files__read")]
    events, whole = play([*CALL, begin, more, [ToolCallArguments(2, "{}")]])
    _, patch, read = events[-1]["response"]["output"]
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\nEnd",
    )
    assert (read["name"], read["namespace"], read["arguments"]) == ("read", "files", "{}")
    assert names(events).count("custom_tool_call_input.delta") == 1
    assert [bare(item) for item in whole["output"]] == [
        bare(item) for item in events[-1]["response"]["output"]
    ]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "a"}', "a"),
        ('{"input": 5}', "5"),
        ('{"other": "a"}', '{"other": "a"}'),
        ('{"inp', '{"inp'),
        ("[1]", "[1]"),
    ],
)
def test_the_input_of_a_custom_tool(arguments, given):
    steps = [[ToolCallStart(0, "c", "apply_patch")], [ToolCallArguments(0, arguments)]]
    events, _ = play(steps)
    assert events[-1]["response"]["output"][0]["input"] == given


def test_a_truncated_call_is_incomplete():
    events, whole = play(CALL[:2], finish="length")
    assert events[-1]["type"] == "response.incomplete"
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["status"] == "incomplete"


def test_tools_become_functions():
    ignored = IgnoredFields()
    tools = ResponseTools([WEATHER, PATCH, FILES, {"type": "web_search"}], "auto", ignored)
    fields = tools.chat_fields(True)
    assert [each["function"]["name"] for each in fields["tools"]] == [
        "weather",
        "apply_patch",
        "files__read",
    ]
    assert fields["tools"][0]["function"] == {
        key: value for key, value in WEATHER.items() if key != "type"
    }
    assert fields["tools"][1]["function"]["parameters"]["required"] == ["input"]
    assert fields["tool_choice"] == "auto"
    assert str(ignored) == "tools.format, tools.web_search"


def test_names_of_tools_in_namespaces():
    def offered(namespace: str, name: str) -> str:
        tool = {"type": "namespace", "name": namespace, "tools": [{**WEATHER, "name": name}]}
        tools = ResponseTools([{"type": "web_search"}, tool], "auto", IgnoredFields())
        (function,) = tools.chat_fields(True)["tools"]
        written = function["function"]["name"]
        found = tools.client_tool(written)
        assert (found.namespace, found.name) == (namespace, name)
        assert tools.paths == ["tools[1].tools[0]"]
        return written

    assert offered("mcp__github__", "read") == "mcp__github__read"
    long = {offered("n" * 60, "read"), offered("n" * 60, "write"), offered("n" * 61, "read")}
    assert len(long) == 3
    assert {len(each) for each in long} == {64}


def test_chat_errors_are_translated_to_this_api():
    request, _ = parse_request(
        {"input": "x", "tools": [{"type": "web_search"}, WEATHER, FILES]}, IgnoredFields()
    )
    translation = translated(request)
    for theirs, param, ours, place in (
        (
            "max_completion_tokens must be",
            "max_completion_tokens",
            "max_output_tokens must be",
            "max_output_tokens",
        ),
        ("messages[3].content: no", "messages", "input.content: no", "input"),
        ("at most 9 messages", "messages", "at most 9 messages", "input"),
        (
            "tools[0].function.name: no",
            "tools[0].function.name",
            "tools[1].name: no",
            "tools[1].name",
        ),
        ("tools[1].function.parameters", "tools", "tools[2].tools[0].parameters", "tools"),
        ("tools[7] is odd", None, "tools is odd", None),
    ):
        found = translation.translate_error(InvalidRequestError(theirs, param))
        assert (found.message, found.param) == (ours, place)


def test_without_functions_the_chat_has_no_tools():
    tools = ResponseTools([{"type": "web_search"}], "auto", IgnoredFields())
    assert tools.chat_fields(False) == {}


def test_tool_choice():
    def chosen(choice):
        return ResponseTools([WEATHER, PATCH, FILES], choice, IgnoredFields()).chat_fields(True)

    for kind, name in (("function", "weather"), ("custom", "apply_patch")):
        assert chosen({"type": kind, "name": name})["tool_choice"] == {
            "type": "function",
            "function": {"name": name},
        }
    found = chosen(
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
        }
    )
    assert found["tool_choice"] == "required"
    assert [each["function"]["name"] for each in found["tools"]] == ["weather"]
    for wrong in (
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "mode": "some", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": [5]},
        {"type": "function"},
        {"type": "mcp", "server_label": "x"},
        {},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            chosen(wrong)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "tools",
    [
        [WEATHER, WEATHER],
        [{**WEATHER, "name": 5}],
        [{**WEATHER, "defer_loading": True}],
        [{"type": "namespace", "name": "x"}],
        [{"type": "namespace", "name": "x", "tools": [5]}],
        [{**WEATHER, "name": f"t{number}"} for number in range(129)],
    ],
)
def test_refused_tools(tools):
    with pytest.raises(InvalidRequestError) as caught:
        ResponseTools(tools, "auto", IgnoredFields())
    assert caught.value.param.startswith("tools")


def test_an_assistant_turn_is_one_message():
    tools = ResponseTools([WEATHER, PATCH, FILES], "auto", IgnoredFields())
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "2",
            "name": "read",
            "namespace": "files",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "1", "output": "21"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}],
        },
        {"type": "custom_tool_call", "call_id": "3", "name": "apply_patch", "input": "p\n"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "done"},
        {"role": "user", "content": "thanks"},
    ]

    def call(number: str, name: str, arguments: object) -> dict:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": number, "type": "function", "function": function}

    assert chat_messages(items, tools) == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "A",
            "tool_calls": [call("1", "weather", {}), call("2", "files__read", {})],
        },
        {"role": "tool", "tool_call_id": "1", "content": "21"},
        {"role": "tool", "tool_call_id": "2", "content": "x\ny"},
        {"role": "assistant", "tool_calls": [call("3", "apply_patch", {"input": "p\n"})]},
        {"role": "tool", "tool_call_id": "3", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]


def test_output_items_can_be_sent_back():
    """Output items that are sent back become the original message."""
    _, whole = play([[ContentText("Look.")], *CALL])
    tools = ResponseTools([WEATHER], "auto", IgnoredFields())
    (message,) = chat_messages(whole["output"], tools)
    assert message["content"] == "Look."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
