"""Where a value ends that arrives in pieces: an object of JSON, the arguments of a Python call.

    {"name": "find", "arguments": {"text": "a } b"}} and so on
                                                   └ the end

Own a place in the text and nothing of it: each character is looked at once. What cannot be part of
such a value breaks it there and then, so that nobody waits for an end that cannot come. Whether a
value that has ended makes sense is for others to say.
"""

import re
from typing import Final

MAX_DEPTH: Final = 128
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_JSON_BETWEEN: Final = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")
_PYTHON_BETWEEN: Final = re.compile(r"[ \t\r\n0-9A-Za-z_+\-.:,=]*")
_INSIDE: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\\\x00-\x1f]*"),
}
"""By the quote that ends a string."""


class Scanner:
    """openers: brackets that there may be. quotes: around strings. between: all the rest.

    broken: it is no such value; `feed` has told where that shows.
    """

    def __init__(self, openers: str, quotes: str, between: re.Pattern[str]) -> None:
        self._openers = openers
        self._quotes = quotes
        self._between = between
        self._open: list[str] = []  # the brackets that are to close
        self._quote = ""
        self._escaped = False
        self.broken = False
        self.complete = False

    def feed(self, text: str) -> int:
        """Characters of `text` that belong to the value, all of them if it goes on."""
        place, end = 0, len(text)
        while place < end:
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            pattern = _INSIDE[self._quote] if self._quote else self._between
            found = pattern.match(text, place)
            place = found.end() if found else place
            if place == end:
                break
            if not self._take(text[place]):
                self.broken = True
                return place
            place += 1
            if not self._open:
                self.complete = True
                return place
        return place

    def _take(self, character: str) -> bool:
        """A character that changes something; False where it has no place."""
        if self._quote:
            if character == self._quote:
                self._quote = ""
            self._escaped = character == "\\"
            return self._escaped or not self._quote
        if character in self._quotes and self._open:
            self._quote = character
        elif character in self._openers and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSERS[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
        else:
            return False
        return True


def json_scanner() -> Scanner:
    """Of an object or a list."""
    return Scanner("{[", '"', _JSON_BETWEEN)


def python_scanner() -> Scanner:
    """Of what stands in the brackets of a call, with them."""
    return Scanner("{[(", "\"'", _PYTHON_BETWEEN)
