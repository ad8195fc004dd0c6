"""JSON schemas rewritten for the grammar compiler, tested by what the grammar accepts."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from api_server.protocol.json_schema import SchemaWork, ecmascript_regex, rewrite_schema
from engine_core.structured_output.backend import LLGuidanceBackend, LLGuidanceMatcher
from engine_core.structured_output.matchers import GrammarError
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource
from tests.fakes.toy_vocabulary import EOS, SIZE, tokens_of, write_toy_tokenizer

SUITE = Path(__file__).parent / "json_schema" / "suite.jsonl"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    return LLGuidanceBackend(write_toy_tokenizer(tmp_path_factory.mktemp("toy")), SIZE, (EOS,))


def compiled(backend: LLGuidanceBackend, schema: Any) -> LLGuidanceMatcher:
    matcher = backend.compile(GrammarSource("json_schema", json.dumps(schema)))
    assert isinstance(matcher, LLGuidanceMatcher)
    return matcher


def accepts(matcher: LLGuidanceMatcher, text: str) -> bool:
    inner, token_ids = matcher.copy().inner, tokens_of(text)
    return inner.try_consume_tokens(token_ids) == len(token_ids) and inner.is_accepting()


def test_json_schema_test_suite(backend):
    """No invalid instance is accepted, unless a keyword is reported as having no effect."""
    counts, wrong = Counter[str](), []
    for line in SUITE.read_text().splitlines():
        case = json.loads(line)
        name = f"{case['draft']} {case['keyword']}: {case['description']}"
        any_valid = any(valid for _, valid in case["tests"])
        try:
            schema, removed = rewrite_schema(case["schema"], SchemaWork())
            matcher = compiled(backend, schema)
        except (InvalidRequestError, GrammarError):
            counts["refused" if any_valid else "refused rightly"] += 1
            continue
        counts["compiled"] += 1
        for value, valid in case["tests"]:
            accepted = accepts(matcher, json.dumps(value, ensure_ascii=False))
            counts[f"{'valid' if valid else 'invalid'} {accepted}"] += 1
            if accepted and not valid and not removed:
                wrong.append((name, value))
    assert wrong == []
    assert counts["compiled"] > 30 * counts["refused"]
    assert counts["valid True"] > 20 * counts["valid False"]
    assert counts["invalid False"] > 500


BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "valid", "invalid", "removed"),
    [
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [-(2**63) + 1024, -BIG, -5, 0, 5, BIG, 2**63 - 1024],
            [-(2**63) - 1, 2**63, "5.0"],
            [],
        ),
        (
            {"type": "integer", "exclusiveMinimum": BIG, "exclusiveMaximum": BIG + 6},
            [BIG + 1, BIG + 2, BIG + 3],
            [BIG, BIG + 6],
            [],
        ),
        ({"type": "number", "minimum": 0.5, "maximum": 2**64}, ["0.5", "7.25", 2**53], ["0.4"], []),
        ({"type": ["integer", "null"], "maximum": BIG}, [2**53, "null", -1], [BIG, '"a"'], []),
        (
            {"allOf": [{"type": "integer", "maximum": BIG}, {"minimum": 3}]},
            [3, 2**53],
            [2, BIG, BIG + 1],
            [],
        ),
        (
            {"type": "integer", "minimum": 0, "maximum": BIG, "multipleOf": 8},
            [16, 2**53],
            [BIG],
            [],
        ),
        ({"enum": [2**60, 3]}, [str(2**60), "3"], [str(2**60 + 1)], []),
        ({"type": "integer", "minimum": 2**60}, [str(2**60), str(2**62)], [str(2**60 - 1)], []),
        ({"type": "integer", "maximum": -(2**60)}, [str(-(2**60))], [str(-(2**60) + 1)], []),
        ({"exclusiveMinimum": 2**55}, [str(2**55 + 8)], [str(2**55)], []),
        (
            {"type": "integer", "exclusiveMaximum": 2**60, "maximum": 2**62},
            [str(2**60 - 128)],
            [str(2**60)],
            [],
        ),
        ({"exclusiveMinimum": 2**53, "minimum": 5}, [str(2**53 + 2)], ["6", str(2**53)], []),
        ({"type": "number", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)], []),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["17"], ["-1"], []),
        ({"type": "number", "maximum": 1.7e308}, ["5.5", "-1e9"], [], []),
        ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, ["2"], ["1"], []),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], [], []),
        ({"type": "array", "uniqueItems": True}, ["[1, 2]"], [], ["uniqueItems"]),
        ({"items": [{"const": 1}], "additionalItems": False}, ["[1]"], ["[2]", "[1, 1]"], []),
        ({"type": "string", "format": "binary"}, ['"x"'], ["1"], ["format"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"', '"0001-01-01"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"0000-01-01"', '"24-01-01"'],
            [],
        ),
        (
            {"type": "string", "format": "date-time", "pattern": "Z$"},
            ['"2024-02-29T23:59:59.5Z"'],
            ['"2023-02-29T00:00:00Z"', '"2024-02-29T00:00:00+01:00"', '"2024-02-29"'],
            [],
        ),
        ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"x"'], []),
        ({"type": "string", "pattern": r"^\d{2}$"}, ['"12"'], ['"1\u0663"', '"123"'], []),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"], []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1", "1.5"], [], ["oneOf"]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    kind: {
                        "type": "object",
                        "properties": {"kind": {"const": kind}},
                        "required": ["kind"],
                    }
                    for kind in ("cat", "dog")
                },
            },
            ['{"kind": "cat"}'],
            ['{"kind": "cow"}'],
            [],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "required": ["a"], "properties": {"a": {}}},
                    {
                        "type": "object",
                        "required": ["b"],
                        "properties": {"b": {}},
                        "additionalProperties": False,
                    },
                ]
            },
            ['{"a": 1}', '{"b": 1}'],
            ["{}"],
            [],
        ),
        ({"not": {"type": "string"}}, ["1", "null"], ['"a"'], []),
        ({"type": "object", "not": {"required": ["a"]}}, ['{"b": 1}'], ['{"a": 1}'], []),
        ({"type": "string", "not": {"const": "a"}}, ['"b"'], [], ["not"]),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "dependentRequired": {"a": ["b"]},
                "additionalProperties": False,
            },
            ['{"b": 1}', "{}", '{"a": 1, "b": 2}'],
            ['{"a": 1}'],
            [],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x"}},
            ['{"xa": 1}', "{}"],
            ['{"a": 1}'],
            [],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            ['{"a": 1}'],
            ['{"b": 1}'],
            [],
        ),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, ["1"], [], ["if", "then"]),
        ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"'], []),
        (
            {
                "properties": {"a": {"$ref": "#/components/one~1of"}},
                "components": {"one/of": {"oneOf": [{"type": "integer"}, {"const": "x"}]}},
            },
            ['{"a": 1}', '{"a": "x"}'],
            ['{"a": "y"}'],
            [],
        ),
        (
            {
                "properties": {
                    "a": {"type": "string"},
                    "b": {
                        "$id": "http://example.com/inner",
                        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
                    },
                }
            },
            ['{"b": {"b": 1}}'],
            ['{"b": {"b": "x"}}'],
            [],
        ),
        (
            {
                "items": [{"type": "integer"}, {"$ref": "#/items/0"}, {"$ref": "#/items/1"}],
                "additionalItems": False,
            },
            ["[1, 2, 3]"],
            ['[1, 2, "x"]', "[1, 2, 3, 4]"],
            [],
        ),
        (
            {
                "$defs": {
                    "tree": {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/$defs/tree", "type": "object"}},
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/tree",
            },
            ['{"next": {"next": {}}}'],
            ['{"next": 1}'],
            [],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "items": [{"type": "integer", "minimum": 3, "exclusiveMinimum": True}],
                "additionalItems": False,
            },
            ["[4]", "[]"],
            ["[3]", '["x"]', "[4, 4]"],
            [],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "id": "http://example.com/root",
                "definitions": {"n": {"id": "#n", "type": "integer"}},
                "items": {"$ref": "#n"},
            },
            ["[1]"],
            ['["x"]'],
            [],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"n": {"type": "integer"}},
                "items": {"$ref": "#/definitions/n", "type": "string"},
            },
            ["[1]"],
            ['["x"]'],
            [],
        ),
        (True, ["1", "{}"], [], []),
    ],
)
def test_instances_accepted_by_rewritten_schemas(backend, schema, valid, invalid, removed):
    rewritten, found = rewrite_schema(schema, SchemaWork())
    matcher = compiled(backend, rewritten)
    assert found == removed
    for text in map(str, valid):
        assert accepts(matcher, text), text
    for text in map(str, invalid):
        assert not accepts(matcher, text), text


@pytest.mark.parametrize("minimum", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("maximum", [None, 0, 1, 2, 3])
def test_counts_of_properties(backend, minimum, maximum):
    """Properties that are listed, optional or not, and others: exact, or reported."""
    counts = {"minProperties": minimum, "maxProperties": maximum}
    counts = {key: value for key, value in counts.items() if value is not None}
    values = [
        dict.fromkeys(names, 1) for n in range(5) for names in itertools.combinations("abrxy", n)
    ]
    for required, closed in itertools.product(([], ["r"], ["a", "b", "r"]), (False, True)):
        schema = {"type": "object", "properties": {"a": {}, "b": {}, "r": {}}, **counts}
        schema |= {"required": required} | ({"additionalProperties": False} if closed else {})
        validator = jsonschema.Draft202012Validator(schema)
        valid = {json.dumps(value): validator.is_valid(value) for value in values}
        try:
            rewritten, removed = rewrite_schema(schema, SchemaWork())
        except InvalidRequestError:
            assert not any(valid.values())
            continue
        matcher = compiled(backend, rewritten)
        for text, is_valid in valid.items():
            assert accepts(matcher, text) or not is_valid, (schema, text)
            assert removed or is_valid or not accepts(matcher, text), (schema, text)
        repeated = accepts(matcher, '{"r": 1, "x": 1, "x": 1}')
        assert not (repeated and minimum == 3) or "minProperties" in removed, schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "no text satisfies the schema"),
        ({"not": {}}, "no text satisfies the schema"),
        ([], "an object or a boolean"),
        ({"properties": {"a": 3}}, "an object or a boolean"),
        (
            {"patternProperties": {"^a": {"enum": [1, {"a": [2**60 + 1]}]}}},
            "enum: 1152921504606846977 is not supported",
        ),
        ({"properties": {"a": {"const": BIG}}}, f"const: {BIG} is not supported"),
        ({"const": 2**63}, f"const: {2**63} is not supported"),
        ({"items": {"enum": [10**4000]}}, f"enum: {10**39}… is not supported"),
        ({"allOf": [{"type": "integer", "minimum": 2**63}]}, "minimum: bounds beyond 9.22e+18"),
        ({"exclusiveMinimum": 1e20}, "exclusiveMinimum: bounds beyond 1e+18"),
        ({"enum": ["a\x00b"]}, "enum: control characters"),
        ({"required": ["a\x1b"]}, "required: control characters"),
        ({"dependencies": []}, "dependencies must be an object"),
        ({"dependencies": {"a": {"required": 1.5}}}, "required must be a list of strings"),
        ({"propertyNames": {"pattern": ["a"]}}, "pattern must be a string"),
        ({"not": {"required": [{}]}}, "required must be a list of strings"),
        ({"type": "string", "format": {}}, "format must be a string, not {}"),
        ({"allOf": 1, "oneOf": [{}]}, "allOf must be a list"),
        ({"exclusiveMaximum": []}, "exclusiveMaximum must be a number"),
        ({"maxItems": -1}, "maxItems must be a whole number"),
        (
            {"type": "strin"},
            "type must be one of null, boolean, object, array, number, string, integer, or a list "
            'of these, not "strin"',
        ),
        ({"type": ["string", "nil"]}, "type must be one of null, "),
        ({"type": []}, "type must be one of null, "),
        ({"type": None}, "type must be one of null, "),
        ({"multipleOf": 0}, "multipleOf must be a number above 0, not 0"),
        ({"multipleOf": "2"}, "multipleOf must be a number above 0"),
    ],
)
def test_unsupported_schemas_are_refused_by_name(schema, words):
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        rewrite_schema(schema, SchemaWork())


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "x"}, ""),
        ({"properties": {"a": {"type": "x"}}}, "/properties/a"),
        ({"properties": {"": {"items": {"anyOf": [{}, {"type": "x"}]}}}}, None),
        ({"properties": {"a/b~": {"items": {"anyOf": [{}, {"type": "x"}]}}}}, None),
        ({"items": [{}, {"type": "x"}]}, "/items/1"),
        ({"$defs": {"a": {"type": "x"}}, "$ref": "#/$defs/a"}, "/$defs/a"),
        (
            {"components": {"a": {"items": {"type": "x"}}}, "$ref": "#/components/a"},
            "/components/a/items",
        ),
        ({"dependentSchemas": {"a": {"properties": {"b": {"type": "x"}}}}}, ""),
        ({"properties": {"a": {"enum": ["\x00"]}, "b": {}}}, "/properties/a"),
    ],
)
def test_a_refused_schema_is_refused_with_the_place(schema, place):
    if place is None:
        (name,) = schema["properties"]
        pointer = name.replace("~", "~0").replace("/", "~1")
        place = f"/properties/{pointer}/items/anyOf/1"
    with pytest.raises(InvalidRequestError) as raised:
        rewrite_schema(schema, SchemaWork())
    at = f"at #{place}: " if place else ""
    assert re.match(re.escape(at) + "(type must|enum: control)", str(raised.value))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^\d{3}$", r"^[0-9]{3}$"),
        (r"[\d-x]", r"[0-9\-x]"),
        (r"\D\W", r"[^0-9][^A-Za-z0-9_]"),
        (r"[\D]", r"[[^0-9]]"),
        (r"[[a&&b]", r"[\[a\&\&b]"),
        (r"\\d", r"\\d"),
        (r"\[.\]", r"\[[^\n\r\x{2028}\x{2029}]\]"),
        (r"[.]", r"[.]"),
        ("[^]", r"[\s\S]"),
        ("a\\", "a\\"),
    ],
)
def test_ecmascript_character_classes(pattern, expected):
    assert ecmascript_regex(pattern) == expected


def test_ecmascript_whitespace_compiles(backend):
    matcher = backend.compile(GrammarSource("regex", ecmascript_regex(r"[^\s]\s[\sx]\S")))
    assert isinstance(matcher, LLGuidanceMatcher)
    assert accepts(matcher, "a\u00a0\ufeffb")
    assert not accepts(matcher, "a\u0085 b")
