"""Incremental detokenizers: token ids to text, one token at a time, in amortised O(1).

- `ByteLevelDetokenizer` for byte-level BPE: a token is a string of bytes, so an incremental
  UTF-8 decoder returns exactly what decoding all tokens at once would.
- `WindowDetokenizer` for every other tokenizer: decodes a short window of tokens with and without
  the new token and returns the difference. The window starts with the end of the prompt, so that a
  word keeps its leading space. `TokenDecoder` decodes it, with the byte tokens of a vocabulary.

The others modify the text of these two. An incomplete character is held back until its last byte.
"""

import codecs
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer, decoders

from proto.byte_level import LETTER_BYTES

REPLACEMENT: Final = "\ufffd"
MAX_HELD_TOKENS: Final = 8
"""Tokens after which an incomplete character is returned as it is; a character has 4 bytes."""
_FEW_TOKENS: Final = 64
CONTEXT_TOKENS: Final = 6
"""Tokens at the end of the prompt with which a window starts."""


class Detokenizer(Protocol):
    """Decodes the tokens of one choice."""

    def decode_token(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""

    def flush_text(self) -> str:
        """Return the text that was held back, with U+FFFD for an incomplete character."""


class TokenBytes:
    """Cache of the bytes and the text of each token of a byte-level vocabulary.

    special_ids: tokens without text.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._byte_of = LETTER_BYTES
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def raw(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def text(self, token_id: int) -> str | None:
        """Return the token's text, None if its bytes are not complete UTF-8."""
        try:
            return self._texts[token_id]
        except KeyError:
            return self._texts.setdefault(token_id, self._decode(token_id))

    def _decode(self, token_id: int) -> str | None:
        if token_id in self._special_ids:
            return ""
        try:
            return self._look_up(token_id).decode()  # not `raw`: few tokens need both caches
        except UnicodeDecodeError:
            return None

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token, which is stored as plain text
            return token.encode()


class ByteLevelDetokenizer:
    """Detokenizer for byte-level BPE, by an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_pending", "_tokens")

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def decode_token(self, token_id: int) -> str:
        text = self._tokens.text(token_id)
        if text is not None and (not self._pending or not text):
            return text
        decoded = self._decoder.decode(self._tokens.raw(token_id))
        self._pending = bool(self._decoder.getstate()[0])
        return decoded

    def flush_text(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", final=True)


class TokenDecoder:
    """Decodes the tokens of a tokenizer that is not byte-level, byte tokens (`<0xE4>`) included.

    If a run of byte tokens is not UTF-8, the `tokenizers` library gives one U+FFFD for each of its
    bytes. Here an invalid part gives one U+FFFD (the "maximal subpart" of the Unicode standard,
    chapter 3.9, as in byte-level tokenizers), and the rest of the run keeps its text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of: dict[int, int] = {}
        decoder = tokenizer.decoder
        if decoder is not None and b"ByteFallback" in decoder.__getstate__():
            ids = {byte: tokenizer.token_to_id(_byte_token(byte)) for byte in range(256)}
            self._byte_of = {id_: byte for byte, id_ in ids.items() if id_ is not None}

    @property
    def has_byte_tokens(self) -> bool:
        return bool(self._byte_of)

    def byte(self, token_id: int) -> int | None:
        """Return the byte of a byte token, None for any other token."""
        return self._byte_of.get(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens, special ones included."""
        if not ids:
            return ""
        if len(ids) < _FEW_TOKENS:
            text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        else:  # only the batch function releases the GIL
            text = str(*self._tokenizer.decode_batch([ids], skip_special_tokens=False))
        if REPLACEMENT not in text or not self._byte_of:
            return text
        tokens: list[str] = []
        run = bytearray()
        for token_id in ids:
            byte = self._byte_of.get(token_id)
            if byte is not None:
                run.append(byte)
                continue
            tokens += _valid_tokens(run)
            run.clear()
            tokens.append(self._tokenizer.id_to_token(token_id) or "")
        return str(self._tokenizer.decoder.decode([*tokens, *_valid_tokens(run)]))

    def num_pending(self, ids: Sequence[int]) -> int:
        """Return how many byte tokens at the end of `ids` may be the beginning of a character."""
        if not ids or ids[-1] not in self._byte_of:
            return 0
        run = itertools.takewhile(self._byte_of.__contains__, reversed(ids))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self._byte_of[token_id] for token_id in run)[::-1])
        return len(decoder.getstate()[0])


def _byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


def _valid_tokens(run: bytearray) -> list[str]:
    """Return byte tokens of the valid characters of a run, and U+FFFD for each invalid part."""
    tokens: list[str] = []
    for character in run.decode(errors="replace"):
        if character == REPLACEMENT:
            tokens.append(REPLACEMENT)
        else:
            tokens += map(_byte_token, character.encode())
    return tokens


class WindowDetokenizer:
    """Detokenizer for tokens whose text depends on their neighbours (metaspace, WordPiece).

    tokens:  a b c | d e          a b c: context, whose text was returned before
                   ^ returned     d e: held back until their text is complete

    A context starts where a character starts, so that a run of byte tokens is never split.
    """

    __slots__ = ("_decoder", "_ids", "_num_returned", "_returned_text", "_special_ids")

    def __init__(
        self, decoder: TokenDecoder, special_ids: frozenset[int], prompt: Sequence[int]
    ) -> None:
        self._decoder = decoder
        self._special_ids = special_ids
        self._ids = [
            token_id for token_id in prompt[-CONTEXT_TOKENS:] if token_id not in special_ids
        ]
        self._num_returned = len(self._ids)
        self._returned_text = self._decoder.decode(self._ids)

    def decode_token(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._ids.append(token_id)
        num_ready = len(self._ids) - self._decoder.num_pending(self._ids)
        if num_ready <= self._num_returned:
            return ""
        text = self._decoder.decode(self._ids[:num_ready])
        incomplete = len(text) <= len(self._returned_text) or (
            text.endswith(REPLACEMENT) and not self._decoder.has_byte_tokens
        )
        if incomplete and num_ready - self._num_returned < MAX_HELD_TOKENS:
            return ""
        return self._return_text(text, num_ready)

    def flush_text(self) -> str:
        return self._return_text(self._decoder.decode(self._ids), len(self._ids))

    def _return_text(self, text: str, num_ready: int) -> str:
        """Return the text after the context; the ready tokens become the next context."""
        new = text[len(self._returned_text) :]
        context = self._ids[self._num_returned : num_ready]
        self._ids = context + self._ids[num_ready:]
        self._num_returned = len(context)
        self._returned_text = self._decoder.decode(context)
        return new


class JoinedSpecialTokens:
    """Removes the space that a tokenizer puts between two special tokens."""

    __slots__ = ("_after_special", "_inner", "_special_ids")

    def __init__(self, inner: Detokenizer, special_ids: frozenset[int]) -> None:
        self._inner = inner
        self._special_ids = special_ids
        self._after_special = False

    def decode_token(self, token_id: int) -> str:
        text = self._inner.decode_token(token_id)
        special = token_id in self._special_ids
        if special and self._after_special:
            text = text.removeprefix(" ")
        self._after_special = special
        return text

    def flush_text(self) -> str:
        return self._inner.flush_text()


class NoText:
    """Detokenizer of a request with `detokenize` false: no token has text.

    counter: counts the tokens of the reasoning, whose end only their text shows.
    """

    def __init__(self, counter: Detokenizer | None = None) -> None:
        self._counter = counter

    def decode_token(self, token_id: int) -> str:
        if self._counter is not None:
            self._counter.decode_token(token_id)
        return ""

    def flush_text(self) -> str:
        return ""


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether every token of this tokenizer is a string of bytes."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


class MarkerDetokenizer:
    """Gives text to some special tokens that the inner detokenizer drops.

    markers: token id → text, for the markers of tool calls and reasoning.
    """

    def __init__(self, inner: Detokenizer, markers: Mapping[int, str]) -> None:
        self._inner = inner
        self._markers = markers

    def decode_token(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        if marker is None:
            return self._inner.decode_token(token_id)
        return self._inner.flush_text() + marker

    def flush_text(self) -> str:
        return self._inner.flush_text()
