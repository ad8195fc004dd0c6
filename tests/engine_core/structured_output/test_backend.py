"""Grammars over a toy vocabulary: masks and error messages."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import GrammarError, Matcher, mask_words
from proto.errors import InvalidRequestError, ModelError
from proto.messages.grammar import MAX_GRAMMAR_DEPTH, GrammarSource, check_depth, encoded
from tests.fakes.toy_vocabulary import BYTE, EOS, LONGER, SIZE, SPECIAL, text_of, tokens_of

PERSON = {
    "type": "object",
    "properties": {"n": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def allowed(backend: LLGuidanceBackend, matcher: Matcher) -> set[int]:
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    backend.fill_masks([matcher], masks)
    bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(backend: LLGuidanceBackend, matcher: Matcher, seed: int) -> str:
    """Return a text of random allowed tokens, ended as soon as the end is allowed."""
    draw, token_ids = random.Random(seed), []
    for _ in range(500):
        choices = allowed(backend, matcher)
        token_id = EOS if EOS in choices else draw.choice(sorted(choices))
        if token_id == EOS:
            return text_of(token_ids)
        token_ids.append(token_id)
        matcher.consume([token_id])
        assert matcher.error == ""
    raise AssertionError("no end")


def test_random_walks_through_a_schema_are_its_instances(backend):
    compiled = backend.compile(GrammarSource("json_schema", json.dumps(PERSON)))
    texts = {walk(backend, compiled.copy(), seed) for seed in range(20)}
    assert len(texts) > 10
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"n", "ok"}
        assert len(value["n"]) <= 6


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[0-9]{2}-(ab)+", "[0-9]{2}-(ab)+"),
        ("choice", json.dumps(["red", 'a"b', "two\nlines", "é"]), 'red|a"b|two\nlines|é'),
        ("grammar", 'start: "x" NUM\nNUM: /[1-9]+/', "x[1-9]+"),
        ("grammar", 'root ::= "yes" | "no" root', "(no)*yes"),
    ],
)
def test_other_kinds(backend, kind, source, pattern):
    compiled = backend.compile(GrammarSource(kind, source))
    for seed in range(10):
        assert re.fullmatch(pattern, walk(backend, compiled.copy(), seed))


def test_compact_json_has_no_space_and_other_json_a_bounded_one(backend):
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    compact = backend.compile(GrammarSource("json_schema", schema, compact=True))
    compact.consume(tokens_of('{"a":'))
    assert allowed(backend, compact) == {BYTE + ord("1")}
    loose = backend.compile(GrammarSource("json_schema", schema))
    loose.consume(tokens_of('{\n  "a": 1\n' + 24 * " "))
    assert loose.error == ""
    assert BYTE + ord(" ") not in allowed(backend, loose)


def test_a_complete_text_may_only_end_and_special_tokens_are_no_text(backend):
    compiled = backend.compile(GrammarSource("regex", "(.|\n)*"))
    assert SPECIAL not in allowed(backend, compiled)
    done = backend.compile(GrammarSource("regex", "ab"))
    done.consume(tokens_of("ab"))
    assert allowed(backend, done) == {EOS}
    done.consume([BYTE])
    assert done.error
    assert allowed(backend, done) == {EOS}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"enum": ["a<special>b"]}'),
        ("json_schema", '{"type": "string", "pattern": "^a<eos>b$"}'),
        (
            "json_schema",
            '{"type": "object", "properties": {"a<special>": {"const": 1}},'
            ' "required": ["a<special>"], "additionalProperties": false}',
        ),
        ("choice", '["a<special>b"]'),
        ("regex", "a<eos>b"),
        ("grammar", 'start: "a<eos>b" | "a<special>"'),
    ],
)
def test_the_text_of_a_special_token_in_a_literal_is_made_of_ordinary_tokens(backend, kind, source):
    compiled = backend.compile(GrammarSource(kind, source))
    token_ids: list[int] = []
    while (choices := allowed(backend, compiled)) != {EOS}:
        assert not choices & {EOS, SPECIAL}
        token_ids.append(min(choices))
        compiled.consume(token_ids[-1:])
    assert re.search("a<(eos|special)>", text_of(token_ids))


def test_an_end_token_within_a_grammar_is_not_allowed(backend):
    """A client's grammar may name special tokens; the end token would end the answer early."""
    compiled = backend.compile(GrammarSource("grammar", 'start: "a" <eos> "b"'))
    compiled.consume(tokens_of("a"))
    assert allowed(backend, compiled) == set()


def test_a_property_has_one_spelling(backend):
    """`\\u0070` for `p` would pass for an additional property."""
    schema = {"type": "object", "properties": {"p": {"type": "integer"}}}
    compiled = backend.compile(GrammarSource("json_schema", json.dumps(schema)))
    compiled.consume(tokens_of('{"\\'))
    assert compiled.error == ""
    letters = {text_of([token_id])[0] for token_id in allowed(backend, compiled)}
    assert letters == set('"\\bfnrt')


def test_a_choice_may_have_thousands_of_strings(backend):
    choices = [f"n{number}" for number in range(6_000)]
    compiled = backend.compile(GrammarSource("choice", json.dumps(choices)))
    assert backend.explore(compiled) == ""
    assert walk(backend, compiled, 5) in choices


@pytest.mark.parametrize(("num_properties", "words"), [(800, ""), (2_100, "cannot be used")])
def test_a_grammar_that_fails_after_its_first_token_is_found(backend, num_properties, words):
    names = [f"p{number}" for number in range(num_properties)]
    schema = {"type": "object", "properties": {name: {"const": 1} for name in names}}
    compiled = backend.compile(GrammarSource("json_schema", json.dumps(schema)))
    error = backend.explore(compiled)
    assert words in error
    assert bool(words) is bool(error)
    assert compiled.error == ""


