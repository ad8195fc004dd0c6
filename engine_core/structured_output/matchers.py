"""Matchers: the position of one choice's text in its grammar. A mask says which tokens may follow.

    Matcher            what all of them have in common; a compiled grammar is one that has read
                       nothing, and each choice gets a copy
    FreeMatcher        allows every token
    TriggeredMatcher   free until a marker, such as the start of a tool call; then a grammar
    ThinkingMatcher   reasoning of limited length, then a grammar or free text

The matcher of llguidance is in `backend.py`. A matcher that allows only some of the tokens is
*bound*; masks of free ones need not be computed.
"""

import enum
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from proto.errors import InternalRequestError, InvalidRequestError
from proto.messages.sampling_params import BLANKS, MAX_BLANKS, ThinkingRule

if TYPE_CHECKING:
    from engine_core.structured_output.backend import LLGuidanceBackend

MaskRow = npt.NDArray[np.int32]
"""int32 [ceil(vocab_size / 32)]: one bit per token, set if allowed; the lowest bit comes first."""

_BLANKS: Final = BLANKS.encode()

FREE_SECONDS: Final = 0.002
"""Processor time of a mask that costs a grammar nothing; masks of JSON take 0.05 to 0.3 ms."""
SLOW_SECONDS: Final = 0.1
"""Processor time beyond FREE_SECONDS per mask after which a grammar is slow."""


def mask_words(vocab_size: int) -> int:
    """Return the length of a MaskRow."""
    return -(-vocab_size // 32)


class GrammarError(InvalidRequestError):
    """A grammar that is invalid or too expensive to compile; the message is sent to the client."""


class GrammarTimeoutError(GrammarError):
    """A grammar that needs more processor time to compile than it was given."""


class CompilerFailedError(InternalRequestError):
    """A grammar was not compiled because of the host, not because of itself; never cached."""


class GrammarCost:
    """What the masks of one grammar have cost; all of its matchers share it.

    The cost grows by the time of a mask beyond FREE_SECONDS, and falls where a mask takes less. So
    a grammar whose masks were slow becomes quick again after about a hundred quick masks.

    lock: held while a matcher of the grammar is used. Matchers of a grammar share a lexer, and
    llguidance waits for it without releasing the interpreter lock, which would stop all threads.
    step_seconds: processor time in the present step.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.step_seconds = 0.0
        self._seconds = 0.0

    @property
    def is_slow(self) -> bool:
        return self._seconds > SLOW_SECONDS

    def add(self, seconds: float) -> None:
        """Add processor time; a negative one is given back."""
        self._seconds = min(3 * SLOW_SECONDS, max(0.0, self._seconds + seconds))


class Matcher(Protocol):
    """The position of one choice's text in its grammar. Not thread-safe."""

    @property
    def cost(self) -> GrammarCost:
        """Of its grammar, shared with all copies."""

    def copy(self) -> "Matcher":
        """Return an independent matcher at the same position."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the text; a token that is not allowed sets `error`."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after the other; changes nothing."""

    @property
    def is_free(self) -> bool:
        """Whether every token is allowed next."""

    @property
    def error(self) -> str:
        """Why the text cannot continue, for the client; empty while it can."""


class FreeMatcher:
    """Allows every token: for text without a grammar. Each copy has its own cost and lock."""

    is_free = True
    error = ""

    def __init__(self) -> None:
        self.cost = GrammarCost()

    def copy(self) -> "FreeMatcher":
        return FreeMatcher()

    def consume(self, token_ids: Sequence[int]) -> None: ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)


FREE: Final = FreeMatcher()


