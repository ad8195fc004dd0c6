"""The model's tokenizer: text to ids, ids to text, names of single tokens.

Texts are encoded on threads, a slice in each turn (`api_server/turns.py`), and short texts have a
thread of their own. Of the `tokenizers` package only the batch functions release the GIL.

A single text cannot be cut without changing its tokens, its work cannot be interrupted, and takes
about 130 bytes per token, of which a character can have several. So the tokens of a long text are
first counted in slices of it: if it has too many, they are never made.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar

from tokenizers import Tokenizer

from api_server.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    JoinedSpecialTokens,
    TokenBytes,
    TokenDecoder,
    WindowDetokenizer,
    is_byte_level,
)
from api_server.text.infill import InfillTokens
from api_server.turns import WorkThread
from proto.errors import InvalidRequestError, ModelError, shown
from proto.messages.prepared_model import read_model_file

Side = Literal["left", "right"]
FILL_CONTEXT: Final = -1
"""Value of truncate_prompt_tokens: keep as many tokens as the context leaves."""
T = TypeVar("T", str, list[int])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation of prompts. max_tokens: None keeps all. side: the end that is cut.

    left     . . . . |-- max_tokens --|
    right    |-- max_tokens --| . . . .
    """

    max_tokens: int | None = None
    side: Side = "left"

    def cut(self, value: T, length: int) -> T:
        """Return at most `length` tokens or characters of a list or text."""
        if len(value) <= length:
            return value
        return value[len(value) - length :] if self.side == "left" else value[:length]

    def cut_ids(self, token_ids: list[int]) -> list[int]:
        return token_ids if self.max_tokens is None else self.cut(token_ids, self.max_tokens)

    def encode(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the kept token ids of each text, with added special tokens counted."""
        if self.max_tokens is None:
            encodings = tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]
        added = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        if not added:  # the library would also make encodings of what it cuts off
            return [self.cut_ids(encoding.ids) for encoding in encodings]
        for encoding in encodings:
            encoding.truncate(max(self.max_tokens - added, 0), direction=self.side)
        return [
            tokenizer.post_process(encoding, add_special_tokens=add_special_tokens).ids
            for encoding in encodings
        ]


NO_TRUNCATION: Final = Truncation()


def truncation(max_tokens: int | None, side: Side, context_tokens: int) -> Truncation:
    """Return the truncation that a request asks for.

    context_tokens: prompt tokens for which the context has space. Raises InvalidRequestError if
    no token of the prompt would be left.
    """
    if max_tokens is None:
        return NO_TRUNCATION
    fills_context = max_tokens == FILL_CONTEXT
    if max_tokens == 0 or (fills_context and context_tokens < 1):
        raise InvalidRequestError(
            "truncate_prompt_tokens leaves nothing of the prompt", "truncate_prompt_tokens"
        )
    return Truncation(context_tokens if fills_context else max_tokens, side)


INLINE_SIZE: Final = 4096
"""Characters or tokens up to which a thread would cost more than the work itself."""
SLICE_SIZE: Final = 1 << 16
"""Characters of a slice, and of all texts of a request that counts as short."""
MAX_UNCOUNTED_ASCII: Final = 1 << 18
"""Longest text in ASCII, which has at most a token per character, that is encoded at once."""

_CUT_TOKENS: Final = 16
"""Tokens that a text may have more if it is cut in two."""
_BYTE_IN_LIST: Final = 5
"""Characters of a byte in a list."""
MAX_TEXT_TOKENS: Final = 1 << 19
"""Most tokens of a text that no context limits, and of several prompts together."""


class TooManyTokensError(InvalidRequestError):
    """A text has more tokens than its caller takes."""


P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")


class ModelTokenizer:
    """The tokenizer of a model, from its tokenizer.json.

    settings: the content of tokenizer_config.json. special_ids: ids of special tokens.
    longest_token: length of the longest token in characters. infill: tokens for filling in.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_level = is_byte_level(tokenizer)
        self._tokens = TokenBytes(tokenizer, self.special_ids)
        self._all_tokens = TokenBytes(tokenizer, frozenset())
        self._decoder = TokenDecoder(tokenizer)
        self._short_texts = WorkThread("tokenize")
        self._long_texts = WorkThread("tokenize-long")
        self._json_sizes: dict[int, tuple[int, int]] = {}  # of text and bytes, by token id
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self.infill = InfillTokens.find(tokenizer.token_to_id, settings or {})
        self._verbatim: ModelTokenizer | None = None  # made when a text needs it

    @classmethod
    def load(cls, folder: str) -> "ModelTokenizer":
        """Return the tokenizer of a folder; raise ModelError if its tokenizer.json is unusable."""
        path = Path(folder, "tokenizer.json")
        if not path.is_file():
            raise ModelError(f"{path}: no such file; a tokenizer folder holds tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)), _settings(folder))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ModelError(f"{path}: {error}") from None

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        truncation: Truncation = NO_TRUNCATION,
        max_tokens: int = MAX_TEXT_TOKENS,
    ) -> AsyncIterator[list[int]]:
        """Yield the token ids of each text.

        max_tokens: of a text. Raises TooManyTokensError for a long text that has more, if that
        saves work; a caller with a limit checks it too.
        """
        size = sum(map(len, texts))
        for part in _slices(texts, len):
            if _is_counted_first(part[0]):
                part = [await self._fitting_text(part[0], truncation, max_tokens)]
            encoded = await self.run_in_thread_if_large(
                size,
                truncation.encode,
                self._tokenizer,
                part,
                add_special_tokens=add_special_tokens,
            )
            for ids in encoded:
                yield ids

    async def encode_verbatim(
        self, text: str, truncation: Truncation, max_tokens: int
    ) -> list[int]:
        """Return the token ids of a text in which no special token is read as one.

        Nothing is added at its ends. Raises TooManyTokensError as `encode` does.
        """

        async def encode_by(tokenizer: ModelTokenizer) -> list[int]:
            encoded = tokenizer.encode(
                [text], add_special_tokens=False, truncation=truncation, max_tokens=max_tokens
            )
            return await anext(encoded)

        ids = await encode_by(self) if text else []
        if (self.special_ids | self.infill.all_ids).isdisjoint(ids):
            return ids
        if self._verbatim is None:
            self._verbatim = await self._long_texts.run(self._make_verbatim)
        return await encode_by(self._verbatim)

    def _make_verbatim(self) -> "ModelTokenizer":
        """Return a copy that reads special tokens, and those for filling in, as any other text."""
        content = json.loads(self._tokenizer.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self.infill.all_ids
        copied = Tokenizer.from_str(json.dumps(content))
        copied.encode_special_tokens = True
        return ModelTokenizer(copied)

    async def start_ids(self) -> list[int]:
        """Return the token ids that the tokenizer adds before a text."""
        ids, bare = [
            await anext(self.encode(["x"], add_special_tokens=adds)) for adds in (True, False)
        ]
        starts = range(len(ids) - len(bare) + 1)
        return next((ids[:at] for at in starts if ids[at : at + len(bare)] == bare), [])

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncates: bool, max_tokens: int
    ) -> AsyncIterator[tuple[list[int], int]]:
        """Yield the token ids of each pair, with what the tokenizer adds, and a position.

        The position is that of the first token of type 1; 0 if all types are 0.
        truncates: cut the second text at its end to keep a pair within max_tokens. Raises
        TooManyTokensError as `encode` does.
        """
        size = sum(map(_pair_size, pairs))
        for part in _slices(pairs, _pair_size):
            first, second = part[0]
            if _is_counted_first(first):
                first = await self._fitting_text(first, NO_TRUNCATION, max_tokens)
            if _is_counted_first(second):
                kept = Truncation(max_tokens, "right") if truncates else NO_TRUNCATION
                second = await self._fitting_text(second, kept, max_tokens)
            found = await self.run_in_thread_if_large(
                size,
                self._encode_pairs,
                [(first, second), *part[1:]],
                max_tokens if truncates else None,
            )
            for pair in found:
                yield pair

    def _encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_tokens: int | None
    ) -> list[tuple[list[int], int]]:
        """max_tokens: to which the second text of a pair is cut; None to cut nothing."""
        texts = [text for pair in pairs for text in pair]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        added = self._tokenizer.num_special_tokens_to_add(True)
        found = []
        for first, second in zip(encodings[::2], encodings[1::2], strict=True):
            if max_tokens is not None:
                second.truncate(max(max_tokens - added - len(first.ids), 0))
            both = self._tokenizer.post_process(first, second, add_special_tokens=True)
            types = both.type_ids
            found.append((both.ids, types.index(1) if 1 in types else 0))
        return found

    async def _fitting_text(self, text: str, truncation: Truncation, max_tokens: int) -> str:
        """Return a long text, cut to slices with all tokens that a truncation keeps.

        Raises TooManyTokensError for a text with more than max_tokens that is not truncated.
        """
        wanted = max_tokens if truncation.max_tokens is None else truncation.max_tokens
        starts = range(0, len(text), SLICE_SIZE)
        num_tokens = num_characters = 0
        for start in starts if truncation.side == "right" else reversed(starts):
            piece = text[start : start + SLICE_SIZE]
            num_characters += len(piece)
            num_tokens += await self._long_texts.run(self._count_tokens, piece)
            if num_tokens > wanted + _CUT_TOKENS * len(starts):
                if truncation.max_tokens is None:
                    raise TooManyTokensError(f"has more than {wanted} tokens")
                # some more, so that the cut is far from the tokens that are kept
                return truncation.cut(text, num_characters + INLINE_SIZE)
        return text

    def _count_tokens(self, text: str) -> int:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)

    async def run_in_thread_if_large(
        self, size: int, work: Callable[P, R], *args: P.args, **fields: P.kwargs
    ) -> R:
        """Return the result of `work`, which runs on a thread if `size` is large.

        size: characters or tokens that the work processes. Raises ClientDisconnect.
        """
        try:
            if size <= INLINE_SIZE:
                return work(*args, **fields)
            thread = self._short_texts if size <= SLICE_SIZE else self._long_texts
            return await thread.run(work, *args, **fields)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # it cannot be imported
                raise
            raise InvalidRequestError(f"the tokenizer cannot read it: {shown(error)}") from None

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self._decoder.decode(ids)

    def json_size(self, ids: Iterable[int]) -> int:
        """Return about how many bytes the text of tokens has in JSON."""
        counts = Counter(ids).items()
        return sum(number * self._token_sizes(token_id)[0] for token_id, number in counts)

    def names_size(self, ids: Iterable[int], *, with_bytes: bool) -> int:
        """Return about how many bytes tokens have in JSON as texts, and as lists of bytes."""
        sizes = list(map(self._token_sizes, ids))
        return sum(text + num_bytes if with_bytes else text for text, num_bytes in sizes)

    def _token_sizes(self, token_id: int) -> tuple[int, int]:
        if (sizes := self._json_sizes.get(token_id)) is None:
            text, num_bytes = self.token_text(token_id), len(self.token_bytes(token_id))
            sizes = len(json.dumps(text)) - 2, num_bytes * _BYTE_IN_LIST
            self._json_sizes[token_id] = sizes
        return sizes

    def token_names(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as the vocabulary spells it, None for an id without a token."""
        return [self._tokenizer.id_to_token(token_id) for token_id in ids]

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """Return a detokenizer for the tokens that follow a prompt."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._tokens if skip_special_tokens else self._all_tokens)
        if skip_special_tokens:
            return WindowDetokenizer(self._decoder, self.special_ids, prompt)
        window = WindowDetokenizer(self._decoder, frozenset(), prompt)
        if spaces_between_special_tokens:
            return window
        return JoinedSpecialTokens(window, self.special_ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for incomplete characters."""
        if self._byte_level:
            return self._all_tokens.raw(token_id).decode(errors="replace")
        return self._decoder.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single token; exact for byte-level tokenizers and byte tokens."""
        if self._byte_level:
            return self._all_tokens.raw(token_id)
        byte = self._decoder.byte(token_id)
        if byte is not None:
            return bytes([byte])
        return self.token_text(token_id).encode()


def _is_counted_first(text: str) -> bool:
    return len(text) > (MAX_UNCOUNTED_ASCII if text.isascii() else SLICE_SIZE)


def _pair_size(pair: tuple[str, str]) -> int:
    return len(pair[0]) + len(pair[1])


def _slices(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in lists of at most SLICE_SIZE together; a larger item is alone."""
    part: list[Item] = []
    total = 0
    for item in items:
        total += size(item)
        if part and total > SLICE_SIZE:
            yield part
            part, total = [], size(item)
        part.append(item)
    if part:
        yield part


def special_token_texts(folder: str) -> dict[str, Any]:
    """Return bos_token, eos_token and others of tokenizer_config.json, for chat templates."""
    config = _settings(folder)
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    texts = {f"{name}_token": _token_text(config.get(f"{name}_token")) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _settings(folder: str) -> dict[str, Any]:
    """Return the content of a folder's tokenizer_config.json; raises ModelError."""
    path = Path(folder, "tokenizer_config.json")
    if not path.exists():
        return {}
    try:
        config = json.loads(read_model_file(path))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must contain a JSON object")
    return config


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
