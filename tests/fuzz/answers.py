"""Target: model output for the parsers of reasoning and tool calls.

    1 byte: format, style and opening │ 1 byte: size of the chunks │ a text, UTF-8

Parts do not depend on the chunks. A call is contiguous, its arguments are a JSON object, and calls
are numbered in order.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
    ReasoningParser,
)
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from tests.fuzz.mutation import Edit, mutate_bytes, mutated

RECORDED: Final = Path(__file__).parents[1] / "api_server" / "tools" / "outputs"
NAMES: Final = ("weather", "now", "find", "run", "book")
READERS: Final = [
    (name, style, opening)
    for name in TOOL_CALL_FORMATS
    for style, opening in (
        (NO_REASONING, OutputStart.CONTENT),
        (REASONING_FORMATS["qwen3"], OutputStart.UNKNOWN),
        (REASONING_FORMATS["mistral"], OutputStart.REASONING),
    )
]

ParsedOutput = tuple[str, str, list[tuple[str, str]]]
"""(thoughts, content, [(name, arguments)])"""


class Answers:
    name = "answers"

    def seeds(self) -> list[bytes]:
        seeds = []
        for number, (name, style, opening) in enumerate(READERS):
            start = "" if opening is not OutputStart.UNKNOWN else style.start
            thoughts = f"{start}\nWhich?\n{style.end}\n\n" if style.has_reasoning else ""
            path = RECORDED / f"{name.removesuffix('_named')}.json"
            cases: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
            seeds += [bytes([number, 3]) + (thoughts + each["text"]).encode() for each in cases]
        return seeds

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        def mutate(data: bytes, edits: Sequence[Edit]) -> bytes:
            return mutate_bytes(data, edits, known)

        return mutated(known, mutate)

    def run(self, data: bytes) -> str:
        if len(data) < 2:
            return "nothing"
        number = data[0] % len(READERS)
        text = data[2:].decode("utf-8", "replace")
        whole = _read(number, [text])
        assert _read(number, _cut(text, 1 + data[1])) == whole
        assert _read(number, text) == whole
        thoughts, content, calls = whole
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
        assert len(thoughts) + len(content) <= len(text)
        return f"{number} {bool(thoughts)} {bool(content)} {'call ' * min(3, len(calls))}"

    def close(self) -> None:
        """No resources to close."""


def _read(number: int, pieces: Sequence[str]) -> ParsedOutput:
    name, style, opening = READERS[number]
    calls = TOOL_CALL_FORMATS[name].new_parser(NAMES)
    parser = ReasoningParser(style, opening, calls)
    parts = [part for piece in pieces for part in parser.parse_delta(piece)]
    return _joined_parts([*parts, *parser.parse_end()])


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


def _cut(text: str, size: int) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]
