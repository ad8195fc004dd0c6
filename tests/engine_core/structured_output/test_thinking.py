"""Reasoning is free, ends when its budget is used up, and grammars apply after it."""

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import (
    FREE,
    ThinkingMatcher,
    ThinkingPhase,
    mask_words,
)
from proto.errors import InvalidRequestError
from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import BLANKS, MAX_BLANKS, ThinkingRule
from tests.fakes.grammar_engine import GrammarEngine
from tests.fakes.input_harness import InputProcessorHarness, refused
from tests.fakes.messages import request as make_message
from tests.fakes.toy_vocabulary import BYTE, EOS, LONGER, SIZE, SPECIAL, text_of, tokens_of

END = tuple(tokens_of("</t>"))
RULE = ThinkingRule(begun=True, start="<t>", end="</t>", end_token_ids=END)
OPTIONAL = msgspec.structs.replace(RULE, begun=False)
DIGITS = GrammarSource("regex", "[0-9]{3}")


def ruled(rule: ThinkingRule, **fields: Any) -> ThinkingRule:
    return msgspec.structs.replace(rule, **fields)


def allowed(backend: LLGuidanceBackend, matcher: ThinkingMatcher) -> set[int]:
    masks = np.empty((1, mask_words(SIZE)), dtype=np.int32)
    backend.fill_masks([matcher], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little", count=SIZE)
    return set(np.flatnonzero(bits).tolist())


def matcher_of(
    backend: LLGuidanceBackend, rule: ThinkingRule, source: GrammarSource | None = None
) -> ThinkingMatcher:
    return ThinkingMatcher(backend.compile(source) if source else FREE, rule, backend)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("source", [None, DIGITS])
def test_the_end_is_forced_when_the_budget_is_used_up(backend, budget, source):
    matcher = matcher_of(backend, ruled(RULE, budget=budget), source)
    for token_id in tokens_of("thought")[:budget]:
        assert matcher.is_free
        assert len(allowed(backend, matcher)) == SIZE
        matcher.consume([token_id])
    for token_id in END:
        assert not matcher.is_free
        assert allowed(backend, matcher) == {token_id}
        matcher.consume([token_id])
    assert matcher.phase is ThinkingPhase.ANSWERING
    digits = set(tokens_of("0123456789"))
    assert (allowed(backend, matcher) == digits) is (source is not None)
    assert matcher.is_always_free is (source is None)


@pytest.mark.parametrize(
    "said",
    [
        tokens_of("a < b </t>"),
        tokens_of("<<//t></t>"),
        [*tokens_of("x</"), *tokens_of("t>")],
        tokens_of("</t>\n\n"),
    ],
)
def test_the_end_is_found_in_the_text(backend, said):
    matcher = matcher_of(backend, ruled(RULE, budget=100), DIGITS)
    matcher.consume([each for each in said if each != BYTE + ord("\n")])
    assert matcher.phase is ThinkingPhase.ANSWERING
    assert allowed(backend, matcher) == set(tokens_of("0123456789"))


def test_what_stands_behind_the_end_in_its_token_is_the_answers(backend):
    rule = ruled(RULE, end="</t>", end_token_ids=(SPECIAL,))
    source = GrammarSource("regex", r"\{a+\}")
    matcher = matcher_of(backend, rule, source)
    brace = BYTE + 256 + LONGER.index(">{")
    matcher.consume([*tokens_of("x</t"), brace, BYTE + ord("a")])
    assert matcher.error == ""
    assert allowed(backend, matcher) == set(tokens_of("a}"))


def test_a_marker_that_is_a_token_has_no_text(backend):
    rule = ruled(OPTIONAL, end_token_ids=(SPECIAL,), start_token_id=EOS, budget=9)
    matcher = matcher_of(backend, rule)
    matcher.consume([EOS, *tokens_of("abc")])
    assert matcher.phase is ThinkingPhase.THINKING
    matcher.consume([SPECIAL])
    assert matcher.is_always_free


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        ("", ThinkingPhase.OPENING),
        (" \n<", ThinkingPhase.OPENING),
        ("<t>", ThinkingPhase.THINKING),
        ("\n<t>ab", ThinkingPhase.THINKING),
        ("a", ThinkingPhase.ANSWERING),
        ("<a", ThinkingPhase.ANSWERING),
        ("a<t>", ThinkingPhase.ANSWERING),
        (" " * MAX_BLANKS, ThinkingPhase.OPENING),
        (" " * MAX_BLANKS + "<t>", ThinkingPhase.THINKING),
        (" " * (MAX_BLANKS + 1), ThinkingPhase.ANSWERING),
        (BLANKS + "<t>", ThinkingPhase.THINKING),
        ("\x1c<t>", ThinkingPhase.ANSWERING),
        ("\u3000<t>", ThinkingPhase.ANSWERING),
    ],
)
def test_thoughts_may_begin_or_not(backend, said, phase):
    matcher = matcher_of(backend, ruled(OPTIONAL, budget=3))
    assert matcher.is_free
    matcher.consume(tokens_of(said))
    assert matcher.phase is phase


