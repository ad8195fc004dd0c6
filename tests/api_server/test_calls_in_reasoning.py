"""Calls that begin within reasoning: those that are made, and those that are only quoted."""

import json

import pytest

from api_server.parsers.output import OutputParser, OutputPart, ReasoningText
from api_server.parsers.output_format import OutputFormat, ReasoningPlan
from api_server.parsers.reasoning import REASONING_FORMATS, OutputStart, ReasoningTokenCounter
from api_server.parsers.tool_calls import ToolCallPlan
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from tests.api_server.test_reasoning import Spelled
from tests.api_server.tools.parsing import TOOLS, joined

THINK = REASONING_FORMATS["qwen3"]
WITH_TEXT_MARKERS = ("hermes", "qwen3_coder", "glm45", "hunyuan_a13b")
WITH_MARKERS = [name for name, each in TOOL_CALL_FORMATS.items() if each.trigger]
CALL = {name: TOOL_CALL_FORMATS[name].render_calls([("now", "{}")]) for name in WITH_MARKERS}
UNKNOWN_CALL = {
    name: TOOL_CALL_FORMATS[name].render_calls([("shout", "{}")]) for name in WITH_MARKERS
}


def answer_parser(plan: ToolCallPlan) -> OutputParser:
    return OutputFormat(plan, ReasoningPlan(THINK, OutputStart.REASONING)).new_parser()


def read(name: str, pieces, *, special: bool = False, is_cut: bool = False):
    """Return (reasoning, content, names of calls) of an answer that begins within reasoning."""
    call_format = TOOL_CALL_FORMATS[name]
    markers = dict(enumerate(call_format.markers)) if special else {}
    parser = answer_parser(ToolCallPlan(call_format, TOOLS, markers=markers))
    parts: list[OutputPart] = [part for piece in pieces for part in parser.parse_delta(piece)]
    parts += parser.parse_end(is_cut=is_cut)
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    content, calls = joined(parts)
    assert all(isinstance(json.loads(text), dict) for _, text in calls)
    return thoughts, content, [called for called, _ in calls]


def check(name: str, text: str, expected, *, special: bool = False) -> None:
    assert read(name, [text], special=special) == expected
    assert read(name, text, special=special) == expected
    for place in range(len(text)):
        pieces = [text[:place], text[place:]]
        assert read(name, pieces, special=special) == expected
        thoughts, content, calls = read(name, pieces[:1], special=special, is_cut=True)
        assert expected[0].startswith(thoughts)
        assert expected[1].startswith(content)
        assert calls == expected[2][: len(calls)]


@pytest.mark.parametrize("thought", ["use `", "see ``", "so:\n```", "a\n  `"])
def test_a_thought_that_a_limit_cuts_keeps_its_backticks(thought):
    assert read("hermes", [thought], is_cut=True) == (thought, "", [])
    assert read("hermes", thought, is_cut=True) == (thought, "", [])


@pytest.mark.parametrize("name", WITH_TEXT_MARKERS)
def test_a_call_that_begins_a_line_ends_reasoning_that_has_no_end(name):
    call = CALL[name]
    check(name, f"Hm.\n\n{call}\n", ("Hm.", "", ["now"]))
    check(name, call, ("", "", ["now"]))
    check(name, f"Hm.\n{call}\n{call}", ("Hm.", "", ["now", "now"]))
    check(name, f"```\n{call}\n```\nSo:\n  {call}", (f"```\n{call}\n```\nSo:", "", ["now"]))
    check(
        name,
        f"Hm.\n{UNKNOWN_CALL[name]}\nNo.\n{call}",
        (f"Hm.\n{UNKNOWN_CALL[name]}\nNo.", "", ["now"]),
    )


@pytest.mark.parametrize("name", WITH_TEXT_MARKERS)
@pytest.mark.parametrize(
    "thoughts",
    [
        "I could write\n{call}\nbut not yet.",
        "I could write\n{call}",
        "{call}\n{call}\nTwo calls.",
    ],
)
def test_a_call_in_reasoning_that_ends_later_is_quoted(name, thoughts):
    thoughts = thoughts.format(call=CALL[name])
    check(name, f"{thoughts}\n</think>\n\nHi.", (thoughts, "Hi.", []))
    check(name, f"{thoughts}</think>\n{CALL[name]}", (thoughts, "", ["now"]))


@pytest.mark.parametrize("name", WITH_TEXT_MARKERS)
@pytest.mark.parametrize(
    "thoughts",
    [
        "I write {call}",
        "I write `{call}`",
        "> {call}",
        "    {call}",
        "So:\n```xml\n{call}\n```",
        "So:\n```\n{call}",
        "{unknown}",
        "{start}\nand so on",
        "{start}",
    ],
)
def test_a_call_that_is_quoted_is_reasoning(name, thoughts):
    start = TOOL_CALL_FORMATS[name].trigger
    thoughts = "Hm.\n" + thoughts.format(call=CALL[name], unknown=UNKNOWN_CALL[name], start=start)
    check(name, thoughts, (thoughts, "", []))
    check(name, f"{thoughts}</think>Hi.", (thoughts, "Hi.", []))


@pytest.mark.parametrize("name", WITH_MARKERS)
def test_a_marker_that_is_a_special_token_ends_the_reasoning(name):
    check(name, f"Hm. {CALL[name]}", ("Hm.", "", ["now"]), special=True)


def test_reasoning_is_streamed_until_a_call_begins():
    parser = answer_parser(ToolCallPlan(TOOL_CALL_FORMATS["hermes"], TOOLS))
    assert parser.parse_delta("One <tool_call> two") == [
        ReasoningText("One <tool_call> two"),
    ]
    assert parser.parse_delta("\n<tool_call>\n{") == []
    assert parser.parse_delta("}\n three") == [
        ReasoningText("\n<tool_call>\n{}"),
        ReasoningText("\n three"),
    ]


def test_tokens_of_a_call_are_no_reasoning():
    texts = ["a", "b", "[TOOL_CALLS]", "now", "{}"]
    counting = ReasoningTokenCounter(Spelled(texts), THINK, OutputStart.REASONING, ["[TOOL_CALLS]"])
    for token_id in range(len(texts)):
        counting.decode_token(token_id)
    assert counting.num_tokens == 2
