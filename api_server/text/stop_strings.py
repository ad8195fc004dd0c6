"""Stop strings in text that arrives in pieces.

Each stop string is followed by a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt 1977), so the
time is linear in the length of the text for any strings.
"""

from collections.abc import Sequence


class StopStrings:
    """Cuts the text of one choice at the first complete stop string.

    If several are complete with the same character, the first in the list counts. Text that may be
    the beginning of a stop string is held back. shows_stop: the text ends after the stop string,
    not before it.
    """

    def __init__(self, strings: Sequence[str], *, shows_stop: bool = False) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._shows_stop = shows_stop
        self._held = ""

    def filter_text(self, piece: str, *, can_stop: bool) -> tuple[str, str | None]:
        """Return (text that is certain, the stop string that ended it or None).

        can_stop: False ignores stop strings that are complete within this piece.
        """
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [automaton for automaton in self._automata if automaton.step(character)]
            if complete and can_stop:
                stop = complete[0].string
                self._held = ""
                return text[: end if self._shows_stop else end - len(stop)], stop
        keep = max(automaton.num_matched for automaton in self._automata)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush_text(self) -> str:
        """Return the text that was held back; no text follows."""
        text, self._held = self._held, ""
        return text


class _Automaton:
    """Matcher of one stop string.

    num_matched: length of the longest proper prefix of `string` with which the text ends.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._fallback = _border_lengths(string)

    def step(self, character: str) -> bool:
        """Return True if the string is complete with this character."""
        string, matched = self.string, self.num_matched
        while matched and string[matched] != character:
            matched = self._fallback[matched - 1]
        if string[matched] == character:
            matched += 1
        complete = matched == len(string)
        self.num_matched = self._fallback[matched - 1] if complete else matched
        return complete


def _border_lengths(string: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
