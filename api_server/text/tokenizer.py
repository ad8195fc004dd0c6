"""The model's tokenizer: text to ids, ids to text, names of single tokens.

Owns the `tokenizers` object. Long texts are encoded on a thread, so that the event
loop goes on; only calls for batches let other threads run meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

from tokenizers import Tokenizer

from api_server.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    JoinedSpecialTokens,
    TokenBytes,
    WindowDetokenizer,
    is_byte_level,
)
from proto.errors import InvalidRequestError, ModelError

# How much of a prompt is kept, and which end of it.


Side = Literal["left", "right"]
AS_MUCH_AS_FITS: Final = -1
T = TypeVar("T", str, list[int])


@dataclass(frozen=True, slots=True)
class Truncation:
    """most: tokens that are kept, None for all. side: the end that is cut.

    left     . . . . |-- most --|
    right    |-- most --| . . . .
    """

    most: int | None = None
    side: Side = "left"

    def cut(self, value: T, most: int) -> T:
        """The tokens or characters that are kept of so many at most."""
        if len(value) <= most:
            return value
        return value[len(value) - most :] if self.side == "left" else value[:most]

    def cut_ids(self, token_ids: list[int]) -> list[int]:
        """The tokens that are kept."""
        return token_ids if self.most is None else self.cut(token_ids, self.most)

    def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The tokens of each text that are kept; special tokens that are added are among them."""
        if self.most is None:
            encodings = tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]
        added = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        for encoding in encodings:
            encoding.truncate(max(self.most - added, 0), direction=self.side)
        return [
            tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
            for encoding in encodings
        ]


ALL: Final = Truncation()


def truncation(most: int | None, side: Side, room: int) -> Truncation:
    """What a request asks for. room: prompt tokens that the context leaves for it.

    Raises InvalidRequestError for a prompt without tokens.
    """
    if most is None:
        return ALL
    if most == 0 or (most == AS_MUCH_AS_FITS and room < 1):
        raise InvalidRequestError(
            "truncate_prompt_tokens leaves nothing of the prompt", "truncate_prompt_tokens"
        )
    return Truncation(room if most == AS_MUCH_AS_FITS else most, side)


INLINE_SIZE: Final = 4096
"""Work on up to so many characters or tokens is done at once: a thread would cost more."""

P = ParamSpec("P")
R = TypeVar("R")


class ModelTokenizer:
    """tokenizer.json of one folder.

    special_ids: tokens without text. longest_token: characters of the longest token, so
    no text of n tokens is longer than n times that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_level = is_byte_level(tokenizer)
        self._tokens = TokenBytes(tokenizer, self.special_ids)
        self._all_tokens = TokenBytes(tokenizer, frozenset())
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: str) -> "ModelTokenizer":
        """Raises ModelError when the folder has no usable tokenizer.json."""
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a tokenizer folder holds tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ModelError(f"{path}: {error}") from None

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, truncation: Truncation = ALL
    ) -> list[list[int]]:
        """Ids of each text."""
        return await self.run_in_thread_if_large(
            sum(map(len, texts)),
            truncation.encode,
            self._tokenizer,
            texts,
            add_special_tokens=add_special_tokens,
        )

    async def run_in_thread_if_large(
        self, size: int, work: Callable[P, R], *args: P.args, **fields: P.kwargs
    ) -> R:
        """Do `work` on so many characters or tokens, on the thread when they are many."""
        if size <= INLINE_SIZE:
            return work(*args, **fields)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **fields))

    def special_id(self, text: str) -> int | None:
        """The special token that is spelt so; None where there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # `decode` would keep other threads from running meanwhile; the batch of one does not
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_names(self, ids: Sequence[int]) -> list[str | None]:
        """As the vocabulary spells each token; None for an id without one."""
        return [self._tokenizer.id_to_token(each) for each in ids]

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """For the tokens that follow `prompt`."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._tokens if skip_special_tokens else self._all_tokens)
        if skip_special_tokens:
            return WindowDetokenizer(self._tokenizer, self.special_ids, prompt)
        window = WindowDetokenizer(self._tokenizer, frozenset(), prompt)
        if spaces_between_special_tokens:
            return window
        return JoinedSpecialTokens(window, self.special_ids)

    def token_text(self, token_id: int) -> str:
        """What a single token is called; broken characters are U+FFFD."""
        if self._byte_level:
            return self._all_tokens.raw(token_id).decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a single token stands for, exact if the tokenizer provides them."""
        if self._byte_level:
            return self._all_tokens.raw(token_id)
        return self.token_text(token_id).encode()


def special_token_texts(folder: str) -> dict[str, Any]:
    """bos_token, eos_token and their like of tokenizer_config.json, for chat templates."""
    path = Path(folder, "tokenizer_config.json")
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    texts = {f"{name}_token": _token_text(config.get(f"{name}_token")) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