def test_a_start_behind_the_half_of_one_is_none(backend):
    matcher = matcher_of(backend, ruled(OPTIONAL, budget=3, start_token_id=SPECIAL))
    matcher.consume([*tokens_of("\n<t"), SPECIAL])
    assert matcher.phase is ThinkingPhase.ANSWERING
    matcher = matcher_of(backend, ruled(OPTIONAL, budget=3, start_token_id=SPECIAL))
    matcher.consume([*tokens_of(" \n"), SPECIAL])
    assert matcher.phase is ThinkingPhase.THINKING


def test_a_thinking_budget_counts_from_the_start_marker(backend):
    matcher = matcher_of(backend, ruled(OPTIONAL, budget=2))
    matcher.consume(tokens_of("  <t>a"))
    assert matcher.is_free
    matcher.consume(tokens_of("b"))
    assert allowed(backend, matcher) == {END[0]}


def test_a_grammar_leaves_room_for_thoughts_at_the_beginning_only(backend):
    rule = ruled(OPTIONAL, start_token_id=SPECIAL)
    digits = set(tokens_of("0123456789"))
    thinking = matcher_of(backend, rule, DIGITS)
    assert allowed(backend, thinking) == {*digits, SPECIAL}
    thinking.consume([SPECIAL])
    assert len(allowed(backend, thinking)) == SIZE
    answering = matcher_of(backend, rule, DIGITS)
    answering.consume(tokens_of("1"))
    assert allowed(backend, answering) == digits
    never = matcher_of(backend, OPTIONAL, DIGITS)
    assert allowed(backend, never) == digits


@pytest.mark.parametrize("cut", range(12))
def test_taking_in_tokens_at_once_or_one_by_one_is_the_same(backend, cut):
    said = [*tokens_of("thoug"), *END, *tokens_of("123")]
    matcher = matcher_of(backend, ruled(RULE, budget=5), DIGITS)
    matcher.consume(said[:cut])
    matcher.consume(said[cut:])
    assert matcher.error == ""
    assert allowed(backend, matcher) == {EOS}


def test_a_text_that_has_to_be_of_a_form_does_not_end_with_thoughts(backend):
    for source in (DIGITS, None):
        inner = backend.compile(source) if source else FREE
        matcher = ThinkingMatcher(inner, ruled(RULE, budget=2), backend, (EOS,)).copy()
        matcher.consume(tokens_of("a"))
        assert (EOS in allowed(backend, matcher)) is (source is None)
        assert len(allowed(backend, matcher)) >= SIZE - 1
        assert matcher.is_free is (source is None)


def test_a_grammar_that_sleeps_has_thoughts_found_by_their_text(backend):
    source = msgspec.structs.replace(DIGITS, trigger="<n>")
    thinking = matcher_of(backend, ruled(OPTIONAL, budget=9), source)
    thinking.consume(tokens_of("<t>a<n>b"))  # a trigger inside reasoning is ignored
    assert thinking.is_free
    thinking.consume(tokens_of("</t>x<n>"))
    digits = set(tokens_of("0123456789"))
    assert allowed(backend, thinking) == digits
    answering = matcher_of(backend, ruled(OPTIONAL, budget=9), source)
    answering.consume(tokens_of(" <n>"))
    assert allowed(backend, answering) == digits


# In an engine


