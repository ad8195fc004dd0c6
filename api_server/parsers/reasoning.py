"""Thoughts at the beginning of an answer: which markers models put around them, and the parser.

    prompt  …<think>\n  │  Which city?\n</think>\n\n  Let me look.
                         │  Reasoning                 what another parser reads

Owns the table of styles. Blanks at both borders of the thoughts, and the line breaks behind
them, belong to the markers and are left out.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from api_server.parsers.parts import Part, PartsParser, Reasoning
from api_server.text.detokenizer import Detokenizer
from proto.sampling_params import BLANKS, MAX_BLANKS


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """start, end: markers. starts_inside: the first text is a thought, with no marker before it."""

    start: str
    end: str
    starts_inside: bool = False

    @property
    def thinks(self) -> bool:
        """Whether there are thoughts at all."""
        return bool(self.end)


NO_REASONING: Final = ReasoningStyle("", "")
_THINK: Final = ReasoningStyle("<think>", "</think>")
_INSIDE: Final = ReasoningStyle("<think>", "</think>", starts_inside=True)

STYLES: Final[dict[str, ReasoningStyle]] = {
    "deepseek_r1": _INSIDE,
    "minimax_m2": _INSIDE,
    "step3": _INSIDE,
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "holo2": _THINK,
    "smollm3": _THINK,
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningStyle("<seed:think>", "</seed:think>"),
    "granite": ReasoningStyle("Here is my thought process:", "Here is my response:"),
}
"""By the names that `--reasoning-parser` takes."""


def style_of(name: str, template: str | None) -> ReasoningStyle:
    """name: of a style, or none, or auto: by what the chat template, if there is one, speaks of.

    A template that only takes thoughts away, and never writes where they begin, is of a model
    that begins with them.
    """
    if name != "auto":
        return STYLES.get(name, NO_REASONING)
    if template is None:
        return NO_REASONING
    for style in (_THINK, STYLES["mistral"], STYLES["seed_oss"]):
        if style.start in template and style.end in template:
            return style
    return _INSIDE if _INSIDE.end in template else NO_REASONING


class Opening(enum.Enum):
    """Where an answer begins. UNKNOWN: its first text decides."""

    INSIDE = 0
    UNKNOWN = 1
    OUTSIDE = 2


def opening_of(style: ReasoningStyle, prompt: str, continued: str) -> Opening:
    """What the end of the prompt says, of which only the template's and the model's words count.

    continued: the text of the model's own that the answer goes on with, if it does.
    """
    if not style.thinks:
        return Opening.OUTSIDE
    if continued.strip():
        inside = continued.rfind(style.start) > continued.rfind(style.end)
        return Opening.INSIDE if inside else Opening.OUTSIDE
    tail = prompt[-len(style.end) - MAX_BLANKS :].rstrip()
    if tail.endswith(style.start):
        return Opening.INSIDE
    if tail.endswith(style.end):
        return Opening.OUTSIDE
    return Opening.INSIDE if style.starts_inside else Opening.UNKNOWN


class Phase(enum.Enum):
    """What is being read.

    OPENING     a start, or what shows that there is none
    BLANKS      before the first word of the thoughts
    THINKING
    BEHIND      line breaks between the end and the answer
    ANSWERING
    """

    OPENING = 0
    BLANKS = 1
    THINKING = 2
    BEHIND = 3
    ANSWERING = 4


class ReasoningParser:
    """Thoughts, then whatever `rest` reads.

    opening: where the text begins. shows: the client sees the reasoning.
    """

    def __init__(
        self, style: ReasoningStyle, opening: Opening, rest: PartsParser, *, shows: bool = True
    ) -> None:
        self._style = style
        self._opening = opening
        self._rest = rest
        self._shows = shows
        self._phase = Phase.ANSWERING if opening is Opening.OUTSIDE else Phase.OPENING
        self._held = ""  # a start, or blanks and an end, that are not complete

    def feed(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        if self._phase is Phase.OPENING:
            text = self._open(text)
        if self._phase is Phase.BLANKS:
            text = text.lstrip()
            if text:
                self._phase = Phase.THINKING
        if self._phase is Phase.THINKING:
            text = self._think(text, parts)
        if self._phase is Phase.BEHIND:
            text = text.lstrip("\n")
            if text:
                self._phase = Phase.ANSWERING
        if self._phase is Phase.ANSWERING and text:
            parts += self._rest.feed(text)
        return parts

    def end(self) -> Sequence[Part]:
        parts: list[Part] = []
        if self._phase is Phase.OPENING and self._opening is Opening.UNKNOWN:
            parts += self._rest.feed(self._held) if self._held else ()
        else:
            held = self._held.lstrip(BLANKS) if self._phase is Phase.OPENING else self._held
            self._say(_trimmed(held), parts)
        self._held = ""
        return [*parts, *self._rest.end()]

    def _open(self, text: str) -> str:
        """What follows the start, or all of it; nothing as long as that is not known.

        The engine decides alike (engine_core/structured_output/thinking.py).
        """
        self._held += text
        said = self._held.lstrip(BLANKS)
        if len(self._held) - len(said) <= MAX_BLANKS:
            if said.startswith(self._style.start):
                self._phase, self._held = Phase.BLANKS, ""
                return said[len(self._style.start) :]
            if self._style.start.startswith(said):
                return ""
        self._phase = Phase.BLANKS if self._opening is Opening.INSIDE else Phase.ANSWERING
        text, self._held = self._held, ""
        return text

    def _think(self, text: str, parts: list[Part]) -> str:
        """What follows the end; nothing as long as it has not come.

        thought thought \n \n </thi      held: what may belong to an end
        ── told ──────┘ └─ held ──┘
        """
        text = self._held + text
        thought, found, behind = text.partition(self._style.end)
        if found:
            self._phase, self._held = Phase.BEHIND, ""
            self._say(_trimmed(thought), parts)
            return behind
        body = text[: len(text) - num_begun(text, self._style.end)]
        told = len(_trimmed(body))
        self._say(text[:told], parts)
        self._held = text[told:]
        return ""

    def _say(self, text: str, parts: list[Part]) -> None:
        if text and self._shows:
            parts.append(Reasoning(text))


def num_begun(text: str, marker: str) -> int:
    """Characters at the end of `text` with which `marker`, which it does not hold, may begin."""
    for number in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:number]):
            return number
    return 0


def _trimmed(text: str) -> str:
    """Without blanks at its end, up to so many."""
    return text[: max(len(text.rstrip()), len(text) - MAX_BLANKS)]


# How many tokens of a choice are thoughts.


_MOST_STARTS: Final = 256
"""More tokens than a marker has characters, with some that have no text."""


class CountingDetokenizer:
    """`inner`, whose text it watches from an `opening` that is not OUTSIDE."""

    def __init__(self, inner: Detokenizer, style: ReasoningStyle, opening: Opening) -> None:
        self._inner = inner
        self._style = style
        self._inside = opening is Opening.INSIDE
        self._is_opening = True
        self._tail = ""  # of the text, as much as may hold a part of the marker
        self._num_characters = 0
        self._starts: deque[int] = deque(maxlen=_MOST_STARTS)  # where the last tokens begin
        self._num_tokens = 0
        self._is_over = False

    @property
    def num_tokens(self) -> int:
        return self._num_tokens if self._inside else 0

    def feed(self, token_id: int) -> str:
        text = self._inner.feed(token_id)
        if not self._is_over:
            self._starts.append(self._num_characters)
            self._num_characters += len(text)
            self._num_tokens += 1
            self._tail += text
            self._watch()
        return text

    def flush(self) -> str:
        return self._inner.flush()

    def _watch(self) -> None:
        if self._is_opening and not self._has_opened():
            return
        end = self._style.end
        place = self._tail.find(end)
        if place < 0:
            self._tail = self._tail[-len(end) + 1 :]
            return
        begins = self._num_characters - len(self._tail) + place
        self._num_tokens -= sum(start >= begins for start in self._starts)
        self._is_over = True

    def _has_opened(self) -> bool:
        """Whether it is known by now that there are thoughts, or none."""
        said, start = self._tail.lstrip(BLANKS), self._style.start
        if len(self._tail) - len(said) <= MAX_BLANKS:
            if said.startswith(start):
                self._inside, self._is_opening = True, False
                self._tail = said[len(start) :]
                self._num_tokens = int(bool(self._tail))
                return True
            if start.startswith(said):
                return False
        self._is_opening = False
        self._is_over = not self._inside
        return self._inside
