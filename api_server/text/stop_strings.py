"""Stop strings in text that arrives in pieces.

All strings are matched in one pass, by the automaton of Aho and Corasick (1975), so the time is
linear in the length of the text for any number of strings.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from api_server.turns import run_in_turn

INLINE_CHARACTERS: Final = 2048
"""Of all strings together; their automaton is made in two milliseconds."""


class StopStrings:
    """Cuts the text of one choice at the first complete stop string.

    If several are complete with the same character, the first in the list counts. Text that may be
    the beginning of a stop string is held back. includes_stop: the text ends after the stop string,
    not before it. automaton: of the strings. `copy.copy` of an unused instance searches another
    text.
    """

    def __init__(
        self,
        strings: Sequence[str],
        automaton: "_Automaton | None" = None,
        *,
        includes_stop: bool = False,
    ) -> None:
        self._strings = strings
        self._automaton = automaton or _Automaton(strings)
        self._includes_stop = includes_stop
        self._state = 0
        self._buffer = ""

    def filter_text(self, piece: str, *, min_tokens_reached: bool) -> tuple[str, str | None]:
        """Return (text that is certain, the stop string that ended it or None).

        min_tokens_reached: False ignores stop strings that are complete within this piece.
        """
        automaton, state = self._automaton, self._state
        if not state and automaton.starts.isdisjoint(piece):
            return piece, None
        codes, branches, fallbacks = automaton.codes, automaton.branches, automaton.fallbacks
        found = automaton.found
        text = self._buffer + piece
        for end, character in enumerate(piece, start=len(self._buffer) + 1):
            code = ord(character)
            while True:
                if codes[state] == code:
                    state += 1
                    break
                child = branches[state].get(code, 0) if state in branches else 0
                if child or not state:
                    state = child
                    break
                state = fallbacks[state]
            if found[state] < len(self._strings):
                if min_tokens_reached:
                    stop = self._strings[found[state]]
                    self._state, self._buffer = 0, ""
                    return text[: end if self._includes_stop else end - len(stop)], stop
                while codes[state] < 0 and state not in branches:  # none begins so that is longer
                    state = fallbacks[state]
        keep = automaton.lengths[state]
        self._state, self._buffer = state, text[len(text) - keep :]
        return text[: len(text) - keep], None

    def pop_buffer(self) -> str:
        """Return the text that was held back; text that follows is another text."""
        text, self._state, self._buffer = self._buffer, 0, ""
        return text


class _Automaton:
    """A state for each beginning of a string: the longest one with which the text ends.

    State 0 is the empty beginning. Most states have one next character, so a state takes 16 bytes.

        "stop", "star"    s ─▶ t ─▶ o ─▶ p        codes      s  t  o  p  -1  r  -1
                          1    2    3    4        branches   2: {a: 5}
                               └─▶ a ─▶ r
                                   5    6

    codes: code of a next character, whose state is the next number; -1 for none. branches: state →
    code of another next character → its state. fallbacks: state of the next shorter beginning with
    which the text ends. lengths: in characters. found: index of the first string with which the
    text ends; the number of strings for none. starts: first characters.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.codes = array("i", [-1])
        self.branches: dict[int, dict[int, int]] = {}
        self.lengths = array("i", [0])
        self.found = array("i", [len(strings)])
        self.starts = frozenset(string[0] for string in strings)
        for index, string in enumerate(strings):
            self._add_string(string, index)
        self.fallbacks = array("i", [0]) * len(self.codes)
        self._set_fallbacks()

    def child(self, state: int, code: int) -> int:
        """Return the state after one more character; 0 for none."""
        if self.codes[state] == code:
            return state + 1
        return self.branches[state].get(code, 0) if state in self.branches else 0

    def _add_string(self, string: str, index: int) -> None:
        codes, state = list(map(ord, string)), 0
        for length, code in enumerate(codes):
            child = self.child(state, code)
            if not child:
                state = self._add_states(state, length, codes[length:])
                break
            state = child
        self.found[state] = min(self.found[state], index)

    def _add_states(self, state: int, length: int, codes: list[int]) -> int:
        """Add a state after each of these characters, which follow `state`; return the last."""
        first = len(self.codes)
        if first == state + 1:
            self.codes[state] = codes[0]
        else:
            self.branches.setdefault(state, {})[codes[0]] = first
        self.codes.extend([*codes[1:], -1])
        self.lengths.extend(range(length + 1, length + 1 + len(codes)))
        self.found.extend([self.found[0]] * len(codes))
        return len(self.codes) - 1

    def _children(self, state: int) -> Iterator[tuple[int, int]]:
        if self.codes[state] >= 0:
            yield self.codes[state], state + 1
        yield from self.branches.get(state, {}).items()

    def _set_fallbacks(self) -> None:
        fallbacks, found = self.fallbacks, self.found
        states = deque(child for _, child in self._children(0))  # shorter beginnings first
        while states:
            state = states.popleft()
            for code, child in self._children(state):
                fallback = fallbacks[state]
                while fallback and not self.child(fallback, code):
                    fallback = fallbacks[fallback]
                fallback = self.child(fallback, code)
                fallbacks[child] = fallback
                found[child] = min(found[child], found[fallback])
                states.append(child)


@lru_cache(maxsize=16)
def _large_automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)


async def stop_strings(strings: Sequence[str], *, includes_stop: bool) -> StopStrings:
    """Return an unused instance; a large one is made on a thread, or shared with equal strings.

    Raises ClientDisconnect.
    """
    if sum(map(len, strings)) <= INLINE_CHARACTERS:
        return StopStrings(strings, includes_stop=includes_stop)
    automaton = await run_in_turn(_large_automaton, tuple(strings))
    return StopStrings(strings, automaton, includes_stop=includes_stop)
