"""Prompts as token ids, checked against the vocabulary and the usable length.

Owns the rules for what a prompt may be. A string and a list of ids look alike
after this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from api_server.text.tokenizer import ALL, ModelTokenizer, Truncation
from proto.errors import InvalidRequestError, shown

MAX_PROMPTS: Final = 1024
SHRINK: Final = 4
"""A tokenizer's normaliser may shorten a text, hardly to a quarter."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: [num_prompt_tokens], at least one.

    text: None when the client sent ids, or when not all of it is kept.
    """

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns a field of a request into prompts.

    max_model_len: tokens of prompt and output together. field: named in errors.
    truncation: what is kept of each prompt.
    """

    tokenizer: ModelTokenizer
    vocab_size: int
    max_model_len: int
    field: str = "prompt"
    truncation: Truncation = ALL

    def with_truncation(self, truncation: Truncation) -> "PromptReader":
        """The same for prompts of which only a part is kept, however long they are."""
        return replace(self, truncation=truncation)

    async def read(self, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """`value`: a string, a list of strings, a list of ids or a list of lists of ids."""
        if isinstance(value, str):
            return await self.encode([value], add_special_tokens=add_special_tokens)
        if not isinstance(value, list):
            raise self._wrong("prompt must be a string, strings, token ids or lists of token ids")
        if not value:
            raise self._wrong("prompt must not be empty")
        if not isinstance(value[0], str | list):
            return [self._checked(value)]
        if len(value) > MAX_PROMPTS:
            raise self._wrong(f"at most {MAX_PROMPTS} prompts per request, got {len(value)}")
        if all(isinstance(each, str) for each in value):
            return await self.encode(value, add_special_tokens=add_special_tokens)
        return [self._checked(each) for each in value]

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """The prompts of texts; raises InvalidRequestError for one that is empty or too long."""
        for text in texts:
            if not text:
                raise self._wrong("prompt must not be empty")
            self.check_text(text)
        truncates = self.truncation.most is not None
        if truncates:  # more characters cannot be said by the tokens that are kept
            texts = [self.truncation.cut(text, self._most_characters) for text in texts]
        encoded = await self.tokenizer.encode(
            texts, add_special_tokens=add_special_tokens, truncation=self.truncation
        )
        prompts = []
        for text, ids in zip(texts, encoded, strict=True):
            self._check_length(ids)
            self._check_range(ids)
            prompts.append(Prompt(ids, None if truncates else text))
        return prompts

    @property
    def _most_characters(self) -> int:
        return self.max_model_len * self.tokenizer.longest_token * SHRINK

    def check_text(self, text: str) -> None:
        """Raise InvalidRequestError for what is no text, or longer than any prompt."""
        self.check_characters(len(text))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._wrong("prompt holds half of a surrogate pair, which is no text") from None

    def check_characters(self, number: int) -> None:
        """Raise InvalidRequestError when no tokens that fit can say so many characters.

        Of a prompt that is cut in any case there may be more.
        """
        if self.truncation.most is None and number > self._most_characters:
            raise self._wrong(
                f"the prompt of {number} characters is longer than the maximum context "
                f"length of {self.max_model_len} tokens can be"
            )

    def _checked(self, ids: Any) -> Prompt:
        """Looks at the ids only when there are not too many."""
        if not isinstance(ids, list):
            raise self._wrong("a prompt of token ids must be a list of integers")
        ids = self.truncation.cut_ids(ids)
        self._check_length(ids)
        if not all(type(each) is int for each in ids):  # True and False are integers to Python
            raise self._wrong("a prompt of token ids must be a list of integers")
        self._check_range(ids)
        return Prompt(ids)

    def _check_range(self, ids: list[int]) -> None:
        for bound in (min(ids), max(ids)):
            if not 0 <= bound < self.vocab_size:
                raise self._wrong(
                    f"token id {shown(bound)} is outside the vocabulary [0, {self.vocab_size})"
                )

    def _check_length(self, ids: list[Any]) -> None:
        if not ids:
            raise self._wrong("prompt must not be empty")
        if len(ids) >= self.max_model_len:
            raise self._wrong(
                f"the prompt has {len(ids)} tokens, the maximum context length is "
                f"{self.max_model_len} tokens of prompt and output together"
            )

    def _wrong(self, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, self.field)


def num_prompts(value: Any) -> int:
    """How many prompts a field of a request holds, if it is none of the wrong ones."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    return len(value) if several else 1
