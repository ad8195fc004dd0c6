"""Grammars by llguidance.

Owns its limits and the wording of its errors. A matcher of llguidance never raises for what a
grammar is: it is in an error state from then on, in which only an end token is allowed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par

from engine_core.structured_output.base import GrammarError, Matcher, mask_words
from engine_core.structured_output.dormant import DormantMatcher
from engine_core.structured_output.thinking import FREE
from proto.errors import ModelError
from proto.grammar import GrammarSource

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LEXER_STATES: Final = 20_000
"""Of one grammar, at 1 to 2 kB each."""
MAX_ERROR: Final = 300
"""Characters of what a client is told."""
WHITESPACE: Final = r"[ ]|\n[ ]{0,24}"
"""Between the parts of JSON: a space, or a new line that is indented. Without a bound a small
model may go on with blanks for ever."""
_BLANKS: Final = re.compile(r"\s+")


class LLGuidanceMatcher:
    """One matcher of llguidance."""

    is_free = False

    def __init__(self, matcher: LLMatcher) -> None:
        self.inner = matcher

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.inner.deep_copy())

    def consume(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.inner.consume_tokens(list(token_ids))

    @property
    def error(self) -> str:
        return _worded(self.inner.get_error()) if self.inner.is_error() else ""


class LLGuidanceBackend:
    """Grammars over the vocabulary of one tokenizer.

    tokenizer_json: path. vocab_size: of the model, which may have more tokens than the
    tokenizer; those are never allowed. num_threads: that masks of a step are shared by.
    Takes a fifth of a second for 49,000 tokens, without letting other Python threads run.
    Raises ModelError for a tokenizer that llguidance cannot read.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        try:
            self._tokenizer = LLTokenizer(
                str(tokenizer_json), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # what it raises is not said anywhere
            raise ModelError(
                f"{tokenizer_json}: no grammars with this tokenizer: {error}"
            ) from None
        self._limits = _limits()
        self._executor = LLExecutor(num_threads)

    def compile(self, source: GrammarSource) -> Matcher:
        if source.kind == "free":
            return FREE
        matcher = LLMatcher(self._tokenizer, _grammar(source), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # What no text satisfies shows in the first mask, as does what is too much work.
            self.fill([LLGuidanceMatcher(matcher)], _masks(1, self.vocab_size))
        if matcher.is_error():
            raise GrammarError(_worded(matcher.get_error()))
        compiled = LLGuidanceMatcher(matcher)
        if source.trigger or source.trigger_token_id is not None:
            return DormantMatcher(compiled, self, source.trigger.encode(), source.trigger_token_id)
        return compiled

    def fill(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> None:
        bound = []
        for row, matcher in enumerate(matchers):
            if matcher.is_free:
                masks[row] = -1
            else:
                bound.append((_inner(matcher), row))
        if bound:
            fill_next_token_bitmask_par(self._executor, bound, masks)

    def text_of(self, token_id: int) -> bytes:
        """Of an ordinary token; of one that stands for no text, none."""
        if self._tokenizer.is_special_token(token_id):
            return b""
        return self._tokenizer.decode_bytes([token_id])

    def tokens_of(self, text: bytes) -> list[int]:
        """Some tokens that make up this text."""
        return self._tokenizer.tokenize_bytes(text)


def _limits() -> LLParserLimits:
    """About 20 ms for a step, 100 ms for most of what is compiled."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _inner(matcher: Matcher) -> LLMatcher:
    while isinstance(matcher, DormantMatcher):
        matcher = matcher.inner
    assert isinstance(matcher, LLGuidanceMatcher), "a matcher of another backend"
    return matcher.inner


def _masks(rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
    return np.empty((rows, mask_words(vocab_size)), dtype=np.int32)


def _grammar(source: GrammarSource) -> str:
    """In the words of llguidance; raises GrammarError."""
    if source.kind == "json_schema":
        spacing: JsonCompileOptions = (
            {"whitespace_flexible": False} if source.compact else {"whitespace_pattern": WHITESPACE}
        )
        return LLMatcher.grammar_from_json_schema(source.source, spacing)
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.source)
    if source.kind == "choice":
        choices = " | ".join(map(json.dumps, json.loads(source.source)))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source.source))
    except Exception as error:  # a parser in Python, which raises whatever comes
        raise GrammarError(_worded(f"neither Lark nor GBNF: {error}")) from None


def _worded(error: str) -> str:
    """What llguidance says, on one line."""
    text = _BLANKS.sub(" ", error.split("<non-verbose/>")[0]).strip()
    if text.startswith("NoExtension"):
        text = "no text satisfies it"
    return f"the grammar cannot be used: {text[:MAX_ERROR] or 'it is too complex'}"
