"""What the rows of a step want of their scores beside a token, as arrays for a device.

Owns nothing: reads rows, and the masks that grammars gave for the step. A row's last token may
be on its way yet; what depends on it is said for each token that it may turn out to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proto.scheduler_output import GrammarOutput
from worker.batch.rows import NO_LOGPROBS, Rows
from worker.sample.device_edits import ANY_TOKEN, NONE
from worker.sample.grammar_masks import WORD_BITS, row_masks
from worker.sample.row_edits import RowEdits

NEVER = float("-inf")
Ids = NDArray[np.int64]
Values = NDArray[np.float32]
NEUTRAL = (1.0, 0.0, 0.0)
"""Penalties that change nothing: repetition, frequency, presence."""


@dataclass(frozen=True, slots=True)
class Penalised:
    """One row with penalties. number: which of the changed rows. num_outputs: it has, pending
    ones too."""

    number: int
    row: int
    edits: RowEdits
    num_outputs: int


@dataclass(frozen=True, slots=True)
class ScoreWishes:
    """Changes of the scores of N sequences.

    listed: place int64, value float32, source int64, needed int64, as in `Listed`.
    at, masks, rules, words: as in `RowChanges`. penalised: in order of their numbers.
    """

    listed: tuple[Ids, Values, Ids, Ids]
    at: NDArray[np.int64]
    masks: NDArray[np.int64]
    rules: NDArray[np.float32]
    words: NDArray[np.int32]
    penalised: tuple[Penalised, ...]

    def __bool__(self) -> bool:
        return bool(len(self.listed[0]) or len(self.at))


@dataclass(frozen=True, slots=True)
class LogprobWishes:
    """W of N sequences that want log-probabilities.

    at: int64 [W], which. num_logprobs: int32 [W]; position: uint32 [W], of the output.
    named: int64 token ids of each, in place of the best ones where there are some.
    """

    at: NDArray[np.int64]
    num_logprobs: NDArray[np.int32]
    position: NDArray[np.uint32]
    named: tuple[tuple[int, ...], ...]

    def __bool__(self) -> bool:
        return bool(len(self.at))


class _Listing:
    """Collects changes of single scores."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._parts: list[tuple[Ids, Values, Ids, Ids]] = []

    def add(
        self,
        at: int,
        token_ids: Sequence[int] | Ids,
        values: float | Values,
        source: int = 0,
        needed: int | Sequence[int] = ANY_TOKEN,
    ) -> None:
        """Tokens of one sequence."""
        place = at * self._vocab_size + np.asarray(token_ids, dtype=np.int64)
        of_each = (
            np.asarray(values, dtype=np.float32),
            np.int64(source),
            np.asarray(needed, dtype=np.int64),
        )
        self._parts.append((place, *(np.broadcast_to(each, place.shape) for each in of_each)))  # type: ignore[arg-type]

    def arrays(self) -> tuple[Ids, Values, Ids, Ids]:
        if not self._parts:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, np.empty(0, dtype=np.float32), nothing, nothing
        place, value, source, needed = map(np.concatenate, zip(*self._parts, strict=True))
        return place, value, source, needed


def score_wishes(
    rows: Rows,
    at: NDArray[np.int64],
    handles: Sequence[int],
    grammars: GrammarOutput,
    vocab_size: int,
) -> ScoreWishes:
    """Those of the rows `at` [N] with these handles; grammars: masks of some of them."""
    listing = _Listing(vocab_size)
    num_outputs = rows.num_tokens[at] - rows.num_prompt_tokens[at]
    for index in np.flatnonzero(num_outputs < rows.min_output[at]).tolist():
        listing.add(index, sorted(rows.params(handles[index]).stop_ids), NEVER)
    masks = row_masks(grammars, handles)
    words = dict(zip(masks.rows.tolist(), masks.words, strict=True))
    rules = dict.fromkeys(words, NEUTRAL)
    penalised: dict[int, RowEdits] = {}
    for index, row in enumerate(at.tolist()) if rows.edits else ():
        if (edits := rows.edits.get(row)) is None:
            continue
        _list_edits(listing, index, row, edits, rows.last_is_pending(row))
        if edits.allowed is not None:
            allowed = edits.allowed_words(vocab_size)
            words[index] = words[index] & allowed if index in words else allowed
            rules[index] = NEUTRAL
        if edits.penalises:
            penalised[index] = edits
            rules[index] = (edits.repetition, edits.frequency, edits.presence)
    number_of = {index: number for number, index in enumerate(rules)}
    word_row = {index: place for place, index in enumerate(words)}
    return ScoreWishes(
        listing.arrays(),
        np.array(list(rules), dtype=np.int64),
        np.array([word_row.get(index, NONE) for index in rules], dtype=np.int64),
        np.array(list(rules.values()), dtype=np.float32).reshape(-1, 3),
        np.array(list(words.values()), dtype="<u4")
        .reshape(-1, -(-vocab_size // WORD_BITS))
        .view(np.int32),
        tuple(
            Penalised(number_of[index], int(at[index]), edits, int(num_outputs[index]))
            for index, edits in penalised.items()
        ),
    )


def _list_edits(listing: _Listing, at: int, row: int, edits: RowEdits, pending: bool) -> None:
    """Biases and what is forbidden; `pending`: the row's last token is not known yet."""
    if len(edits.bias_ids):
        listing.add(at, edits.bias_ids, edits.bias_values)
    if forbidden := edits.forbidden_always if pending else edits.forbidden:
        listing.add(at, forbidden, NEVER)
    if pending and (pairs := edits.forbidden_after()):
        token_ids, needed = zip(*pairs, strict=True)
        listing.add(at, token_ids, NEVER, row, needed)


def logprob_wishes(rows: Rows, at: NDArray[np.int64], handles: Sequence[int]) -> LogprobWishes:
    """Those of the rows `at` [N] with these handles."""
    asking = np.flatnonzero(rows.num_logprobs[at] != NO_LOGPROBS)
    some = at[asking]
    return LogprobWishes(
        asking,
        rows.num_logprobs[some],
        (rows.num_tokens[some] - rows.num_prompt_tokens[some]).astype(np.uint32),
        tuple(rows.params(handles[index]).logprob_token_ids for index in asking.tolist()),
    )
