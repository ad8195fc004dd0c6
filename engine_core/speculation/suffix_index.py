"""Loads the compiled index of token sequences, csrc/suffix_index.c.

Build it with `python -m engine_core.build_native`.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from engine_core import build_native


class SuffixIndex(Protocol):
    """Token sequences, and where the end of a sequence occurred in them before.

    Methods that need memory raise MemoryError and change nothing then.

    Made as SuffixIndex(orders, depth=64, max_candidates=32, max_tokens=2**30, factor=1.0,
    min_probability=0.1).

    orders: lengths of the shortest matches to look for, ascending. depth: length beyond which
    matches are equal. max_candidates: most recent occurrences to count, for each order.
    max_tokens: limit, rounded up to a power of two, beyond which the oldest tokens are forgotten.
    factor: most tokens of a draft for each token of the match. min_probability: of each token.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens and separators in it."""

    @property
    def end(self) -> int:
        """Position of the next token, counted from the first one ever."""

    @property
    def num_bytes(self) -> int: ...

    def extend(self, token_ids: list[int], start: int, end: int) -> None:
        """Append token_ids[start:end]. An id is in [0, 2^32 - 1), otherwise OverflowError."""

    def reserve(self, num_tokens: int) -> None:
        """Make room for this many more tokens, so that adding them in parts moves none."""

    def separate(self) -> None:
        """Begin another sequence; matches and drafts end at its borders."""

    def forget_before(self, position: int) -> None: ...

    def propose(
        self, source: "SuffixIndex", max_tokens: int
    ) -> tuple[int, list[int], list[float]] | None:
        """Return (length of the match, token ids, probabilities) of what followed it here.

        The match is of the last tokens of `source`, which may be the index itself. Of all lengths,
        the one wins whose draft has the highest sum of probabilities. A probability is the share
        of the occurrences that went on with the token and all before it.
        """

    def lookup(
        self, source: "SuffixIndex", max_tokens: int
    ) -> tuple[int, list[int], list[float]] | None:
        """Return what followed the longest match, the most recent one of equally long ones."""


MakeSuffixIndex = Callable[..., SuffixIndex]


def load_suffix_index(folder: Path = build_native.SOURCE_DIR) -> MakeSuffixIndex | None:
    """Return the compiled class, or None if `folder` has none for this source and this Python."""
    path = build_native.library(build_native.SUFFIX_INDEX, folder)
    spec = importlib.util.spec_from_file_location("suffix_index", path)
    if spec is None or spec.loader is None:
        return None
    try:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError):
        return None
    return cast(MakeSuffixIndex, module.SuffixIndex)
