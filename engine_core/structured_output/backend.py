"""Compiles grammars and fills masks with llguidance; owns its limits and the wording of its errors.

llguidance raises nothing for an invalid grammar: its matcher is in an error state from then on, in
which only an end token is allowed.
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

from engine_core.structured_output.matchers import (
    FREE,
    GrammarError,
    Matcher,
    ThinkingMatcher,
    TriggeredMatcher,
    mask_words,
)
from proto.errors import ModelError
from proto.grammar import GrammarSource

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LEXER_STATES: Final = 20_000
"""Per grammar; a state takes 1 to 2 kB."""
MAX_ERROR_CHARS: Final = 300
"""Maximum length of an error message for a client."""
WHITESPACE: Final = r"[ ]|\n[ ]{0,24}"
"""White space between the parts of JSON: a space, or a new line with indentation. It is bounded
because small models may otherwise generate white space for ever."""


class LLGuidanceMatcher:
    """A grammar of llguidance; always bound."""

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
        return _client_error(self.inner.get_error()) if self.inner.is_error() else ""


class LLGuidanceBackend:
    """Compiles grammars over the vocabulary of one tokenizer, and fills their masks.

    Every method may be called by any thread. tokenizer_json: path. vocab_size: of the model; its
    tokens beyond those of the tokenizer are never allowed. num_threads: threads that share the
    masks of a step.
    The constructor holds the interpreter lock for a fifth of a second for 49,000 tokens. It raises
    ModelError for a tokenizer that llguidance cannot read.
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
        except Exception as error:  # llguidance documents no type
            raise ModelError(
                f"{tokenizer_json}: no grammars with this tokenizer: {error}"
            ) from None
        self._limits = _limits()
        self._executor = LLExecutor(num_threads)

    def compile(self, source: GrammarSource) -> Matcher:
        """Compile a grammar; raises GrammarError."""
        if source.kind == "free":
            return FREE
        matcher = LLMatcher(
            self._tokenizer, _llguidance_source(source), log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            # The first mask reveals a grammar that no text satisfies, or that is too expensive.
            self.fill_masks([LLGuidanceMatcher(matcher)], _empty_masks(1, self.vocab_size))
        if matcher.is_error():
            raise GrammarError(_client_error(matcher.get_error()))
        compiled = LLGuidanceMatcher(matcher)
        if source.trigger or source.trigger_token_id is not None:
            return TriggeredMatcher(
                compiled, self, source.trigger.encode(), source.trigger_token_id
            )
        return compiled

    def fill_masks(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> None:
        """Fill a mask for each matcher: int32 [len(matchers), ceil(vocab_size / 32)]."""
        bound = []
        for row, matcher in enumerate(matchers):
            text_matcher = _text_matcher(matcher)
            if text_matcher.is_free:
                masks[row] = -1
            else:
                bound.append((_llguidance_matcher(text_matcher), row))
        if bound:
            fill_next_token_bitmask_par(self._executor, bound, masks)
        for mask, matcher in zip(masks, matchers, strict=True):
            if isinstance(matcher, ThinkingMatcher):
                matcher.edit_mask(mask)

    def text_of(self, token_id: int) -> bytes:
        """Return the text of a token; empty for a special token."""
        if self._tokenizer.is_special_token(token_id):
            return b""
        return self._tokenizer.decode_bytes([token_id])

    def tokens_of(self, text: bytes) -> list[int]:
        """Return token ids whose text this is."""
        return self._tokenizer.tokenize_bytes(text)


def _limits() -> LLParserLimits:
    """Return limits of about 20 ms per mask, and 100 ms for compiling most grammars."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _text_matcher(matcher: Matcher) -> Matcher:
    return matcher.text_matcher if isinstance(matcher, ThinkingMatcher) else matcher


def _llguidance_matcher(matcher: Matcher) -> LLMatcher:
    while isinstance(matcher, TriggeredMatcher):
        matcher = matcher.inner
    assert isinstance(matcher, LLGuidanceMatcher), "a matcher of another backend"
    return matcher.inner


def _empty_masks(rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
    return np.empty((rows, mask_words(vocab_size)), dtype=np.int32)


def _llguidance_source(source: GrammarSource) -> str:
    """Translate to a grammar of llguidance; raises GrammarError."""
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
    except Exception as error:  # a parser in Python that raises any type
        raise GrammarError(_client_error(f"neither Lark nor GBNF: {error}")) from None


def _client_error(error: str) -> str:
    """Return a message of llguidance for the client, on one line."""
    text = re.sub(r"\s+", " ", error.split("<non-verbose/>")[0]).strip()
    if text.startswith("NoExtension"):
        text = "no text satisfies it"
    return f"the grammar cannot be used: {text[:MAX_ERROR_CHARS] or 'it is too complex'}"
