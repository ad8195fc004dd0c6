"""Prompts as token ids, checked against the vocabulary and the context length, or as embeddings."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import numpy as np

from api_server.protocol.common import MAX_PROMPTS
from api_server.protocol.fields import is_encodable
from api_server.text.tokenizer import (
    MAX_TEXT_TOKENS,
    NO_TRUNCATION,
    ModelTokenizer,
    TooManyTokensError,
    Truncation,
)
from proto.errors import ContextLengthError, InvalidRequestError, context_length_error, shown
from proto.messages.multimodal import MultiModalFeature

MAX_NORMALIZATION_RATIO: Final = 4
"""A tokenizer's normaliser shortens a text at most by this factor."""
MAX_TOKEN_CHARACTERS: Final = 16
"""Most characters per token of the context that a text may have, since the work grows with them.

Prose has 4 to 5. A text of MIN_CHARACTERS is always taken."""
MIN_CHARACTERS: Final = 1 << 16
MAX_TRUNCATED_CHARACTERS: Final = 4 << 20
"""Most characters of a conversation whose prompt is truncated, unless more fit into the context. It
is rendered as a whole before that, which takes many times its size in memory."""
_CHECKED_IDS: Final = 1 << 15
"""Token ids that are checked before other clients are served."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of at least one token.

    text: None if the client sent ids, or if the prompt is truncated. second_start: as in
    PoolingParams. embeds, mm_features: as in EngineCoreRequest.
    """

    token_ids: list[int]
    text: str | None = None
    second_start: int = 0
    embeds: bytes = b""
    mm_features: Sequence[MultiModalFeature] = ()


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the prompts of a request.

    max_model_len: most tokens of prompt and output together. field: request field, for errors.
    truncation: applied to each prompt. num_output_tokens: that must fit behind it.
    """

    tokenizer: ModelTokenizer
    vocab_size: int
    max_model_len: int
    field: str = "prompt"
    truncation: Truncation = NO_TRUNCATION
    max_prompts: int = MAX_PROMPTS
    num_output_tokens: int = 1

    def with_truncation(self, truncation: Truncation) -> "PromptReader":
        """Return a reader that truncates prompts."""
        return replace(self, truncation=truncation)

    async def read_prompts(self, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """Return the prompts of a request field; raise InvalidRequestError.

        value: a string, a list of strings, a list of token ids or a list of such lists.
        """
        if isinstance(value, str):
            return await self.encode_texts([value], add_special_tokens=add_special_tokens)
        if not isinstance(value, list):
            raise self._invalid(
                f"{self.field} must be a string, strings, token ids or lists of token ids"
            )
        if not value:
            raise self._invalid(f"{self.field} must not be empty")
        if not isinstance(value[0], str | list):
            return await self._checked(self._id_prompts([value]))
        if len(value) > self.max_prompts:
            raise self._invalid(
                f"{self.field}: at most {self.max_prompts} per request, got {len(value)}"
            )
        if all(isinstance(item, str) for item in value):
            return await self.encode_texts(value, add_special_tokens=add_special_tokens)
        return await self._checked(self._id_prompts(value))

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """Return the prompts of texts; raise InvalidRequestError for an empty or too long one."""
        shown_texts: Iterator[str | None] = iter(texts)
        if self.truncation.max_tokens is not None:  # what is kept has no more characters
            texts = [self.truncation.cut(text, self._max_characters) for text in texts]
            shown_texts = repeat(None)
        for text in texts:
            if not text:
                raise self._invalid(f"{self.field} must not be empty")
            self.check_text(text)
        encoded = self.tokenizer.encode(
            texts,
            add_special_tokens=add_special_tokens,
            truncation=self.truncation,
            max_tokens=self.max_model_len,
        )
        return await self._checked(Prompt(ids, next(shown_texts)) async for ids in encoded)

    async def read_parts(self, value: Any) -> list[Prompt]:
        """Return the texts or token ids of a request field as parts of prompts.

        value: as of `read_prompts`, but a part may be empty. In a text no special token is read as
        one, and nothing is added to it. Raises InvalidRequestError.
        """
        parts: Sequence[Any] = value if _is_several(value) else [value]
        if len(parts) > self.max_prompts:
            raise self._invalid(
                f"{self.field}: at most {self.max_prompts} per request, got {len(parts)}"
            )
        read = []
        for part in parts:
            if isinstance(part, str):
                read.append(Prompt(await self.encode_verbatim(part), part))
            else:
                read += await self._checked(self._id_prompts([part]))
        return read

    async def encode_verbatim(self, text: str) -> list[int]:
        """Return the token ids of a part of a prompt; see `ModelTokenizer.encode_verbatim`.

        Raises InvalidRequestError.
        """
        if self.truncation.max_tokens is not None:
            text = self.truncation.cut(text, self._max_characters)
        self.check_text(text)
        try:
            return await self.tokenizer.encode_verbatim(text, self.truncation, self.max_model_len)
        except TooManyTokensError as error:
            raise self._too_long(f"it {error.message}.") from None

    async def check_prompts(self, prompts: Iterable[list[int]]) -> list[Prompt]:
        """Return prompts of token ids; raise InvalidRequestError for one that is invalid."""
        return await self._checked(self._id_prompts(prompts))

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Prompt]:
        """Return a prompt of both texts of each pair; raise InvalidRequestError."""
        for text in {text for pair in pairs for text in pair}:
            self.check_text(text)
        most = self.truncation.max_tokens
        encoded = self.tokenizer.encode_pairs(
            pairs, truncates=most is not None, max_tokens=most or self.max_model_len
        )
        return await self._checked(
            Prompt(ids, second_start=second_start) async for ids, second_start in encoded
        )

    async def encode_with_images(self, text: str, expanded: str) -> Prompt:
        """Return the prompt of a text with images, which is never cut.

        text: with a placeholder for each image; the limit of characters is for this one.
        expanded: with all tokens of the images. Raises InvalidRequestError.
        """
        replace(self, truncation=NO_TRUNCATION).check_text(text)
        encoded = self.tokenizer.encode(
            [expanded], add_special_tokens=False, max_tokens=self.max_model_len
        )
        (prompt,) = await self._checked(Prompt(ids, expanded) async for ids in encoded)
        most, number = self.truncation.max_tokens, len(prompt.token_ids)
        if most is not None and number > most:
            raise InvalidRequestError(
                f"a prompt with images is not truncated: it has {number} tokens, and "
                f"truncate_prompt_tokens leaves {most}",
                "truncate_prompt_tokens",
            )
        return prompt

    async def encode_any_length(
        self, text: str, *, add_special_tokens: bool, expanded: str | None = None
    ) -> list[int]:
        """Return the token ids of a text that may exceed the context, up to MAX_TEXT_TOKENS.

        expanded: the text with all tokens of its images, if it has some. Raises
        InvalidRequestError.
        """
        self.check_text(text)
        text = text if expanded is None else expanded
        most = max(MAX_TEXT_TOKENS, self.max_model_len)
        try:
            encoded = self.tokenizer.encode(
                [text], add_special_tokens=add_special_tokens, max_tokens=most
            )
            return await anext(encoded)
        except TooManyTokensError as error:
            raise error.in_field(self.field) from None

    @property
    def _max_characters(self) -> int:
        longest = self.max_model_len * self.tokenizer.longest_token * MAX_NORMALIZATION_RATIO
        return min(longest, max(self.max_model_len * MAX_TOKEN_CHARACTERS, MIN_CHARACTERS))

    def check_text(self, text: str) -> None:
        """Raise InvalidRequestError for a text that UTF-8 cannot encode or that is too long.

        One that will be truncated may have any length.
        """
        if self.truncation.max_tokens is None and len(text) > self._max_characters:
            raise self._too_long(f"its {len(text)} characters do not fit.")
        if not is_encodable(text):
            raise self._invalid("prompt holds half of a surrogate pair, which is no text")

    def check_conversation(self, num_characters: int) -> None:
        """Raise InvalidRequestError for a conversation that is too long to be rendered."""
        if num_characters <= self._max_characters:
            return
        if self.truncation.max_tokens is None:
            raise self._too_long(f"its {num_characters} characters do not fit.")
        if num_characters > MAX_TRUNCATED_CHARACTERS:
            raise self._invalid(
                f"{self.field}: a conversation that is truncated has at most "
                f"{MAX_TRUNCATED_CHARACTERS} characters, got {num_characters}"
            )

    def _id_prompt(self, ids: Any) -> Prompt:
        """Return a prompt of token ids. Checks the length before it looks at the ids."""
        if not isinstance(ids, list):
            raise self._invalid("a prompt of token ids must be a list of integers")
        ids = self.truncation.cut_ids(ids)
        self._check_length(ids)
        if not all(
            type(token_id) is int for token_id in ids
        ):  # True and False are integers to Python
            raise self._invalid("a prompt of token ids must be a list of integers")
        return Prompt(ids)

    async def _checked(self, prompts: AsyncIterator[Prompt]) -> list[Prompt]:
        """Return the prompts; raise InvalidRequestError for the first that is invalid."""
        checked: list[Prompt] = []
        num_tokens = 0
        try:
            async for prompt in prompts:
                self._check_length(prompt.token_ids)
                self._check_range(prompt.token_ids)
                checked.append(prompt)
                num_tokens += len(prompt.token_ids)
                if len(checked) > 1 and num_tokens > MAX_TEXT_TOKENS:
                    raise self._invalid(
                        f"{self.field}: at most {MAX_TEXT_TOKENS} tokens together per request"
                    )
        except TooManyTokensError as error:
            raise self._too_long(f"it {error.message}.") from None
        return checked

    async def _id_prompts(self, lists: Iterable[Any]) -> AsyncIterator[Prompt]:
        num_ids = 0
        for ids in lists:
            yield self._id_prompt(ids)
            num_ids += len(ids)
            if num_ids > _CHECKED_IDS:
                num_ids = 0
                await asyncio.sleep(0)

    def _check_range(self, ids: list[int]) -> None:
        for bound in (min(ids), max(ids)):
            if not 0 <= bound < self.vocab_size:
                raise self._invalid(
                    f"token id {shown(bound)} is outside the vocabulary [0, {self.vocab_size})"
                )

    def _check_length(self, ids: list[Any]) -> None:
        if not ids:
            raise self._invalid(f"{self.field} must not be empty")
        if len(ids) + self.num_output_tokens > self.max_model_len:
            raise self._too_long(f"it has {len(ids)} tokens.")

    def _too_long(self, problem: str) -> ContextLengthError:
        """Return the error. LangChain looks for "prompt is too long", as Anthropic's clients do."""
        return context_length_error(
            self.max_model_len,
            f"The prompt is too long: {problem}",
            self.field,
            generates=self.num_output_tokens > 0,
        )

    def _invalid(self, message: str) -> InvalidRequestError:
        return InvalidRequestError(message, self.field)


