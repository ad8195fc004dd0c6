"""Parsing of recorded outputs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from api_server.parsers.output import (
    ContentText,
    OutputParser,
    OutputPart,
    ToolCallArguments,
    ToolCallStart,
)
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS

OUTPUTS = Path(__file__).parent / "outputs"
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
        }
    },
    "now": {},
    "find": {
        "properties": {
            "text": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "kind": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "run": {
        "properties": {"code": {"$ref": "#/$defs/code"}},
        "$defs": {"code": {"type": "string"}},
    },
    "book": {
        "properties": {
            "who": {"type": "object"},
            "when": {"type": ["string", "number", "null"]},
            "price": {"type": "number"},
            "ok": {"type": "boolean"},
            "n": {"type": "number"},
        }
    },
}
NAMES = tuple(TOOLS)


def recorded(name: str) -> list[dict[str, Any]]:
    """Return case, text, content and calls of the recorded outputs of a format."""
    cases: list[dict[str, Any]] = json.loads((OUTPUTS / f"{name}.json").read_text("utf-8"))
    return cases


def parser(name: str) -> OutputParser:
    """Return a new parser of a format."""
    return TOOL_CALL_FORMATS[name].new_parser(TOOLS)  # type: ignore[index]


def read(name: str, pieces: Iterable[str], *, is_cut: bool = False) -> list[OutputPart]:
    """Return all parts of a text that is parsed in chunks. is_cut: a limit ended it."""
    reading = parser(name)
    return [
        *(part for piece in pieces for part in reading.parse_delta(piece)),
        *reading.parse_end(is_cut=is_cut),
    ]


def joined(parts: Sequence[OutputPart]) -> tuple[str, list[tuple[str, str]]]:
    """Return (content, [(name, arguments)]); check the indices and ids of the calls."""
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    begun = [part for part in parts if isinstance(part, ToolCallStart)]
    assert [part.index for part in begun] == list(range(len(begun)))
    assert len({part.call_id for part in begun}) == len(begun)
    texts = ["" for _ in begun]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            texts[part.index] += part.text
    return content, [(part.name, text) for part, text in zip(begun, texts, strict=True)]
