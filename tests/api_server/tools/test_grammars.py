"""Texts accepted by a format's grammar are parsed as calls with valid arguments."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from api_server.parsers.tool_calls import ModelToolCalls
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.json_schema import SchemaWork
from api_server.protocol.tools import ToolFields
from api_server.text.chat_template import TemplateFacts
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import mask_words
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource
from tests.api_server.tools.parsing import joined
from tests.fakes.toy_vocabulary import EOS, SIZE, SPECIAL, text_of, write_toy_tokenizer

FIND = {
    "type": "object",
    "description": "What to look for.",
    "properties": {
        "text": {"type": "string", "maxLength": 5},
        "limit": {"type": "integer", "minimum": 1, "maximum": 20},
        "exact": {"type": "boolean"},
        "kind": {"$ref": "#/$defs/kind"},
        "where": {
            "type": "object",
            "properties": {"path": {"enum": ["a", 'b"c']}},
            "required": ["path"],
        },
    },
    "required": ["text", "exact"],
    "$defs": {"kind": {"enum": ["file", "line"]}},
}
TOOLS = [
    {"name": "find", "parameters": FIND, "strict": True},
    {"name": "now"},
    {
        "name": "book-it",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 99}},
        },
    },
]
SCHEMAS = {tool["name"]: tool.get("parameters", {"type": "object"}) for tool in TOOLS}


class NoTokens:
    def special_id(self, text: str) -> int | None:
        return None


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    folder: Path = tmp_path_factory.mktemp("toy")
    write_toy_tokenizer(folder)
    return LLGuidanceBackend(folder / "tokenizer.json", SIZE, (EOS,))


def grammar(name, own=None, tools=TOOLS, **fields) -> GrammarSource | None:
    body = {"tools": [{"type": "function", "function": tool} for tool in tools], **fields}
    asked = ToolFields.model_validate(body, context=IgnoredFields())
    caller = ModelToolCalls(name, "{{ tools }}", TemplateFacts(frozenset({"tools"})), NoTokens())
    return caller.plan(asked, own, IgnoredFields(), SchemaWork()).grammar


def walk(backend, source, seed, first="") -> str:
    """Return `first` followed by random allowed tokens, ended as soon as possible."""
    matcher = backend.compile(source).copy()
    draw, token_ids = random.Random(seed), []
    if first:
        matcher.consume(backend.tokens_of(first.encode()))
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    for _ in range(8000):
        backend.fill_masks([matcher], masks)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits).tolist()
        token_id = EOS if EOS in choices else draw.choice(choices)
        if token_id == EOS:
            return first + text_of(token_ids)
        token_ids.append(token_id)
        matcher.consume([token_id])
    raise AssertionError(f"it does not end: {text_of(token_ids)[:500]}")


def check(name, text, schemas=SCHEMAS) -> list[str]:
    """Return the names of the calls in a text, which must contain nothing else."""
    parser = TOOL_CALL_FORMATS[name].new_parser(SCHEMAS)
    content, calls = joined([*parser.parse_delta(text), *parser.parse_end()])
    assert content == "", text
    assert calls, text
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[called])
    return [called for called, _ in calls]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_tool_choice_required(backend, name):
    source = grammar(name, tool_choice="required")
    called = [check(name, walk(backend, source, seed)) for seed in range(20)]
    assert {each for calls in called for each in calls} == set(SCHEMAS)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_tool_choice_by_name(backend, name):
    choice = {"type": "function", "function": {"name": "find"}}
    source = grammar(name, tool_choice=choice)
    assert source.field == "tools[0].function.parameters"
    for seed in range(20):
        assert check(name, walk(backend, source, seed)) == ["find"]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}]
)
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_a_tool_without_parameters_gets_none(backend, name, parameters):
    tool = {"name": "now"} if parameters is None else {"name": "now", "parameters": parameters}
    source = grammar(name, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    for seed in range(3):
        text = walk(backend, source, seed)
        parser = TOOL_CALL_FORMATS[name].new_parser({"now": {}})
        _, ((called, arguments),) = joined([*parser.parse_delta(text), *parser.parse_end()])
        assert (called, json.loads(arguments)) == ("now", {}), text


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_consecutive_calls(backend, name):
    """Several calls are allowed unless parallel calls are off; only of declared tools."""
    several = [("now", "{}"), ("book-it", '{"n": 5}'), ("now", "{}")]
    render_calls = TOOL_CALL_FORMATS[name].render_calls
    for fields, calls, allowed in (
        ({}, several, True),
        ({}, several * 6, False),
        ({"parallel_tool_calls": False}, several, False),
        ({"parallel_tool_calls": False}, several[:1], True),
        ({}, [("print", "{}")], False),
        ({}, [("book-it", '{"n": "five"}')], False),
    ):
        source = grammar(name, tool_choice="required", **fields)
        assert accepts(backend, source, render_calls(calls)) == allowed, calls


def accepts(backend, source, text) -> bool:
    """Check that every token and the end are allowed by the masks."""
    matcher = backend.compile(source).copy()
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    for token_id in [*backend.tokens_of(text.encode()), EOS]:
        backend.fill_masks([matcher], masks)
        if not int(masks[0][token_id >> 5]) >> (token_id & 31) & 1:
            return False
        if token_id != EOS:
            matcher.consume([token_id])
    return True


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_auto_with_a_strict_tool(backend, name):
    """Free text until a call begins; constrained like `required` from there."""
    assert grammar(name, tools=TOOLS[1:]) is None
    source = grammar(name)
    render_calls = TOOL_CALL_FORMATS[name].render_calls
    for text in ("", "It is cold.", "Well, 1 < 2 [see] {this}. <b>", "\n\nSo"):
        assert accepts(backend, source, text) or source.trigger
    good, bad = [("find", '{"text": "a", "exact": true}')], [("find", '{"text": 5}')]
    if name == "pythonic":
        assert accepts(backend, source, '[find(text="a", exact=True)]')
    else:
        assert accepts(backend, source, render_calls(good))
    assert not accepts(backend, source, render_calls(bad))
    assert not accepts(backend, source, render_calls([("print", "{}")]))
    assert accepts(backend, source, render_calls([("now", "{}")]))


def test_a_format_that_needs_schemas_takes_every_keyword(backend):
    """Of tools that are not strict too: `uniqueItems` is left out, as for strict ones."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}},
    }
    for tools, fields in (
        ([{"name": "f", "parameters": parameters}], {"parallel_tool_calls": False}),
        ([*TOOLS[:1], {"name": "f", "parameters": parameters}], {}),
    ):
        source = grammar("pythonic", tools=tools, **fields)
        assert accepts(backend, source, "[f(a=[1, 2])]")


