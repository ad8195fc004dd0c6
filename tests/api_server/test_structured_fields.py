"""Request fields for structured output, and the grammar that the engine gets."""

import asyncio
import json

import pytest

from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import COMPLETION_NEUTRAL, IgnoredFields, parse
from api_server.protocol.json_schema import SchemaWork
from proto.errors import ErrorInfo, InvalidRequestError
from proto.messages.grammar import GrammarSource

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = json.dumps(SCHEMA)
USER = [{"role": "user", "content": "hello"}]


def source_of(**fields) -> GrammarSource | None:
    body = {"prompt": "x", **fields}
    ignored = IgnoredFields()
    return parse(CompletionRequest, body, COMPLETION_NEUTRAL, ignored).grammar_source(
        ignored, SchemaWork()
    )


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            TEXT,
        ),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": SCHEMA}, "json_schema", TEXT),
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
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", '["a", "\\u00e9"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_fields_become_grammar_sources(fields, kind, source):
    found = source_of(**fields)
    assert found is not None
    (name, value) = next(iter(fields.items()))
    path = f"{name}.{next(iter(value))}" if name == "structured_outputs" else name
    assert (found.kind, found.source, found.field) == (kind, source, path)


def test_unknown_fields_are_reported_and_ignored():
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
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"regex": "x" * 1_000_000}},
            "structured_outputs.regex",
            "1000000 bytes",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        (
            {"structured_outputs": {"choice": ["aaaa"] * 16_000}},
            "structured_outputs.choice",
            "at most 65536",
        ),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "string"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "whitespace"),
        ({"structured_outputs": "json"}, "structured_outputs", "structured_outputs"),
        ({"response_format": {"type": "xml"}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        (
            {"guided_json": {"properties": {"a": {"type": "strin"}}}},
            "guided_json",
            "guided_json: at #/properties/a: type must be one of null, ",
        ),
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
        ({"guided_json": '{"minimum": NaN}'}, "guided_json", "NaN is no JSON number"),
    ],
)
def test_invalid_requests_are_refused(fields, param, words):
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


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": UNIQUE, "strict": True}}
FORMAT = {"type": "json_schema", "schema": UNIQUE}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": UNIQUE}}, "response_format"),
        (CHAT, {"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        (CHAT, {"guided_json": UNIQUE}, "guided_json"),
        (CHAT, {"json_schema": UNIQUE}, "json_schema"),
        (
            CHAT,
            {"tools": [CHAT_TOOL], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (RESPONSES, {"text": {"format": FORMAT | {"name": "x"}}}, "text.format"),
        (RESPONSES, {"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        (
            RESPONSES,
            {"tools": [CHAT_TOOL["function"] | {"type": "function"}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config.format"),
        (MESSAGES, {"output_format": FORMAT}, "output_format"),
        (
            MESSAGES,
            {"tools": [{"name": "f", "input_schema": UNIQUE}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
    ],
)
async def test_headers_and_errors_name_the_field_of_the_api(start, path, fields, field):
    """The front end finds errors, or the engine before and after the response has begun."""
    conversation = {"input": "x"} if path == RESPONSES else {"messages": USER}
    body = {"model": "toy", "max_tokens": 20, **conversation, **fields}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    async with start(accepts=True, max_model_len=4096) as front_end:
        asking = asyncio.create_task(front_end.http.post(path, json=body))
        request = await front_end.engine.requests.get()
        source = request.grammar
        assert source is not None
        front_end.engine.emit(request, [5])
        refusal = ErrorInfo("invalid_request", f"{source.field}: too large", source.field)
        front_end.engine.refuse(request, refusal)
        response = await asking
        assert response.status_code == 400
        found = response.json()["error"]
        assert found["message"] == f"{field}: too large"
        assert found.get("param", field) == field

        wrong = json.loads(json.dumps(body).replace('"uniqueItems": true', '"items": 3'))
        found = (await front_end.http.post(path, json=wrong)).json()["error"]
        assert found["message"].startswith(f"{field}: ")
        assert found.get("param", field) == field
        nested = '"properties": {"a/b\\ud800": {"type": "no"}}'
        wrong = json.dumps(body).replace('"uniqueItems": true', nested)
        response = await front_end.http.post(
            path, content=wrong, headers={"content-type": "application/json"}
        )
        message = response.json()["error"]["message"]
        assert "at #/" in message
        assert "/properties/a~1b\\ud800: type must be one of" in message

        async with front_end.http.stream("POST", path, json=body | {"stream": True}) as response:
            request = await front_end.engine.requests.get()
            assert response.headers["x-tokend-ignored"] == f"{field}.uniqueItems"
            front_end.engine.emit(request, [5])
            front_end.engine.refuse(request, refusal)
            text = (await response.aread()).decode()
        assert f"{field}: too large" in text


BIG = 2**53 + 1
BIG_TOOL = {"name": "f", "parameters": {"properties": {"a": {"const": BIG}}}, "strict": True}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/completions",
            {"prompt": "x", "guided_json": {"items": {"enum": [BIG]}}},
            "guided_json",
        ),
        (
            CHAT,
            {"messages": USER, "tools": [{"type": "function", "function": BIG_TOOL}]},
            "tools[0].function.parameters",
        ),
        (
            RESPONSES,
            {"input": "x", "text": {"format": FORMAT | {"name": "x", "schema": {"const": BIG}}}},
            "text.format",
        ),
        (
            MESSAGES,
            {"messages": USER, "output_format": FORMAT | {"schema": {"const": BIG}}},
            "output_format",
        ),
    ],
)
async def test_literals_that_the_compiler_would_round_are_refused(start, path, fields, named):
    body = {"model": "toy", "max_tokens": 20, **fields}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    async with start(accepts=True, max_model_len=4096) as front_end:
        response = await front_end.http.post(path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"{BIG} is not supported" in message
    assert named in message or response.json()["error"].get("param") == named


async def test_a_grammar_reaches_the_engine_and_its_error_is_a_400(start, scripted):
    body = {"prompt": "hello", "structured_outputs": {"regex": "a+"}}
    async with start(scripted("!")) as front_end:
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
