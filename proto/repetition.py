"""When outputs that say the same over and over are to end."""

from collections.abc import Sequence
from typing import Final

import msgspec

from proto.errors import require, shown

MAX_PATTERN_SIZE: Final = 256
MAX_REPEATED_TOKENS: Final = 4096
"""Of a pattern times how often it is there: they are looked at with every token."""


class RepetitionDetection(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Ends a request whose outputs end with the same tokens over and over.

    min_pattern_size, max_pattern_size: tokens of what is repeated.
    min_count: how many times in a row are too many.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def validate(self) -> None:
        """Raise InvalidRequestError for what is out of range."""
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
        """Whether they end with a pattern that is there `min_count` times in a row.

        size 2, count 3     x a b a b a b       the last 6, but for the first 2,
                              |-------|         are the last 6 but for the last 2
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