@pytest.mark.parametrize("name", [name for name, each in TOOL_CALL_FORMATS.items() if each.trigger])
def test_the_grammar_begins_at_the_call_marker(backend, name):
    source = grammar(name, tools=[tool | {"strict": True} for tool in TOOLS])
    text = "I will look.\n" + source.trigger
    for seed in range(10):
        found = walk(backend, source, seed, first=text)
        parser = TOOL_CALL_FORMATS[name].new_parser(SCHEMAS)
        content, calls = joined([*parser.parse_delta(found), *parser.parse_end()])
        assert content == "I will look."
        assert calls


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_tools_combined_with_a_response_schema(backend, name):
    own = GrammarSource(
        "json_schema",
        '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],'
        ' "additionalProperties": false}',
        field="response_format",
    )
    wrongs = [
        (
            {"tool_choice": "required"},
            GrammarSource("regex", "a+", field="structured_outputs"),
        ),
        ({}, GrammarSource("regex", "a+", field="structured_outputs")),
    ]
    if name in ("llama3_json", "pythonic"):
        wrongs.append(({}, own))
    else:
        source = grammar(name, own)
        assert accepts(backend, source, '{"x": 5}')
        assert accepts(backend, source, TOOL_CALL_FORMATS[name].render_calls([("now", "{}")]))
        assert not accepts(backend, source, "text")
    for fields, wrong in wrongs:
        with pytest.raises(InvalidRequestError) as caught:
            grammar(name, wrong, **fields)
        assert caught.value.param == wrong.field
    assert grammar(name, own, tool_choice="none") is own
    assert grammar(name, own, tool_choice="required") == grammar(name, tool_choice="required")


class MarkTokens:
    def special_id(self, text: str) -> int | None:
        return {"[TOOL_CALLS]": 5, "<|python_tag|>": 6}.get(text)


