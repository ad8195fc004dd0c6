"""The forms in which clients ask for structured output, and what the engine gets of each."""

import json

import pytest

from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import COMPLETION_NEUTRAL, IgnoredFields, parse
from api_server.protocol.structured import ANY_OBJECT
from proto.errors import InvalidRequestError
from proto.grammar import GrammarSource

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = json.dumps(SCHEMA)


def source_of(**fields) -> GrammarSource | None:
    body = {"prompt": "x", **fields}
    ignored = IgnoredFields()
    return parse(CompletionRequest, body, COMPLETION_NEUTRAL, ignored).grammar_source(ignored)


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            TEXT,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", '["a", "\\u00e9"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_forms(fields, kind, source):
    found = source_of(**fields)
    assert found is not None
    assert (found.kind, found.source, found.field) == (kind, source, next(iter(fields)))


def test_what_nobody_defines_is_ignored_by_name():
    ignored = IgnoredFields()
    body = {
        "prompt": "x",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"foo": 1}, "fuu": 2},
        },
    }
    parse(CompletionRequest, body, COMPLETION_NEUTRAL, ignored)
    assert str(ignored) == "response_format.json_schema.fuu"
    body = {"prompt": "x", "structured_outputs": {"regex": "a", "fii": 1, "disable_fallback": True}}
    parse(CompletionRequest, body, COMPLETION_NEUTRAL, ignored)
    assert str(ignored).endswith(", structured_outputs.fii")


def test_free_text_and_compact_json():
    assert source_of() is None
    assert source_of(response_format={"type": "text"}, structured_outputs=None) is None
    found = source_of(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert found is not None
    assert found.compact


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs", "object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "x" * 1_000_000}}, "structured_outputs", "1000000 bytes"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {"choice": ["a"] * 70_000}}, "structured_outputs", "65536 bytes"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "string"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace"),
        ({"structured_outputs": "json"}, "structured_outputs", "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
            "response_format",
            "name",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not available"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "does not go with",
        ),
        ({"guided_json": {"x-guidance": {}}}, "guided_json", "x-guidance"),
        ({"guided_json": {"minimum": float("inf")}}, "guided_json", "number"),
    ],
)
def test_what_is_refused(fields, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        source_of(**fields)
    assert caught.value.param == param


def test_a_schema_a_thousand_levels_deep_is_refused():
    schema: dict = {}
    for _ in range(900):
        schema = {"items": schema}
    for deep in (schema, '{"items":' * 1000 + "{}" + "}" * 1000):
        with pytest.raises(InvalidRequestError, match="nested"):
            source_of(structured_outputs={"json": deep})


async def test_a_grammar_reaches_the_engine_and_its_refusal_is_a_400(start, say):
    body = {"prompt": "hello", "structured_outputs": {"regex": "a+"}}
    async with start(say("!")) as front_end:
        response = await front_end.complete(**body)
        assert response.status_code == 200, response.text
        for field in (
            {"ignore_eos": True},
            {"min_tokens": 1},
            {"use_beam_search": True, "n": 2},
            {"allowed_token_ids": [1]},
            {"bad_words": ["fox"]},
        ):
            response = await front_end.http.post("/v1/completions", json=body | field)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(field))
