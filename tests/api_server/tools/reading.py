"""What parsers make of recorded outputs."""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from api_server.parsers.parts import CallArguments, CallBegins, Content, Part, PartsParser
from api_server.parsers.tools.formats import FORMATS

OUTPUTS = Path(__file__).parent / "outputs"
NAMES = ("weather", "now", "find", "run", "book")


def recorded(name: str) -> list[dict[str, Any]]:
    """case, text, content, calls of each output of a format."""
    cases: list[dict[str, Any]] = json.loads((OUTPUTS / f"{name}.json").read_text("utf-8"))
    return cases


def parser(name: str) -> PartsParser:
    """A fresh one, whose calls are numbered."""
    numbers = itertools.count()
    return FORMATS[name].parser(NAMES, lambda: f"id{next(numbers)}")  # type: ignore[index]


def read(name: str, pieces: Iterable[str]) -> list[Part]:
    """All parts, of a text in pieces."""
    reading = parser(name)
    return [*(part for piece in pieces for part in reading.feed(piece)), *reading.end()]


def joined(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str, str]]]:
    """(content, [(id, name, arguments)]); checks that calls are numbered as they come."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    begun = [part for part in parts if isinstance(part, CallBegins)]
    assert [part.index for part in begun] == list(range(len(begun)))
    texts = ["" for _ in begun]
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] += part.text
    return content, [
        (part.call_id, part.name, text) for part, text in zip(begun, texts, strict=True)
    ]