TAGGED = ("qwen3_coder", "glm45")
STRING = {"type": "string"}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
VALUES = [
    # schema of a parameter, values that a call may have, values that it may not have
    ({}, ["a", 5, None, {"b": [1]}], []),
    (STRING, ["", "a\n\n", '{"b', "\n", "null", "<tool_call>"], []),
    ({**STRING, "maxLength": 2}, ["", "é😀"], ["abc"]),
    ({**STRING, "pattern": "^[a-z]+$"}, ["abc"], ["ab1", ""]),
    ({**STRING, "pattern": "a/|b"}, ["xa/x", "b"], ["a"]),
    ({**STRING, "format": "uuid"}, ["0f" * 4 + "-aaaa-bbbb-cccc-" + "0f" * 6], ["0f"]),
    ({**STRING, "format": "date"}, ["2026-02-28"], ["2026-02-30", "x"]),
    ({**STRING, "format": "date-time"}, ["2026-02-28T10:00:00Z"], ["2026-02-28"]),
    ({"enum": ["a", "b c", 5, None]}, ["a", "b c", 5, None], ["b", 6]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"enum": ["on", "truth", True]}, ["on", "truth", True], [False, "off"]),
    ({"anyOf": [STRING, {"const": False}]}, ["on", False], [True]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc"]),
    ({"anyOf": [STRING, INTEGERS]}, ["x", "x[", [1, 2]], [["a"], "[x"]),
    ({"anyOf": [STRING, {"type": "number", "maximum": 9}]}, ["x", 5, -1.5], [10, "5 x"]),
    ({"$ref": "#/$defs/word"}, ["ab"], ["abc"]),
    ({"oneOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]}, ["ab", None], ["abc"]),
    ({"type": "integer", "maximum": 9}, [5], [10, "a"]),
    ({"type": "object", "required": ["b"]}, [{"b": 1}], [{}, "b"]),
]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_values_without_quotes(backend, name, schema, good, bad):
    """What the grammar accepts is read as the value that was written, and conforms."""
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"word": {**STRING, "maxLength": 2}},
    }
    tools = [{"name": "find", "parameters": parameters}]
    source = grammar(name, tools=tools, tool_choice="required")
    call_format = TOOL_CALL_FORMATS[name]
    for value in [*good, *bad]:
        text = call_format.render_calls([("find", json.dumps({"a": value}))])
        assert accepts(backend, source, text) == (value in good), value
        if value in good:
            parser = call_format.new_parser({"find": parameters})
            _, calls = joined([*parser.parse_delta(text), *parser.parse_end()])
            (read,) = json.loads(calls[0][1]).values()
            assert read == (None if value == "null" and not schema else value)
    end = call_format.parameter.end.strip()
    text = call_format.render_calls([("find", json.dumps({"a": f"a{end}"}))])
    assert not accepts(backend, source, text)
    is_short = {"maxLength", "format", "enum", "const", "$ref", "maximum"} & schema.keys()
    for seed in range(5 if is_short else 0):  # a random text would never end
        check(name, walk(backend, source, seed), {"find": parameters})


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({**STRING, "pattern": "^a|b$"}, "pattern"),
        ({**STRING, "format": "hostname"}, "format"),
        ({"allOf": [{**STRING, "minLength": 1}, {**STRING, "maxLength": 2}]}, "allOf"),
        ({"enum": ["</parameter></arg_value>"]}, "cannot write"),
        ({"enum": ["5", 5]}, "cannot tell"),
    ],
)
def test_values_that_cannot_be_forced_are_refused(name, schema, word):
    tools = [{"name": "find", "parameters": {"type": "object", "properties": {"a": schema}}}]
    with pytest.raises(InvalidRequestError, match=word) as caught:
        grammar(name, tools=tools, tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"
    assert grammar(name, tools=tools) is None


@pytest.mark.parametrize("name", TAGGED)
def test_a_tool_that_is_not_strict_has_any_parameters(backend, name):
    tools = [{"name": "f", "parameters": {"patternProperties": {"a": {"format": "time"}}}}]
    source = grammar(name, tools=tools, parallel_tool_calls=False)
    for arguments in ('{"a": "x\\ny", "b-2": 5, "a": ""}', "{}"):
        text = TOOL_CALL_FORMATS[name].render_calls([("f", arguments)])
        assert accepts(backend, source, text.removeprefix(source.trigger))


def test_a_parameter_that_cannot_be_named_is_refused():
    tools = [{"name": "find", "parameters": {"type": "object", "properties": {"a>b": STRING}}}]
    with pytest.raises(InvalidRequestError, match="a>b"):
        grammar("qwen3_coder", tools=tools, tool_choice="required")
    assert grammar("glm45", tools=tools, tool_choice="required")


class OnlySpecialTokens:
    def special_id(self, text: str) -> int | None:
        return SPECIAL


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "glm45",
            ["", "find\n", "text", "\n", "</a\n>", "\n", "exact", "", "true", "", ""],
        ),
        (
            "deepseek_v3",
            ["", "", "function", 'find\n```json\n{"text": "a", "exact": true}\n```', "", ""],
        ),
        ("kimi_k2", ["", "", "functions.find:7", '{"text": "a", "exact": true}', "", ""]),
        ("granite", ["", '[{"name": "find", "arguments": {"text": "a", "exact": true}}]']),
        ("hunyuan_a13b", ["", '[{"name": "find", "arguments": {"text": "a", "exact": true}}]', ""]),
    ],
)
def test_grammars_of_markers_that_are_special_tokens(backend, name, call):
    """Text between markers, of which each is a token."""
    body = {
        "tools": [{"type": "function", "function": tool} for tool in TOOLS],
        "tool_choice": {"type": "function", "function": {"name": "find"}},
    }
    asked = ToolFields.model_validate(body, context=IgnoredFields())
    facts = TemplateFacts(frozenset({"tools"}))
    caller = ModelToolCalls(name, "", facts, OnlySpecialTokens())
    plan = caller.plan(asked, None, IgnoredFields(), SchemaWork())
    first, *texts = [backend.tokens_of(text.encode()) for text in call]
    token_ids = [*first]
    for text in texts:
        token_ids += [SPECIAL, *text]
    matcher = backend.compile(plan.grammar).copy()
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    for token_id in [*token_ids, EOS]:
        backend.fill_masks([matcher], masks)
        assert int(masks[0][token_id >> 5]) >> (token_id & 31) & 1, text_of(token_ids)
        if token_id != EOS:
            matcher.consume([token_id])


