"""Target: answers of the harmony format for their parser.

    1 byte: opening and end │ 1 byte: size of the chunks │ a text with markers, UTF-8

Parts do not depend on the chunks, no text is lost, and arguments are JSON objects.
"""

import json
from collections.abc import Sequence
from typing import Final

from hypothesis import strategies as st

from tests.api_server.harmony_model import joined, marked, read
from tests.api_server.test_harmony import CASES
from tests.fuzz.mutation import mutated_bytes

OPENINGS: Final = (None, "assistant<|channel|>final")


class HarmonyAnswers:
    name = "harmony"

    def seeds(self) -> list[bytes]:
        texts = [text for text, _ in CASES.values()]
        return [bytes([number, 3]) + text.encode() for number, text in enumerate(texts)]

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        return mutated_bytes(known)

    def run(self, data: bytes) -> str:
        if len(data) < 2:
            return "nothing"
        opening, is_cut = OPENINGS[data[0] % 2], bool(data[0] & 2)
        text = marked(data[2:].decode("utf-8", "replace"))
        size = 1 + data[1]
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        reasoning, content, calls = whole = joined(read([text], opening=opening, is_cut=is_cut))
        assert joined(read(pieces, opening=opening, is_cut=is_cut)) == whole
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
        if not is_cut and text == data[2:].decode("utf-8", "replace"):  # without a marker
            assert content.strip() == text.removeprefix("assistant").strip()
        return f"{bool(opening)} {is_cut} {bool(reasoning)} {bool(content)} {min(3, len(calls))}"

    def close(self) -> None:
        """No resources to close."""
