"""Finds stop strings in text that arrives in pieces.

Owns the text that may still turn out to be the beginning of a stop string.
Each string is followed by a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt
1977), so a piece costs time proportional to its length whatever the strings are.
"""

from collections.abc import Sequence
from typing import Protocol


class StopMatcher(Protocol):
    """Follows the text of one choice."""

    def feed(self, piece: str, *, armed: bool) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended it or None).

        Until `armed` a complete stop string is passed over.
        """
        ...

    def flush(self) -> str:
        """What was held back, when no text follows."""
        ...


class NoStopStrings:
    """For requests without stop strings."""

    def feed(self, piece: str, *, armed: bool) -> tuple[str, str | None]:
        return piece, None

    def flush(self) -> str:
        return ""


class StopStrings:
    """For requests with stop strings. The one that is complete first wins.

    shows_stop: the text ends with it, and not before it.
    """

    def __init__(self, strings: Sequence[str], *, shows_stop: bool = False) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._shows_stop = shows_stop
        self._held = ""

    def feed(self, piece: str, *, armed: bool) -> tuple[str, str | None]:
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            found = [each for each in self._automata if each.step(character)]
            if found and armed:
                longest = max(found, key=lambda automaton: len(automaton.string))
                self._held = ""
                hidden = 0 if self._shows_stop else len(longest.string)
                return text[: end - hidden], longest.string
        keep = max(automaton.matched for automaton in self._automata)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


class _Automaton:
    """`matched`: length of the longest beginning of `string` that the text ends with,
    short of the whole string."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = _borders(string)

    def step(self, character: str) -> bool:
        """True when the string is complete with this character."""
        string, matched = self.string, self.matched
        while matched and string[matched] != character:
            matched = self._fallback[matched - 1]
        if string[matched] == character:
            matched += 1
        complete = matched == len(string)
        self.matched = self._fallback[matched - 1] if complete else matched
        return complete


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders


def stop_matcher(strings: Sequence[str], *, shows_stop: bool = False) -> StopMatcher:
    """The matcher for a request's stop strings; shows_stop: they are part of the text."""
    return StopStrings(strings, shows_stop=shows_stop) if strings else NoStopStrings()
