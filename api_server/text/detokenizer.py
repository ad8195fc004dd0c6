"""Token ids to text, one token at a time.

Owns the text that is not complete yet: the bytes of half a character stay here
until the character is whole. Knows nothing of requests or stop strings.

Two ways, both O(1) amortised per token:

- `ByteLevelDetokenizer` for byte-level BPE: a token is a string of bytes, so an
  incremental UTF-8 decoder gives exactly what decoding all tokens at once gives.
- `WindowDetokenizer` for every other tokenizer: decodes a short window of tokens
  with and without the new one and takes the difference. The window starts with
  the end of the prompt, so a word's leading space survives.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT: Final = "\ufffd"
MAX_HELD_TOKENS: Final = 8
"""A character has at most 4 bytes; text that stays broken for longer is let go."""
CONTEXT_TOKENS: Final = 6
"""Tokens of the prompt that a window starts with."""


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back, when no token follows; broken characters become U+FFFD."""
        ...


class TokenBytes:
    """The bytes of each token of a byte-level vocabulary, made on first use.

    `text(id)` is None for a token that is not whole UTF-8 by itself. The mapping of
    bytes to printable characters is that of GPT-2's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._byte_of = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id without a token. Cached."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def text(self, token_id: int) -> str | None:
        """The token's text when it stands for itself; "" for special tokens."""
        try:
            return self._texts[token_id]
        except KeyError:
            return self._texts.setdefault(token_id, self._decode(token_id))

    def _decode(self, token_id: int) -> str | None:
        if token_id in self._special_ids:
            return ""
        try:
            return self._look_up(token_id).decode()  # its bytes are seldom asked for as well
        except UnicodeDecodeError:
            return None

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token, spelt as it is
            return token.encode()


class ByteLevelDetokenizer:
    """Exact for byte-level BPE. Special tokens give no text."""

    __slots__ = ("_decoder", "_pending", "_tokens")

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def feed(self, token_id: int) -> str:
        text = self._tokens.text(token_id)
        if text is not None and (not self._pending or not text):
            return text
        decoded = self._decoder.decode(self._tokens.raw(token_id))
        self._pending = bool(self._decoder.getstate()[0])
        return decoded

    def flush(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For tokenizers whose tokens have no text of their own (metaspace, WordPiece).

    tokens:  a b c | d e          a b c: context, its text was given out before
                   ^ given        d e: held until their text is whole

    A context begins where a character begins, so that a run of byte tokens is never
    cut in two.
    """

    __slots__ = ("_given", "_given_text", "_ids", "_special_ids", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], prompt: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._ids = [each for each in prompt[-CONTEXT_TOKENS:] if each not in special_ids]
        self._given = len(self._ids)
        self._given_text = self._decode()

    def feed(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode()
        incomplete = text.endswith(REPLACEMENT) or len(text) <= len(self._given_text)
        if incomplete and len(self._ids) - self._given < MAX_HELD_TOKENS:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decode())

    def _give(self, text: str) -> str:
        """Give out what follows the context; the tokens given become the next context."""
        new = text[len(self._given_text) :]
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        self._given_text = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False) if self._ids else ""


class JoinedSpecialTokens:
    """Leaves out the space that a tokenizer puts between two special tokens."""

    __slots__ = ("_after_special", "_inner", "_special_ids")

    def __init__(self, inner: Detokenizer, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids
        self._after_special = False

    def feed(self, token_id: int) -> str:
        text = self._inner.feed(token_id)
        special = token_id in self._special_ids
        if special and self._after_special:
            text = text.removeprefix(" ")
        self._after_special = special
        return text

    def flush(self) -> str:
        return self._inner.flush()


class NoText:
    """For requests without text (`detokenize` is false)."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether every token of this tokenizer is a string of bytes."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def byte_alphabet() -> dict[str, int]:
    """Character → byte of the byte-level alphabet (Radford et al. 2019, GPT-2).

    Printable Latin-1 characters stand for themselves, the other bytes in order for
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(0x100)} - {*printable})
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


# Text in which special tokens that mean something stand, though the others are left out.


class MarkedDetokenizer:
    """`inner`, which leaves out special tokens, but for those that are marks.

    marks: token id to text.
    """

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str]) -> None:
        self._inner = inner
        self._marks = marks

    def feed(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        if mark is None:
            return self._inner.feed(token_id)
        return self._inner.flush() + mark

    def flush(self) -> str:
        return self._inner.flush()
