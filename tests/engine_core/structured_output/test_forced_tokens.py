"""Tokens that a grammar forces: each is the only one that its mask allows, in every walk."""

import json
import random

import numpy as np
import pytest

from engine_core.structured_output.manager import _MAX_LEAD_TOKENS
from engine_core.structured_output.matchers import FREE, ThinkingMatcher, mask_words
from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import ThinkingRule
from tests.fakes.grammar_engine import GrammarEngine
from tests.fakes.toy_vocabulary import EOS, SIZE, text_of, tokens_of

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["abcabc", "abd"]},
            "true": {"const": {"ab": True}},
            "n": {"type": "integer", "minimum": 5, "maximum": 19},
        },
        "required": ["name", "true", "n"],
        "additionalProperties": False,
    }
)
RULE = ThinkingRule(
    begun=True, start="<t>", end="</t>", end_token_ids=tuple(tokens_of("</t>")), budget=2
)
SOURCES = {
    "compact": GrammarSource("json_schema", SCHEMA, compact=True),
    "flexible": GrammarSource("json_schema", SCHEMA),
    "regex": GrammarSource("regex", "abc(abc|tru)e{3}[0-9]ab"),
    "choice": GrammarSource("choice", json.dumps(["abcabcabc", "abcabd", "true"])),
    "trigger": GrammarSource("regex", "abc{3}end", trigger="<t"),
}


def allowed(backend, matcher) -> list[int]:
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    backend.fill_masks([matcher], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little", count=SIZE)
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_forced_token_is_the_only_one_allowed(backend, name, thinks):
    generator = random.Random(1)
    num_forced = 0
    for _ in range(8):
        matcher = backend.compile(SOURCES[name]).copy()
        if thinks:
            matcher = ThinkingMatcher(matcher, RULE, backend, (EOS,))
        if name == "trigger" and not thinks:
            assert backend.forced_tokens(matcher) == []
            matcher.consume(tokens_of("<t"))
        for _ in range(40):
            forced = backend.forced_tokens(matcher)
            num_forced += len(forced)
            for token_id in forced:
                assert allowed(backend, matcher) == [token_id]
                matcher.consume([token_id])
            choices = [token_id for token_id in allowed(backend, matcher) if token_id != EOS]
            if not choices or matcher.error:
                break
            matcher.consume([generator.choice(choices)])
        assert not matcher.error
    assert num_forced > 0


def test_nothing_is_forced_without_a_grammar_or_after_an_error(backend):
    assert backend.forced_tokens(FREE) == []
    matcher = backend.compile(SOURCES["regex"]).copy()
    matcher.consume(tokens_of("x"))
    assert matcher.error
    assert backend.forced_tokens(matcher) == []


@pytest.fixture
def engine(tokenizer_folder):
    made = GrammarEngine(tokenizer_folder)
    yield made
    made.close()


def test_the_manager_follows_the_outputs_of_a_request(engine):
    """At each length the forced tokens are those that come; after a pause it catches up."""
    manager = engine.manager
    engine.send_request(1, GrammarSource("regex", "a{70}[bc]abcend[0-9]end"))
    engine.send_request(2, None)
    (bound, free) = engine.harness.scheduler.requests
    assert manager.has_grammar(bound)
    assert not manager.has_grammar(free)
    assert manager.forced_tokens(free) == []
    engine.run()
    outputs = engine.tokens(1)
    text = text_of(outputs)
    assert text.startswith("a" * 70)
    assert not manager.has_grammar(bound)

    engine.send_request(3, GrammarSource("regex", "a{70}[bc]abcend[0-9]end"))
    (again,) = engine.harness.scheduler.requests
    forced = manager.forced_tokens(again)
    assert forced == outputs[: len(forced)]
    assert forced
    again.all_token_ids += outputs[:-1]
    assert len(outputs) - 1 > _MAX_LEAD_TOKENS
    assert manager.forced_tokens(again) == []
    forced = manager.forced_tokens(again)
    assert forced == []  # only the end may follow
