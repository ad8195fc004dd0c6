"""A text that begins with thoughts, which no grammar is for and which may be limited.

    outputs   <think> a b c d | </think> | {"answer": 4}
    allowed   anything          the end    what the grammar says
              ───── budget ────┘ is forced when it is used up

Owns the count of the thoughts' tokens and where their end is, which is found in the text as well
as by its token: models spell a marker as they like. Knows nothing of requests.
"""

import enum
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from engine_core.structured_output.base import GrammarBackend, MaskRow, Matcher
from engine_core.structured_output.dormant import Texts
from proto.sampling_params import BLANKS, MAX_BLANKS, ThinkingRule

_BLANKS: Final = BLANKS.encode()


class Phase(enum.Enum):
    """Where a text stands. OPENING: it may still begin with thoughts."""

    OPENING = 0
    THINKING = 1
    ENDING = 2
    ANSWERING = 3


class FreeMatcher:
    """Of a text that has no grammar."""

    is_free = True
    error = ""

    def copy(self) -> "FreeMatcher":
        return self

    def consume(self, token_ids: Sequence[int]) -> None:
        """Whatever it is."""


class ThinkingMatcher:
    """Lets the thoughts be, ends them in time, and then is `answer`.

    eos_token_ids: with which a text may end, but not before there is an answer that has to be of
    some form.
    """

    def __init__(
        self, answer: Matcher, rule: ThinkingRule, texts: Texts, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._answer = answer
        self._rule = rule
        self._texts = texts
        self._start, self._end = rule.start.encode(), rule.end.encode()
        self._has_grammar = not isinstance(answer, FreeMatcher)
        self._holds = not answer.is_free  # from the first token of the answer
        self._eos_token_ids = eos_token_ids if self._holds else ()
        self._unread: list[int] = []  # tokens with which thoughts might have begun
        self._seen = b""  # the beginning of the text; when thinking, its end
        self._num_thoughts = 0
        self._num_forced = 0
        self.phase = Phase.OPENING
        if rule.begun:
            self._think()
        elif self._holds and rule.start_token_id is None:
            self.phase = Phase.ANSWERING

    def copy(self) -> "ThinkingMatcher":
        """Of one that has seen nothing."""
        assert not self._seen
        return ThinkingMatcher(self._answer.copy(), self._rule, self._texts, self._eos_token_ids)

    @property
    def text_matcher(self) -> Matcher:
        """What says which tokens are allowed, before `mark` has its way."""
        if self.phase in (Phase.THINKING, Phase.ENDING):
            return FREE
        return self._answer

    @property
    def is_free(self) -> bool:
        if self.phase is Phase.ENDING or (self.phase is Phase.THINKING and self._eos_token_ids):
            return False
        return self.text_matcher.is_free

    @property
    def is_over(self) -> bool:
        """Nothing will be forbidden any more."""
        return self.phase is Phase.ANSWERING and not self._has_grammar

    @property
    def error(self) -> str:
        return self._answer.error if self.phase is Phase.ANSWERING else ""

    def mark(self, mask: MaskRow) -> None:
        """Change the mask that `text_matcher` made."""
        bits = mask.view(np.uint32)
        if self.phase is Phase.ENDING:
            bits[:] = 0
            _allow(bits, self._rule.end_token_ids[self._num_forced])
        elif self.phase is Phase.THINKING:
            for token_id in self._eos_token_ids:
                bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        elif self.phase is Phase.OPENING and self._holds:
            assert self._rule.start_token_id is not None
            _allow(bits, self._rule.start_token_id)

    def consume(self, token_ids: Sequence[int]) -> None:
        for place, token_id in enumerate(token_ids):
            if self.phase is Phase.ANSWERING:
                self._answer.consume(token_ids[place:])
                return
            if self.phase is Phase.OPENING:
                self._open(token_id)
            else:
                self._go_on(token_id)

    def _open(self, token_id: int) -> None:
        """Thoughts may begin after blanks; a grammar has them begin at once or never.

        Where the front end sees thoughts begin (api_server/parsers/reasoning.py), they begin here.
        """
        is_start = token_id == self._rule.start_token_id
        if is_start and not self._seen.lstrip(_BLANKS):
            self._seen = b""
            self._think()
            return
        self._unread.append(token_id)
        self._seen += self._texts.text_of(token_id)
        said = self._seen.lstrip(_BLANKS)
        few = len(self._seen) - len(said) <= MAX_BLANKS
        if few and said.startswith(self._start) and not self._holds:
            self._seen = said[len(self._start) :]
            self._think()
        elif self._holds or is_start or not (few and self._start.startswith(said)):
            self.phase = Phase.ANSWERING
            self._answer.consume(self._unread)

    def _think(self) -> None:
        self.phase = Phase.THINKING
        if self._rule.budget == 0:
            self.phase = Phase.ENDING

    def _go_on(self, token_id: int) -> None:
        text = self._seen + self._texts.text_of(token_id)
        before, found, behind = text.partition(self._end)
        if found or self._rule.end_token_ids == (token_id,):
            self.phase = Phase.ANSWERING
            if behind := behind.lstrip():
                self._answer.consume(self._texts.tokens_of(behind))
            return
        self._seen = before[max(0, len(before) - len(self._end) + 1) :]
        if self.phase is Phase.ENDING:
            self._num_forced += 1
            if self._num_forced == len(self._rule.end_token_ids):
                self.phase = Phase.ANSWERING
            return
        self._num_thoughts += 1
        if self._num_thoughts == self._rule.budget:
            self.phase = Phase.ENDING


FREE = FreeMatcher()


def fill(
    backend: GrammarBackend, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]
) -> None:
    """A row of `masks` [len(matchers), words] for each, thoughts and free ones too."""
    backend.fill(
        [each.text_matcher if isinstance(each, ThinkingMatcher) else each for each in matchers],
        masks,
    )
    for mask, matcher in zip(masks, matchers, strict=True):
        if isinstance(matcher, ThinkingMatcher):
            matcher.mark(mask)


def _allow(bits: npt.NDArray[np.uint32], token_id: int) -> None:
    bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