@pytest.fixture(params=[False, True], ids=["synchronous", "overlapped"])
def engine(request: Any, tokenizer_folder: Any) -> Iterator[GrammarEngine]:
    made = GrammarEngine(tokenizer_folder, async_scheduling=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("grammar", [None, DIGITS])
def test_a_budget_is_exact(engine, budget, grammar):
    engine.send_request(3, grammar, max_tokens=30, thinking=ruled(RULE, budget=budget), n=2)
    engine.run()
    for choice in range(2):
        tokens = engine.tokens(3, choice)
        assert tuple(tokens[budget : budget + len(END)]) == END
        if grammar is not None:
            assert re.fullmatch("[0-9]{3}", text_of(tokens[budget + len(END) :]))
    engine.harness.assert_idle()
    assert engine.num_constrained == 0


def test_no_mask_is_made_before_it_can_matter(engine):
    engine.send_request(1, None, max_tokens=30, thinking=ruled(RULE, budget=7))
    engine.run()
    constrained = [bool(each.constrained_seq_ids) for each in engine.runner.steps]
    assert constrained[:7] == [False] * 7
    assert constrained[7 : 7 + len(END)] == [True] * len(END)


@pytest.mark.parametrize("num_known", [0, 3, 7, 8, 11, 12])
@pytest.mark.parametrize("grammar", [None, DIGITS])
def test_a_new_engine_counts_what_the_old_one_had(engine, num_known, grammar):
    rule = ruled(RULE, budget=7)
    engine.send_request(1, grammar, max_tokens=13, thinking=rule)
    engine.run()
    expected = engine.tokens(1)
    engine.send_request(
        2, grammar, [5, 6, 1], (tuple(expected[:num_known]),), max_tokens=13, thinking=rule
    )
    engine.run()
    assert expected[:num_known] + engine.tokens(2) == expected
    assert tuple(expected[7 : 7 + len(END)]) == END


@pytest.mark.parametrize("num_steps", [1, 7, 9, 12])
def test_new_workers_go_on_with_the_same_thoughts(engine, num_steps):
    rule = ruled(RULE, budget=7)
    engine.send_request(1, DIGITS, max_tokens=30, thinking=rule)
    engine.run()
    engine.send_request(11, DIGITS, [5, 6, 1], max_tokens=30, thinking=rule)
    for _ in range(num_steps):
        engine.step()
    engine.lose_workers()
    engine.run()
    assert engine.tokens(11) == engine.tokens(1)


def test_preempted_thoughts_go_on(tokenizer_folder):
    texts = []
    for num_blocks in (1000, 8):
        engine = GrammarEngine(tokenizer_folder, num_blocks=num_blocks, block_size=4)
        for request_id in (1, 2, 3):
            engine.send_request(request_id, None, max_tokens=20, thinking=ruled(RULE, budget=6))
        engine.run()
        texts.append([engine.tokens(each) for each in (1, 2, 3)])
        assert bool(engine.harness.scheduler.pop_stats().num_preemptions) is (num_blocks == 8)
        engine.close()
    assert texts[0] == texts[1]
    assert all(tuple(tokens[6 : 6 + len(END)]) == END for tokens in texts[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": ruled(RULE, end_token_ids=(SIZE + 99999,))},
        {"thinking": ruled(RULE, end_token_ids=())},
        {"thinking": ruled(RULE, budget=-1)},
        {"thinking": ruled(RULE, start="x" * 100)},
        {"thinking": ruled(RULE, budget=1), "resumable": True},
        {"thinking": ruled(RULE, budget=1), "beam_width": 2, "n": 2, "temperature": 0.0},
    ],
)
def test_invalid_thinking_settings_are_refused(fields):
    harness = InputProcessorHarness()
    harness.receive(make_message(**fields))
    assert refused(harness) == [(1, "invalid_request")]


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 1 << 40},
        {"budget": -1},
        {"start": ""},
        {"end": "x" * 65},
        {"end_token_ids": ()},
        {"end_token_ids": END * 65},
        {"end_token_ids": (SIZE,)},
        {"start_token_id": -1},
    ],
)
def test_the_error_of_an_invalid_rule_names_a_parameter(fields) -> None:
    RULE.validate(SIZE)
    with pytest.raises(InvalidRequestError) as caught:
        ruled(RULE, **fields).validate(SIZE)
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (None, DIGITS),
        (None, GrammarSource("regex", "[0-9]{3}", trigger="<d>")),
        (ruled(RULE, budget=4), DIGITS),
        (ruled(RULE, budget=4), None),
        (OPTIONAL, GrammarSource("regex", "[0-9]{3}", trigger="<d>")),
    ],
)
def test_as_many_tokens_are_allowed_as_masks_allow(backend, seed, rule, source):
    """Of drafts along a random text, whose tokens are right or wrong."""
    dice = random.Random(seed)
    compiled = backend.compile(source) if source else FREE
    matcher = compiled.copy()
    if rule is not None:
        matcher = ThinkingMatcher(matcher, rule, backend, (EOS,))
    said = tokens_of("a<t>b</t><d>123") if rule is None else tokens_of("ab</t><d>123")
    for _ in range(12):
        draft, reached, num_allowed, refused = [], matcher.copy(), 0, False
        for position in range(6):
            choices = sorted(allowed(backend, reached) - {EOS})
            some = choices if choices and dice.random() < 0.6 else sorted({*range(SIZE)} - {EOS})
            token_id = dice.choice(some)
            if dice.random() < 0.4 and position < len(said):
                token_id = said[position]
            draft.append(token_id)
            refused = refused or token_id not in choices
            if not refused:
                reached.consume([token_id])
                num_allowed += not reached.error
                refused = bool(reached.error)
        before = allowed(backend, matcher)
        assert matcher.num_allowed(draft) == num_allowed
        assert allowed(backend, matcher) == before, "nothing was consumed"
        choices = sorted(before - {EOS}) or [EOS]
        matcher.consume([said.pop(0) if said and said[0] in before else dice.choice(choices)])
        if matcher.error:
            break
