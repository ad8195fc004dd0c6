"""Target: model output for the parsers of reasoning and tool calls.

    1 byte: format │ 1 byte: reasoning, size of the chunks │ a text, UTF-8

Parts do not depend on the chunks, which are cut at every byte and decoded as a detokenizer does. A
call is contiguous, its arguments are a JSON object, and calls are numbered in order. An answer that
a limit ends at any byte has the calls that were complete.
"""

import codecs
import json
from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

from api_server.parsers.output import (
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.parsers.reasoning import (
    NO_REASONING,
    REASONING_FORMATS,
    OutputStart,
)
from api_server.parsers.tool_calls import ToolCallPlan
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from tests.api_server.tools.parsing import TOOLS, recorded
from tests.fuzz.mutation import mutated_bytes

FORMATS: Final = list(TOOL_CALL_FORMATS)
STYLES: Final = (
    (NO_REASONING, OutputStart.CONTENT),
    (REASONING_FORMATS["qwen3"], OutputStart.UNKNOWN),
    (REASONING_FORMATS["mistral"], OutputStart.REASONING),
    (REASONING_FORMATS["hunyuan_a13b"], OutputStart.UNKNOWN),
)
MAX_CUTS: Final = 256
"""The largest number of places at which a text is cut; they are evenly spaced."""
MAX_LIMITS: Final = 64
"""How many of these places, at most, also end the answer."""

ParsedOutput = tuple[str, str, list[tuple[str, str]]]
"""(thoughts, content, [(name, arguments)])"""


class Answers:
    name = "answers"

    def seeds(self) -> list[bytes]:
        seeds = []
        for number, name in enumerate(FORMATS):
            for index, case in enumerate(recorded(name.removesuffix("_named"))):
                style, opening = STYLES[index % len(STYLES)]
                start = "" if opening is not OutputStart.UNKNOWN else style.start
                thoughts = f"{start}\nWhich?\n{style.end}\n\n" if style.has_reasoning else ""
                text = f"{thoughts}{style.answer_start}{case['text']}{style.answer_end}"
                seeds.append(bytes([number, index % len(STYLES) + 12]) + text.encode())
        return seeds

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        return mutated_bytes(known)

    def run(self, data: bytes) -> str:
        if len(data) < 2:
            return "nothing"
        reader = data[0] % len(FORMATS), data[1] % len(STYLES)
        text = data[2:].decode("utf-8", "replace")
        whole = _read(reader, [text])
        size = 1 + data[1] // len(STYLES)
        assert _read(reader, [text[at : at + size] for at in range(0, len(text), size)]) == whole
        assert _read(reader, text) == whole
        places = range(1, len(data) - 2, max(1, len(data) // MAX_CUTS))
        for place in places:
            assert _read(reader, _cut(data[2:], place)) == whole
        for place in places[:: 1 + len(places) // MAX_LIMITS]:
            thoughts, _, calls = _read(reader, _cut(data[2:], place)[:1], is_cut=True)
            assert whole[0].startswith(thoughts)
            assert calls == whole[2][: len(calls)]
        thoughts, content, calls = whole
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
        assert len(thoughts) + len(content) <= len(text)
        return f"{reader} {bool(thoughts)} {bool(content)} {'call ' * min(3, len(calls))}"

    def close(self) -> None:
        """No resources to close."""


def _read(reader: tuple[int, int], pieces: Sequence[str], *, is_cut: bool = False) -> ParsedOutput:
    plan = ToolCallPlan(TOOL_CALL_FORMATS[FORMATS[reader[0]]], TOOLS)
    style, opening = STYLES[reader[1]]
    parser = style.new_parser(opening, plan.new_parser(), is_shown=True, calls=plan.in_reasoning)
    parts = [part for piece in pieces for part in parser.parse_delta(piece)]
    return _joined_parts([*parts, *parser.parse_end(is_cut=is_cut)])


def _joined_parts(parts: Sequence[OutputPart]) -> ParsedOutput:
    thoughts, content = [], []
    found: list[tuple[str, str]] = []
    open_call = ""
    for part in parts:
        match part:
            case ReasoningText(text):
                assert text
                assert not [*content, *found], "thoughts behind an answer"
                thoughts.append(text)
            case ContentText(text):
                assert text
                assert not open_call
                content.append(text)
            case ToolCallStart(index, _, name):
                assert index == len(found)
                assert not open_call
                open_call = name
            case ToolCallArguments(index, text):
                assert index == len(found)
                assert open_call
                found.append((open_call, text))
                open_call = ""
    assert not open_call, "a call without arguments"
    return "".join(thoughts), "".join(content), found


def _cut(data: bytes, place: int) -> tuple[str, str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data[:place]), decoder.decode(data[place:], final=True)