class TriggeredMatcher:
    """Free until a trigger occurs in the text, then bound by the grammar of `inner`.

        text      Let me look it up. <tool>{"name": "find"}
        allowed   anything ─────────────── │ the grammar
                                           └ the trigger is complete

    The trigger may end within a token; the rest of that token is the beginning of the text that
    the grammar is for. trigger: UTF-8, empty for none. trigger_token_id: a token that is the
    trigger; None for none.
    """

    def __init__(
        self,
        inner: Matcher,
        backend: "LLGuidanceBackend",
        trigger: bytes,
        trigger_token_id: int | None = None,
        *,
        text_end: bytes = b"",
        is_triggered: bool = False,
    ) -> None:
        self.inner = inner
        self._backend = backend
        self._trigger = trigger
        self._trigger_token_id = trigger_token_id
        self._text_end = text_end  # shorter than the trigger
        self._is_triggered = is_triggered

    def copy(self) -> "TriggeredMatcher":
        return TriggeredMatcher(
            self.inner.copy(),
            self._backend,
            self._trigger,
            self._trigger_token_id,
            text_end=self._text_end,
            is_triggered=self._is_triggered,
        )

    @property
    def cost(self) -> GrammarCost:
        return self.inner.cost

    @property
    def is_free(self) -> bool:
        return not self._is_triggered

    @property
    def error(self) -> str:
        return self.inner.error if self._is_triggered else ""

    def consume(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self._is_triggered:
                self.inner.consume(token_ids[index:])
                return
            self._find_trigger(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._is_triggered:
            return self.inner.num_allowed(token_ids)
        reached = self.copy()
        for index, token_id in enumerate(token_ids, 1):
            reached.consume([token_id])
            if reached.error:
                return index - 1  # the rest of the token that completes the trigger is not allowed
            if not reached.is_free:
                return index + reached.inner.num_allowed(token_ids[index:])
        return len(token_ids)

    def _find_trigger(self, token_id: int) -> None:
        if token_id == self._trigger_token_id:
            self._is_triggered = True
            return
        if not self._trigger:
            return
        text = self._text_end + self._backend.text_of(token_id)
        before, found, after = text.partition(self._trigger)
        if found:
            self._is_triggered = True
            if after:
                self.inner.consume(self._backend.tokens_of(after))
        else:
            self._text_end = before[max(0, len(before) - len(self._trigger) + 1) :]


class ThinkingPhase(enum.Enum):
    """Where a text is. OPENING: before its first word, so reasoning may still begin."""

    OPENING = 0
    THINKING = 1
    ENDING = 2
    ANSWERING = 3


class ThinkingMatcher:
    """Lets the model reason freely, forces the end marker after the budget, then is `answer`.

        outputs   <think> a b c d | </think> | {"answer": 4}
        allowed   anything          the end    the grammar of the answer
                  ───── budget ────┘ marker

    Markers are found in the text as well as by their tokens, because models tokenize them freely.
    eos_token_ids: end tokens, which are masked during reasoning if the answer has a grammar.
    """

    def __init__(
        self,
        answer: Matcher,
        rule: ThinkingRule,
        backend: "LLGuidanceBackend",
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._answer = answer
        self._rule = rule
        self._backend = backend
        self._start, self._end = rule.start.encode(), rule.end.encode()
        self._has_grammar = not isinstance(answer, FreeMatcher)
        self._is_bound = not answer.is_free  # from the first token of the answer
        self._eos_token_ids = eos_token_ids if self._is_bound else ()
        self._opening_tokens: list[int] = []  # consumed by the answer if no reasoning begins
        self._text = b""  # OPENING: all of it; THINKING: its end, shorter than the end marker
        self._num_thinking_tokens = 0
        self._num_forced_tokens = 0
        self.phase = ThinkingPhase.OPENING
        if rule.begun:
            self._begin_thinking()
        elif self._is_bound and rule.start_token_id is None:
            self.phase = ThinkingPhase.ANSWERING

    def copy(self) -> "ThinkingMatcher":
        answer = self._answer.copy()
        made = ThinkingMatcher(answer, self._rule, self._backend)
        made._is_bound, made._eos_token_ids = self._is_bound, self._eos_token_ids
        made._opening_tokens = self._opening_tokens.copy()
        made._text, made.phase = self._text, self.phase
        made._num_thinking_tokens = self._num_thinking_tokens
        made._num_forced_tokens = self._num_forced_tokens
        return made

    @property
    def cost(self) -> GrammarCost:
        return self._answer.cost

    @property
    def text_matcher(self) -> Matcher:
        """The matcher whose mask `edit_mask` has to edit."""
        if self.phase in (ThinkingPhase.THINKING, ThinkingPhase.ENDING):
            return FREE
        return self._answer

    @property
    def is_free(self) -> bool:
        if self.phase is ThinkingPhase.ENDING:
            return False
        if self.phase is ThinkingPhase.THINKING and self._eos_token_ids:
            return False
        return self.text_matcher.is_free

    @property
    def forced_end(self) -> list[int]:
        """The rest of the end marker, once the budget is used up; else empty."""
        if self.phase is not ThinkingPhase.ENDING:
            return []
        return list(self._rule.end_token_ids[self._num_forced_tokens :])

    @property
    def is_always_free(self) -> bool:
        """Whether every token is allowed from now on."""
        return self.phase is ThinkingPhase.ANSWERING and not self._has_grammar

    @property
    def error(self) -> str:
        return self._answer.error if self.phase is ThinkingPhase.ANSWERING else ""

    def edit_mask(self, mask: MaskRow) -> None:
        """Edit the mask of `text_matcher`: force the end marker, or allow the start marker."""
        bits = mask.view(np.uint32)
        if self.phase is ThinkingPhase.ENDING:
            bits[:] = 0
            _allow(bits, self.forced_end[0])
        elif self.phase is ThinkingPhase.THINKING:
            for token_id in self._eos_token_ids:
                bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        elif self.phase is ThinkingPhase.OPENING and self._is_bound:
            assert self._rule.start_token_id is not None
            _allow(bits, self._rule.start_token_id)

    def consume(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self.phase is ThinkingPhase.ANSWERING:
                self._answer.consume(token_ids[index:])
                return
            if self.phase is ThinkingPhase.OPENING:
                self._consume_opening(token_id)
            else:
                self._consume_thinking(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        reached = self.copy()
        for index, token_id in enumerate(token_ids):
            if reached.phase is ThinkingPhase.ANSWERING:
                return index + reached._answer.num_allowed(token_ids[index:])
            if not reached._allows(token_id):
                return index
            reached.consume([token_id])
            if reached.error:
                return index  # the rest of the token that ends the reasoning is not allowed
        return len(token_ids)

    def _allows(self, token_id: int) -> bool:
        """Return whether a token may follow before the answer."""
        if self.phase is ThinkingPhase.ENDING:
            return token_id == self._rule.end_token_ids[self._num_forced_tokens]
        if self.phase is ThinkingPhase.THINKING:
            return token_id not in self._eos_token_ids
        is_start = self._is_bound and token_id == self._rule.start_token_id
        return is_start or self._answer.num_allowed([token_id]) == 1

    def _consume_opening(self, token_id: int) -> None:
        """Begin reasoning at the start marker; begin the answer at any other text.

        White space may precede the marker, except if the answer is bound by a grammar. The
        conditions must equal those of the front end (api_server/parsers/reasoning.py).
        """
        is_start = token_id == self._rule.start_token_id
        if is_start and not self._text.lstrip(_BLANKS):
            self._text = b""
            self._begin_thinking()
            return
        self._opening_tokens.append(token_id)
        self._text += self._backend.text_of(token_id)
        stripped = self._text.lstrip(_BLANKS)
        few_blanks = len(self._text) - len(stripped) <= MAX_BLANKS
        if few_blanks and stripped.startswith(self._start) and not self._is_bound:
            self._text = stripped[len(self._start) :]
            self._begin_thinking()
        elif self._is_bound or is_start or not (few_blanks and self._start.startswith(stripped)):
            self.phase = ThinkingPhase.ANSWERING
            self._answer.consume(self._opening_tokens)

    def _begin_thinking(self) -> None:
        self.phase = ThinkingPhase.THINKING
        if self._rule.budget == 0:
            self.phase = ThinkingPhase.ENDING

    def _consume_thinking(self, token_id: int) -> None:
        text = self._text + self._backend.text_of(token_id)
        before, found, after = text.partition(self._end)
        if found or self._rule.end_token_ids == (token_id,):
            self.phase = ThinkingPhase.ANSWERING
            if after := after.lstrip():
                self._answer.consume(self._backend.tokens_of(after))
            return
        self._text = before[max(0, len(before) - len(self._end) + 1) :]
        if self.phase is ThinkingPhase.ENDING:
            self._num_forced_tokens += 1
            if self._num_forced_tokens == len(self._rule.end_token_ids):
                self.phase = ThinkingPhase.ANSWERING
            return
        self._num_thinking_tokens += 1
        if self._num_thinking_tokens == self._rule.budget:
            self.phase = ThinkingPhase.ENDING


def _allow(bits: npt.NDArray[np.uint32], token_id: int) -> None:
    bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
