"""Changes of logits before sampling: penalties, biases, bad words, allowed tokens.

Few requests use them, so `SamplingParams` has one field for all. The order in which
the changes are made is the sampler's, see worker/sampling/sampler.py.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from proto.errors import require, shown
from proto.messages.parameters import Number, numbers_of

MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
"""Limit so that logits multiplied or divided by it stay finite."""
MAX_BIAS: Final = 100.0
MAX_BIASED_TOKENS: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_TOKENS: Final = 1024
"""Sum over all bad words of a request."""
WAYS_TO_SPELL: Final = 2
"""A word has different tokens after a space and at the beginning of a text."""


class LogitEdits(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Changes of the logits of one request; the defaults change nothing.

    repetition_penalty: Keskar et al. 2019, CTRL, section 4.1.
    bias_token_ids, bias_values: added to the logits of these tokens; of the same length.
    bad_words: sequences of token ids that must not occur in the outputs, [tokens] each.
    allowed_token_ids: the only tokens that can be sampled; None allows all.
    """

    presence_penalty: Annotated[float, Number(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Number(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)] = (
        1.0
    )
    bias_token_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens of prompt and outputs."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def validate(self, vocab_size: int, suppressed_ids: frozenset[int]) -> None:
        """Raise InvalidRequestError naming the first parameter out of range.

        suppressed_ids: tokens that cannot be sampled for the first min_tokens outputs.
        """
        for name, number in LOGIT_EDIT_NUMBERS.items():
            number.check(name, getattr(self, name))
        self._validate_bias(vocab_size)
        self._validate_bad_words(vocab_size)
        self._validate_allowed(vocab_size, suppressed_ids)

    def _validate_bias(self, vocab_size: int) -> None:
        require(
            len(self.bias_token_ids) == len(self.bias_values),
            "logit_bias",
            "has another number of tokens than of values",
        )
        require(
            len(self.bias_token_ids) <= MAX_BIASED_TOKENS,
            "logit_bias",
            f"names at most {MAX_BIASED_TOKENS} tokens, got {len(self.bias_token_ids)}",
        )
        require_token_ids(self.bias_token_ids, vocab_size, "logit_bias")
        require(
            len(set(self.bias_token_ids)) == len(self.bias_token_ids),
            "logit_bias",
            "names a token more than once",
        )
        for value in self.bias_values:
            require(
                math.isfinite(value) and abs(value) <= MAX_BIAS,
                "logit_bias",
                f"takes values between -{MAX_BIAS:g} and {MAX_BIAS:g}, got {value}",
            )

    def _validate_bad_words(self, vocab_size: int) -> None:
        most = MAX_BAD_WORDS * WAYS_TO_SPELL
        require(
            len(self.bad_words) <= most,
            "bad_words",
            f"at most {most} sequences of tokens, got {len(self.bad_words)}",
        )
        num_tokens = sum(map(len, self.bad_words))
        require(
            num_tokens <= MAX_BAD_WORD_TOKENS,
            "bad_words",
            f"have at most {MAX_BAD_WORD_TOKENS} tokens together, got {num_tokens}",
        )
        for word in self.bad_words:
            require(len(word) > 0, "bad_words", "must not be empty")
            require_token_ids(word, vocab_size, "bad_words")

    def _validate_allowed(self, vocab_size: int, suppressed_ids: frozenset[int]) -> None:
        """Check that at every step at least one token can be sampled."""
        last_ids = suppressed_ids | {word[-1] for word in self.bad_words}
        if self.allowed_token_ids is None:
            require(len(last_ids) < vocab_size, "bad_words", "leave no token to choose")
            return
        allowed = set(self.allowed_token_ids)
        require(len(allowed) > 0, "allowed_token_ids", "must not be empty")
        require_token_ids(self.allowed_token_ids, vocab_size, "allowed_token_ids")
        require(
            not allowed <= last_ids,
            "allowed_token_ids",
            "leaves no token to choose beside what bad_words and min_tokens forbid",
        )


LOGIT_EDIT_NUMBERS: Final = numbers_of(LogitEdits)
"""Fields that clients send under the same name."""


def require_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError for a token id outside the vocabulary.

    Uses min and max because they run in C: a whole vocabulary takes a few milliseconds.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        require(
            False, param, f"token id {shown(wrong)} is outside the vocabulary [0, {vocab_size})"
        )
