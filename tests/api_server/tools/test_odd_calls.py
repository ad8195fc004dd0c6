"""Calls of odd forms, and tools with odd schemas: parsers return calls or content, never raise."""

import json

import pytest

from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from tests.api_server.tools.parsing import joined

ODD = (None, True, 5, 2.5, "text", "", [], ["text", ["text"]], [{}], [None, 1], {}, {"text": 1})
"""Values of keys of a schema, and of members of a call, that are something else there."""
ARGUMENTS = {"text": "a", "limit": 3}
KEYS = ("required", "properties", "type", "$defs", "additionalProperties", "anyOf")


def read(name: str, schema: object, text: str):
    parser = TOOL_CALL_FORMATS[name].new_parser({"find": schema})
    return joined([*parser.parse_delta(text), *parser.parse_end()])


def written(name: str, arguments: object = ARGUMENTS) -> str:
    return TOOL_CALL_FORMATS[name].render_calls([("find", json.dumps(arguments))])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_a_good_call_of_a_tool_with_an_odd_schema(name, key):
    for value in ODD:
        described = {"properties": {"text": {"type": "string"}, "limit": {"type": "integer"}}}
        _, calls = read(name, described | {key: value}, written(name))
        assert [called for called, _ in calls] == ["find"], value
        read(name, described | {key: value}, written(name)[: len(written(name)) * 3 // 4])


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_a_call_whose_name_or_arguments_are_something_else(name):
    layout = TOOL_CALL_FORMATS[name].layout
    for value in ODD:
        for member in ("name", "arguments", "parameters"):
            call = json.dumps({"name": "find", "arguments": ARGUMENTS, member: value})
            for tool in ("find", "call_abc123", "functions.call_1:0", "9"):
                read(name, {}, layout.begin + layout.call(tool, call, 0) + layout.end)
            read(name, {}, layout.begin + call + layout.end)
