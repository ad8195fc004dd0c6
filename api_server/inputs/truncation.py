"""How much of a prompt is kept, and which end of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from tokenizers import Tokenizer

from proto.errors import InvalidRequestError

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
