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
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask

from engine_core.structured_output.matchers import (
    FREE,
    GrammarCost,
    GrammarError,
    Matcher,
    ThinkingMatcher,
    ThinkingPhase,
    TriggeredMatcher,
    mask_words,
)
from proto.errors import ModelError, shown
from proto.messages.grammar import GrammarSource

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LEXER_STATES: Final = 20_000
"""Per grammar; a state takes 1 to 2 kB."""
MAX_ERROR_CHARS: Final = 300
"""Maximum length of an error message for a client."""
WHITESPACE: Final = r"[ ]|\n[ ]{0,24}"
"""White space between the parts of JSON: a space, or a new line with indentation. It is bounded
because small models may otherwise generate white space for ever."""
ESCAPES: Final = r'"\bfnrt'
"""Characters that JSON strings may have after a backslash. Without `u` and `/` a text has one
spelling, so that a property cannot be repeated under another spelling of its name."""
MAX_ITEMS_IN_ROW: Final = 8_000
"""Enough for an object with 2,000 optional properties, whose first mask takes about 20 ms."""
_WALK_TOKENS: Final = 32
_PREFERRED_TEXTS: Final = ('"', "}", "]", '":', ":", ",", "{", "[", "0", "-")
"""Texts that lead through a JSON value on a short way."""

_REFERENCE_ERRORS: Final = (
    (
        re.compile(r"oneOf constraints are not supported.*"),
        "oneOf in the target of a $ref is only supported in definitions",
    ),
    (re.compile(r"Resource '(.*?)' is not present.*"), r"$ref '\1' is not within the schema"),
    (re.compile(r"(?:Pointer|Anchor) '(.*?)' does not exist.*"), r"$ref '\1' does not exist"),
)
"""Messages of llguidance about references, and ours."""


class LLGuidanceMatcher:
    """A grammar of llguidance; always bound."""

    is_free = False

    def __init__(self, matcher: LLMatcher, cost: GrammarCost, unlocked: "_Unlocked") -> None:
        self.inner = matcher
        self.cost = cost
        self._unlocked = unlocked

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.inner.deep_copy(), self.cost, self._unlocked)

    def consume(self, token_ids: Sequence[int]) -> None:
        if self.cost.is_slow:
            self._unlocked.consume(self.inner, token_ids)
        elif token_ids:
            self.inner.consume_tokens(list(token_ids))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0 if self.inner.is_error() else self.inner.validate_tokens(list(token_ids))

    @property
    def error(self) -> str:
        return _client_error(self.inner.get_error()) if self.inner.is_error() else ""