def test_call_markers_that_are_special_tokens():
    body = {
        "tools": [{"type": "function", "function": {"name": "now", "strict": True}}],
        "parallel_tool_calls": False,
    }
    asked = ToolFields.model_validate(body, context=IgnoredFields())
    facts = TemplateFacts(frozenset({"tools"}))
    plan = ModelToolCalls("mistral", "", facts, MarkTokens()).plan(
        asked, None, IgnoredFields(), SchemaWork()
    )
    assert plan.markers == {5: "[TOOL_CALLS]"}
    assert plan.grammar.trigger_token_id == 5
    assert "<[5]>" in plan.grammar.source
    plan = ModelToolCalls("llama3_json", "", facts, MarkTokens()).plan(
        asked, None, IgnoredFields(), SchemaWork()
    )
    assert plan.markers == {6: "<|python_tag|>"}
    assert plan.grammar.trigger_token_id is None
    assert "<[6]>" in plan.grammar.source


def test_a_schema_without_a_python_equivalent():
    tools = [{"name": "a", "parameters": {"anyOf": [{"required": ["b"]}]}}]
    assert grammar("hermes", tools=tools, tool_choice="required") is not None
    with pytest.raises(InvalidRequestError) as caught:
        grammar("pythonic", tools=tools, tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {}}, "required": [["a"]]},
        {"properties": {"a": {"type": "object", "properties": ["b"]}}},
        {"properties": {"a": {"type": "object", "properties": {"b": {}}, "required": None}}},
    ],
)
def test_an_invalid_schema_is_a_client_error(backend, name, schema):
    tools = [{"name": "find", "parameters": {"type": "object", **schema}, "strict": True}]

    def compile_it():
        source = grammar(name, tools=tools)
        assert source is not None
        backend.compile(source)

    with pytest.raises(InvalidRequestError, match=r"properties|required"):
        compile_it()
