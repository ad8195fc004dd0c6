"""Sampling and stop parameters of a request.

The engine applies the stop rules and limits, the worker the rest. Stop strings are not here: the
front end applies them to the text.
"""

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from proto.errors import require, shown
from proto.messages.logit_edits import LogitEdits, require_token_ids
from proto.messages.parameters import Number, numbers_of

MAX_PATTERN_SIZE: Final = 256
MAX_REPEATED_TOKENS: Final = 4096
"""Maximum of pattern size times repetitions, because they are compared at every token."""


class RepetitionDetection(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Ends a request whose outputs end with a repeated pattern.

    min_pattern_size, max_pattern_size: size of the pattern in tokens.
    min_count: number of consecutive repetitions that ends the request.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def validate(self) -> None:
        """Raise InvalidRequestError for values out of range."""
        name = "repetition_detection"
        require(
            1 <= self.max_pattern_size <= MAX_PATTERN_SIZE,
            name,
            f"takes a max_pattern_size between 1 and {MAX_PATTERN_SIZE}, "
            f"got {shown(self.max_pattern_size)}",
        )
        require(
            1 <= self.min_pattern_size <= self.max_pattern_size,
            name,
            f"takes a min_pattern_size between 1 and max_pattern_size, "
            f"got {shown(self.min_pattern_size)}",
        )
        require(
            self.min_count >= 2 and self.min_count * self.max_pattern_size <= MAX_REPEATED_TOKENS,
            name,
            f"takes a min_count of 2 or more, and at most {MAX_REPEATED_TOKENS} tokens of "
            f"min_count times max_pattern_size, got {shown(self.min_count)}",
        )

    def is_found(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens end with a pattern that occurs `min_count` times in a row.

        size 2, count 3     x a b a b a b       the last 6 tokens without the first 2
                              |-------|         equal the last 6 without the last 2
                                  |-------|
        """
        for size in range(self.min_pattern_size, self.max_pattern_size + 1):
            length = size * self.min_count
            if length > len(token_ids):
                return False
            if token_ids[-1] == token_ids[-1 - size]:
                tail = token_ids[-length:]
                if tail[size:] == tail[:-size]:
                    return True
        return False


MAX_MARKER_CHARACTERS: Final = 64
MAX_MARKER_TOKENS: Final = 64
MAX_BUDGET: Final = 1 << 31
BLANKS: Final = " \t\n\r\v\f"
"""White space allowed before the start marker, each one byte and one character long."""
MAX_BLANKS: Final = 64
"""Maximum white space before the start marker; after more, the text is an answer."""


class ThinkingRule(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Markers and budget of reasoning at the beginning of an output.

        prompt | <think> Which city? ... | </think> | text under the grammar
                         budget             forced

    begun: the prompt contains the start marker already, or the model uses none.
    start, end: texts of the markers; start_token_id: of a start marker that is one token.
    end_token_ids: the end marker; forced once the budget is used up.
    budget: maximum tokens between the markers; None for no limit.
    """

    begun: bool
    start: str
    end: str
    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None
    budget: int | None = None

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for values that a front end of tokend does not send."""
        name = "thinking_token_budget"
        require(
            bool(self.start and self.end and self.end_token_ids),
            name,
            "needs markers of reasoning that are not empty",
        )
        require(
            max(len(self.start), len(self.end)) <= MAX_MARKER_CHARACTERS
            and len(self.end_token_ids) <= MAX_MARKER_TOKENS,
            name,
            f"takes markers of reasoning of at most {MAX_MARKER_CHARACTERS} characters and "
            f"{MAX_MARKER_TOKENS} tokens",
        )
        start_ids = () if self.start_token_id is None else (self.start_token_id,)
        require_token_ids((*start_ids, *self.end_token_ids), vocab_size, name)
        require(
            self.budget is None or 0 <= self.budget <= MAX_BUDGET,
            name,
            f"must be between 0 and {MAX_BUDGET}, got {shown(self.budget)}",
        )


MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGPROBS: Final = 20
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_TEMPERATURE: Final = 1e4
"""Far beyond it every token is as likely as any other."""
MAX_LENGTH_PENALTY: Final = 5.0
"""Beyond ±5 the scores of long sequences exceed float32."""
EarlyStopping = bool | Literal["never"]
GREEDY_TEMPERATURE: Final = 1e-5
"""Below this temperature a row is greedy."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Sampling and stopping rules of one request; see docs/api.md for those that are a Number.

    max_tokens: most output tokens, at least 1.
    min_tokens: stop tokens are not drawn before this many outputs.
    top_k: keep the k best tokens; 0 keeps all.
    stop_token_ids: end the request; the last token stays in the output ids.
    eos_token_ids: the model's own end tokens, off with ignore_eos.
    logprobs / prompt_logprobs: how many top alternatives in addition to the
        chosen token; None for no logprobs.
    beam_width: hypotheses of a beam search, as many as the request has choices; 0 for
        none. The choices are then the best sequences that were found, best first.
    length_penalty: a finished hypothesis scores (sum of log-probabilities) /
        (number of tokens) ** length_penalty.
    return_routed_experts: the output has the experts that computed each token.
    early_stopping: True ends the search at beam_width finished hypotheses; False when no
        unfinished one has a better score now; "never" when none can get one.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: Annotated[float, Number(0.0, MAX_TEMPERATURE, value_for_beams=0.0)] = 1.0
    top_k: int = 0
    top_p: Annotated[float, Number(0.0, 1.0, above_low=True)] = 1.0
    min_p: Annotated[float, Number(0.0, 1.0)] = 0.0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    edits: LogitEdits | None = None
    logprob_token_ids: tuple[int, ...] = ()
    repetition: RepetitionDetection | None = None
    return_routed_experts: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_candidates(self) -> int:
        """Number of best next tokens that a row of a beam search reports.

        Stop tokens end hypotheses, and `beam_width` others must remain.
        """
        return self.beam_width and self.beam_width + len(self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """All token ids that end this request."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return frozenset(self.stop_token_ids) | frozenset(eos)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first parameter out of range."""
        require(
            self.max_tokens >= 1, "max_tokens", f"must be at least 1, got {shown(self.max_tokens)}"
        )
        require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {shown(self.min_tokens)}",
        )
        require(self.top_k >= 0, "top_k", f"must be 0 (all) or more, got {shown(self.top_k)}")
        for name, number in SAMPLING_NUMBERS.items():
            number.check(name, getattr(self, name))
        require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
        )
        require_token_ids(self.stop_token_ids, vocab_size, "stop_token_ids")
        self._validate_beams(vocab_size)
        self._validate_logprobs(vocab_size)
        if self.edits is not None:
            suppressed_ids = self.stop_ids if self.min_tokens else frozenset()
            self.edits.validate(vocab_size, suppressed_ids)
        if self.repetition is not None:
            self.repetition.validate()

    def _validate_logprobs(self, vocab_size: int) -> None:
        counts = (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
        for name, number in counts:
            require(
                number is None or 0 <= number <= MAX_LOGPROBS,
                name,
                f"must be between 0 and {MAX_LOGPROBS}, got {shown(number)}",
            )
        ids = self.logprob_token_ids
        require(
            len(ids) <= MAX_LOGPROB_TOKEN_IDS,
            "logprob_token_ids",
            f"at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(ids)}",
        )
        require_token_ids(ids, vocab_size, "logprob_token_ids")
        require(not ids or self.logprobs is not None, "logprob_token_ids", "needs logprobs")

    def _validate_beams(self, vocab_size: int) -> None:
        require(
            self.beam_width >= 0 and self.num_candidates <= vocab_size,
            "n",
            f"asks for too many beams for {vocab_size} tokens, got {shown(self.beam_width)}",
        )
        require(
            abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
            "length_penalty",
            f"must be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}, "
            f"got {self.length_penalty}",
        )


SAMPLING_NUMBERS: Final = numbers_of(SamplingParams)
"""Fields that clients send under the same name."""
DRAW_PARAMETERS: Final[dict[str, int | float]] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
}
"""Fields that decide which tokens of a row can be drawn, with defaults that change nothing.

The arrays of the worker are derived from this table, see worker/sampling/row_params.py.
"""
