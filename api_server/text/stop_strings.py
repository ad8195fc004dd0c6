"""Stop strings in text that arrives in pieces.

All strings are matched in one pass, by the automaton of Aho and Corasick (1975), so the time is
linear in the length of the text for any number of strings.
"""

from collections.abc import Sequence


class StopStrings:
    """Cuts the text of one choice at the first complete stop string.

    If several are complete with the same character, the first in the list counts. Text that may be
    the beginning of a stop string is held back. shows_stop: the text ends after the stop string,
    not before it. `copy.copy` of an unused instance searches another text.
    """

    def __init__(self, strings: Sequence[str], *, shows_stop: bool = False) -> None:
        self._strings = strings
        self._automaton = _Automaton(strings)
        self._shows_stop = shows_stop
        self._state = 0
        self._held = ""

    def filter_text(self, piece: str, *, can_stop: bool) -> tuple[str, str | None]:
        """Return (text that is certain, the stop string that ended it or None).

        can_stop: False ignores stop strings that are complete within this piece.
        """
        automaton, state = self._automaton, self._state
        children, fallbacks, found = automaton.children, automaton.fallbacks, automaton.found
        if not state and children[0].keys().isdisjoint(piece):
            return piece, None
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            while state and character not in children[state]:
                state = fallbacks[state]
            state = children[state].get(character, 0)
            if found[state] < len(self._strings):
                if can_stop:
                    stop = self._strings[found[state]]
                    self._state, self._held = 0, ""
                    return text[: end if self._shows_stop else end - len(stop)], stop
                while not children[state]:  # no longer string begins with this one
                    state = fallbacks[state]
        keep = automaton.lengths[state]
        self._state, self._held = state, text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush_text(self) -> str:
        """Return the text that was held back; text that follows is another text."""
        text, self._state, self._held = self._held, 0, ""
        return text

    def finish_text(self, *, is_cut: bool, can_stop: bool) -> tuple[str, str | None]:
        """Return the text that was held back; no text follows, so no string gets complete."""
        return self.flush_text(), None


class _Automaton:
    """A state for each beginning of a string: the longest one with which the text ends.

    State 0 is the empty beginning. children: state after one more character. fallbacks: state of
    the next shorter beginning with which the text ends. lengths: in characters. found: index of the
    first string with which the text ends; the number of strings for none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.lengths = [0]
        self.found = [len(strings)]
        for index, string in enumerate(strings):
            self._add_string(string, index)
        self.fallbacks = [0] * len(self.children)
        self._set_fallbacks()

    def _add_string(self, string: str, index: int) -> None:
        state = 0
        for length, character in enumerate(string, start=1):
            child = self.children[state].setdefault(character, len(self.children))
            if child == len(self.children):
                self.children.append({})
                self.lengths.append(length)
                self.found.append(self.found[0])
            state = child
        self.found[state] = min(self.found[state], index)

    def _set_fallbacks(self) -> None:
        children, fallbacks, found = self.children, self.fallbacks, self.found
        states = [*children[0].values()]  # shorter beginnings first
        for state in states:
            for character, child in children[state].items():
                fallback = fallbacks[state]
                while fallback and character not in children[fallback]:
                    fallback = fallbacks[fallback]
                fallback = children[fallback].get(character, 0)
                fallbacks[child] = fallback
                found[child] = min(found[child], found[fallback])
                states.append(child)