def test_copies_stand_on_their_own(backend):
    first = backend.compile(GrammarSource("regex", "abc"))
    second = first.copy()
    first.consume(tokens_of("a"))
    assert BYTE + ord("a") in allowed(backend, second)
    assert BYTE + ord("b") in allowed(backend, first)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", '{"not": {}}', '"not"'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', '"uniqueItems"'),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"type": "string", "format": "colour"}', "Unknown format: colour"),
        ("json_schema", '{"$ref": "http://169.254.169.254/x"}', "cannot be used"),
        ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("grammar", 'start: "a"\nstart: "b"', "duplicate rule"),
        ("grammar", "start: start", "no text satisfies it"),
        ("grammar", "what is this", "neither Lark nor GBNF"),
        ("grammar", "root ::= " + "(" * 20_000, "cannot be used"),
    ],
)
def test_what_cannot_be_used_says_why(backend, kind, source, words):
    with pytest.raises(GrammarError, match=re.escape(words)) as caught:
        backend.compile(GrammarSource(kind, source))
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("source", ["(a+)+b", "(a|aa|aaa)*b", "(.*a){100}", "(x+x+)+y"])
def test_regular_expressions_that_explode_elsewhere_do_not(backend, source):
    compiled = backend.compile(GrammarSource("regex", source))
    compiled.consume(tokens_of("aaaa" if "x" not in source else "xxxx"))
    assert allowed(backend, compiled)
    assert compiled.error == ""


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://example.com/x"}, "'http://example.com/x' is not within the schema"),
        ({"$ref": "#/$defs/x"}, "'/$defs/x' does not exist"),
        ({"$ref": "#x"}, "'x' does not exist"),
        ({"$ref": "#/x", "x": {"oneOf": [{}, {}]}}, "oneOf in the target of a $ref"),
        ({"items": {"$ref": "#/x"}, "x": {"oneOf": [{}, {}]}}, "oneOf in the target of a $ref"),
    ],
)
def test_errors_about_references_name_no_option_of_the_compiler(backend, schema, words):
    with pytest.raises(GrammarError, match=re.escape(words)) as raised:
        backend.compile(GrammarSource("json_schema", json.dumps(schema)))
    assert "coerce_one_of" not in raised.value.message


def test_a_source_is_checked_before_it_is_compiled():
    for source, words in (
        (GrammarSource("regex", " "), "empty"),
        (GrammarSource("regex", "x" * 70_000), "70000 bytes"),
        (GrammarSource("regex", "\ud800"), "surrogate"),
        (GrammarSource("json_schema", "{"), "not valid JSON"),
        (GrammarSource("json_schema", "[]"), "an object"),
        (GrammarSource("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000), "nested"),
        (GrammarSource("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "nested"),
        (GrammarSource("json_schema", '{"x-guidance": {"lenient": true}}'), "x-guidance"),
        (GrammarSource("choice", "[]"), "at least one"),
        (GrammarSource("choice", '["a", ""]'), "not empty"),
        (GrammarSource("choice", '"a"'), "list"),
        (GrammarSource("regex", "a", trigger="x" * 300), "trigger"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            source.validate()
    GrammarSource("json_schema", "true").validate()
    with pytest.raises(InvalidRequestError, match="number"):
        encoded({"minimum": float("inf")})
    deep: dict = {}
    for _ in range(MAX_GRAMMAR_DEPTH - 1):
        deep = {"items": deep}
    check_depth(deep)
    with pytest.raises(InvalidRequestError, match="deep"):
        check_depth({"items": deep})


def test_a_tokenizer_that_cannot_be_read_is_a_model_error(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLGuidanceBackend(tmp_path / "tokenizer.json", SIZE, (EOS,))


def ids(text: str) -> list[int]:
    """A token that is the whole text."""
    return [BYTE + 256 + LONGER.index(text)]


@pytest.mark.parametrize(
    ("before", "trigger"),
    [
        (tokens_of("free <t>"), "<t>"),
        (tokens_of("free ") + ids("<t") + tokens_of(">"), "<t>"),
        (tokens_of("<<t <t") + tokens_of(">"), "<t>"),
        ([BYTE + ord("x"), SPECIAL], ""),
    ],
)
def test_a_grammar_sleeps_until_its_trigger(backend, before, trigger):
    source = GrammarSource("json_schema", json.dumps(PERSON), True, trigger, SPECIAL)
    matcher = backend.compile(source)
    for token_id in before:
        assert matcher.is_free
        assert len(allowed(backend, matcher)) >= SIZE
        copied = matcher.copy()
        matcher.consume([token_id])
        assert copied.is_free
    assert not matcher.is_free
    assert json.loads(walk(backend, matcher, 3))["ok"] in (True, False)


def test_a_trigger_in_the_middle_of_a_token_leaves_the_rest_to_the_grammar(backend):
    source = GrammarSource("regex", r"\{a+\}", trigger="<t>")
    matcher = backend.compile(source)
    matcher.consume([*ids("<t"), *ids(">{"), BYTE + ord("a")])
    assert not matcher.is_free
    assert matcher.error == ""
    assert allowed(backend, matcher) == {BYTE + ord("a"), BYTE + ord("}")}
    wrong = backend.compile(GrammarSource("regex", "a+", trigger="<t>"))
    wrong.consume([*ids("<t"), *ids(">{")])
    assert wrong.error