class _Unlocked:
    """Consumes tokens without the interpreter lock: for grammars that take long for a token.

    llguidance releases the lock only for a batch of matchers, so a second one, of a grammar that
    allows any text, makes a batch.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._executor = LLExecutor(1)
        self._any_text = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(r"(?s:.*)"), log_level=0)

    def consume(self, matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            other = self._any_text.deep_copy()
            self._executor.consume_token_par([(matcher, token_id), (other, token_id)])


class LLGuidanceBackend:
    """Compiles grammars over the vocabulary of one tokenizer, and fills their masks.

    Every method may be called by any thread. tokenizer_json: path. vocab_size: of the model; its
    tokens beyond those of the tokenizer are never allowed.
    The constructor holds the interpreter lock for a fifth of a second for 49,000 tokens. It raises
    ModelError for a tokenizer that llguidance cannot read.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.vocab_size = vocab_size
        eos = list(eos_token_ids)
        try:
            tokenizer = LLTokenizer(str(tokenizer_json), n_vocab=vocab_size, eos_token=eos)
            literal = TokenizerWrapper(_LiteralTokenizer(tokenizer))
            self._tokenizer = LLTokenizer(literal, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:  # llguidance documents no type
            raise ModelError(
                f"{tokenizer_json}: no grammars with this tokenizer: {error}"
            ) from None
        self._end_mask = self.empty_masks(1)[0]
        self._end_mask[:] = 0
        for token_id in eos:
            self._end_mask.view(np.uint32)[token_id >> 5] |= 1 << (token_id & 31)
        self._limits = _limits()
        self._unlocked = _Unlocked(self._tokenizer)

    def compile(self, source: GrammarSource) -> Matcher:
        """Compile a grammar; raises GrammarError."""
        if source.kind == "free":
            return FREE
        matcher = LLMatcher(
            self._tokenizer, _llguidance_source(source), log_level=0, limits=self._limits
        )
        compiled = LLGuidanceMatcher(matcher, GrammarCost(), self._unlocked)
        if not matcher.is_error():
            # The first mask reveals a grammar that no text satisfies, or that is too expensive.
            self.fill_masks([compiled], self.empty_masks(1))
        if matcher.is_error():
            raise GrammarError(_client_error(matcher.get_error()))
        if source.trigger or source.trigger_token_id is not None:
            return TriggeredMatcher(
                compiled, self, source.trigger.encode(), source.trigger_token_id
            )
        return compiled

    def explore(self, matcher: Matcher) -> str:
        """Return the error that a short text of the grammar meets; empty if it meets none.

        A grammar can exceed the limits after its first token only. Takes up to 32 masks.
        """
        explored, mask = matcher.copy(), self.empty_masks(1)
        preferred = [
            token_ids[0]
            for token_ids in map(self.tokens_of, map(str.encode, _PREFERRED_TEXTS))
            if len(token_ids) == 1
        ]
        for _ in range(_WALK_TOKENS):
            self.fill_masks([explored], mask)
            if explored.error or explored.is_free:
                return explored.error
            text_mask = mask[0] & ~self._end_mask
            token_id = next((one for one in preferred if _allows(text_mask, one)), None)
            if token_id is None:
                words = np.flatnonzero(text_mask)
                if len(words) == 0:
                    return ""
                word = int(text_mask.view(np.uint32)[words[0]])
                token_id = 32 * int(words[0]) + (word & -word).bit_length() - 1
            explored.consume([token_id])
        return explored.error

    def empty_masks(self, rows: int) -> npt.NDArray[np.int32]:
        """Return an array for `fill_masks`, with any content."""
        return np.empty((rows, mask_words(self.vocab_size)), dtype=np.int32)

    def fill_masks(self, matchers: Sequence[Matcher], masks: npt.NDArray[np.int32]) -> None:
        """Fill a mask for each matcher: int32 [len(matchers), ceil(vocab_size / 32)]."""
        for row, matcher in enumerate(matchers):
            text_matcher = _text_matcher(matcher)
            if text_matcher.is_free:
                masks[row] = -1
            else:
                inner = _llguidance_matcher(text_matcher)
                fill_next_token_bitmask(inner, masks, row)
                if not inner.is_error() and not inner.is_accepting():
                    masks[row] &= ~self._end_mask
            if isinstance(matcher, ThinkingMatcher):
                matcher.edit_mask(masks[row])

    def forced_tokens(self, matcher: Matcher) -> list[int]:
        """Return the next tokens up to the first position where more than one is allowed.

        At each of these positions the mask has only this token. Takes 10 to 40 µs.
        """
        if isinstance(matcher, ThinkingMatcher) and matcher.phase is not ThinkingPhase.ANSWERING:
            return matcher.forced_end
        text_matcher = _text_matcher(matcher)
        if text_matcher.is_free:
            return []
        inner = _llguidance_matcher(text_matcher)
        return [] if inner.is_error() or inner.is_stopped() else inner.compute_ff_tokens()

    def text_of(self, token_id: int) -> bytes:
        """Return the text of a token; empty for a special token."""
        if self._tokenizer.is_special_token(token_id):
            return b""
        return self._tokenizer.decode_bytes([token_id])

    def tokens_of(self, text: bytes) -> list[int]:
        """Return token ids whose text this is."""
        return self._tokenizer.tokenize_bytes(text)


class _LiteralTokenizer:
    """The tokenizer for texts that a grammar forces: the text of a special token is plain text.

    llguidance calls it with such texts, for example a literal that contains "<|im_end|>", which
    must not become the token that ends a message. Has the attributes of a `TokenizerWrapper`.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = range(tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token, None
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in vocabulary]
        self.special_token_ids = [one for one in vocabulary if tokenizer.is_special_token(one)]
        texts = sorted({self.tokens[one] for one in self.special_token_ids} - {b""}, reverse=True)
        self._special = (
            re.compile(b"(" + b"|".join(map(re.escape, texts)) + b")") if texts else None
        )

    def __call__(self, text: bytes) -> list[int]:
        if self._special is None:
            return self._tokenizer.tokenize_bytes(text)
        token_ids: list[int] = []
        for index, part in enumerate(self._special.split(text)):
            if index % 2:
                token_ids += self._tokenizer.greedy_tokenize(part.decode())
            elif part:
                token_ids += self._tokenizer.tokenize_bytes(part)
        return token_ids


def _limits() -> LLParserLimits:
    """Return limits of about 20 ms per mask, and 100 ms for compiling most grammars."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
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


def _allows(mask: npt.NDArray[np.int32], token_id: int) -> bool:
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


def _llguidance_source(source: GrammarSource) -> str:
    """Translate to a grammar of llguidance; raises GrammarError."""
    if source.kind == "json_schema":
        options: JsonCompileOptions = {"json_allowed_escapes": ESCAPES}
        if source.compact:
            options["whitespace_flexible"] = False
        else:
            options["whitespace_pattern"] = WHITESPACE
        return LLMatcher.grammar_from_json_schema(source.source, options)
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.source)
    if source.kind == "choice":
        # One terminal: tens of thousands of rules would exceed the limits.
        choices = " | ".join(map(json.dumps, json.loads(source.source)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source.source))
    except Exception as error:  # a parser in Python that raises any type
        raise GrammarError(_client_error(f"neither Lark nor GBNF: {error}")) from None


def _client_error(error: str) -> str:
    """Return a message of llguidance for the client, on one line."""
    text = error.split("<non-verbose/>")[0]
    # a regular expression stands there up to three times
    regex, found, cause = text.partition("regex parse error:\n")[2].partition("\nerror: ")
    if found:
        regex, cause = (each.lstrip().partition("\n")[0] for each in (regex, cause))
        text = f"invalid regular expression {shown(regex)}: {cause}"
    text = re.sub(r"\s+", " ", text).strip()
    if text.startswith("NoExtension"):
        text = "no text satisfies it"
    for pattern, message in _REFERENCE_ERRORS:
        text = pattern.sub(message, text)
    return f"the grammar cannot be used: {text[:MAX_ERROR_CHARS] or 'it is too complex'}"
