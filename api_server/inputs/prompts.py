"""Prompts as token ids, checked against the vocabulary and the usable length.

Owns the rules for what a prompt may be. A string and a list of ids look alike
after this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from api_server.inputs.tokenizer import ModelTokenizer
from proto.errors import InvalidRequestError

MAX_PROMPTS: Final = 1024
SHRINK: Final = 4
"""A tokenizer's normaliser may shorten a text, hardly to a quarter."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: [num_prompt_tokens], at least one. text: None when the client sent ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns a field of a request into prompts.

    max_model_len: tokens of prompt and output together. field: named in errors.
    """

    tokenizer: ModelTokenizer
    vocab_size: int
    max_model_len: int
    field: str = "prompt"

    async def read(self, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """`value`: a string, a list of strings, a list of ids or a list of lists of ids."""
        if isinstance(value, str):
            return await self.encode([value], add_special_tokens=add_special_tokens)
        if not isinstance(value, list):
            raise self._wrong("prompt must be a string, strings, token ids or lists of token ids")
        if not value:
            raise self._wrong("prompt must not be empty")
        if _is_ids(value):
            return [self._checked(value)]
        if len(value) > MAX_PROMPTS:
            raise self._wrong(f"at most {MAX_PROMPTS} prompts per request, got {len(value)}")
        if all(isinstance(each, str) for each in value):
            return await self.encode(value, add_special_tokens=add_special_tokens)
        return [self._checked(each) for each in value]

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """The prompts of texts; raises InvalidRequestError for one that is empty or too long."""
        for text in texts:
            self._check_text(text)
        encoded = await self.tokenizer.encode(texts, add_special_tokens=add_special_tokens)
        prompts = []
        for text, ids in zip(texts, encoded, strict=True):
            self._check_ids(ids)
            prompts.append(Prompt(ids, text))
        return prompts

    def _check_text(self, text: str) -> None:
        if not text:
            raise self._wrong("prompt must not be empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._wrong("prompt holds half of a surrogate pair, which is no text") from None
        most = self.max_model_len * self.tokenizer.longest_token * SHRINK
        if len(text) > most:
            raise self._wrong(
                f"the prompt of {len(text)} characters is longer than the maximum context "
                f"length of {self.max_model_len} tokens can be"
            )

    def _checked(self, ids: Any) -> Prompt:
        if not isinstance(ids, list) or not _is_ids(ids):
            raise self._wrong("a prompt of token ids must be a list of integers")
        self._check_ids(ids)
        return Prompt(ids)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise self._wrong("prompt must not be empty")
        for bound in (min(ids), max(ids)):
            if not 0 <= bound < self.vocab_size:
                raise self._wrong(
                    f"token id {bound} is outside the vocabulary [0, {self.vocab_size})"
                )
        if len(ids) >= self.max_model_len:
            raise self._wrong(
                f"the prompt has {len(ids)} tokens, the maximum context length is "
                f"{self.max_model_len} tokens of prompt and output together"
            )

    def _wrong(self, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, self.field)


def _is_ids(value: list[Any]) -> bool:
    """True and False are integers to Python, not to us."""
    return all(type(each) is int for each in value)