def num_prompts(value: Any) -> int:
    """Return the number of prompts in a request field; 1 if the field is invalid."""
    return len(value) if _is_several(value) else 1


def _is_several(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


def prompt_embeds(text: str, hidden_size: int) -> bytes:
    """Return little-endian float32 [num_tokens, hidden_size] of a file in base64.

    The file has one tensor of that shape, of float32, float16 or bfloat16. Raises
    InvalidRequestError, also for numbers that are not finite.
    """
    import safetensors  # few servers take embeddings

    try:
        data = base64.b64decode(text, validate=True)
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except (binascii.Error, ValueError, safetensors.SafetensorError) as error:
        raise _invalid_embeds(f"is no safetensors file in base64: {shown(error)}") from None
    if len(tensors) != 1:
        raise _invalid_embeds(f"has {len(tensors)} tensors, and takes one")
    ((_, tensor),) = tensors
    kind, shape = tensor["dtype"], tensor["shape"]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden_size:
        raise _invalid_embeds(f"takes a tensor [tokens, {hidden_size}], got {list(shape)}")
    match kind:
        case "F32":
            rows = np.frombuffer(tensor["data"], "<f4")
        case "F16":
            rows = np.frombuffer(tensor["data"], "<f2").astype("<f4")
        case "BF16":
            wide = np.frombuffer(tensor["data"], "<u2").astype("<u4") << 16
            rows = wide.view("<f4")
        case _:
            raise _invalid_embeds(f"takes float32, float16 or bfloat16, got {shown(kind)}")
    if not np.isfinite(rows).all():
        raise _invalid_embeds("has a number that is not finite")
    return rows.tobytes()


def _invalid_embeds(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt_embeds {what}", "prompt_embeds")
