"""Edits of logits that requests ask for: allowed tokens, bad words, biases, penalties.

The cost is that of the tokens that are named or were output; rows without edits cost nothing.
The order is

    allowed     −inf for all but the allowed tokens
    forbidden   −inf for tokens that would complete a bad word
    bias        is added
    penalties   repetition: a logit above 0 is divided, one below multiplied;
                then − frequency · count − presence · (count > 0)

which is that of vLLM's sampler: bias counts before penalties, and neither brings back a
token that is forbidden.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.logit_edits import LogitEdits
from worker.kernels import Edits
from worker.sampling.grammar_masks import WORD_BITS

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
_EVERY_TOKEN: Final = -1
_NO_IDS: Final = np.empty(0, dtype=np.int64)
_NO_VALUES: Final = np.empty(0, dtype=np.float32)


class EditsView:
    """The edits of one row as the kernels read them: TokendEdits of csrc/edits.h.

    Owns the struct and keeps alive what it points to. Made once for each sequence.

    allowed: int64 [A], or None for every token. bias_ids int64 [B], bias_values float32 [B].
    rules: repetition, frequency and presence penalty.
    """

    def __init__(
        self,
        allowed: Ids | None,
        bias_ids: Ids,
        bias_values: Values,
        rules: tuple[float, float, float],
    ) -> None:
        self._constant = (allowed, bias_ids, bias_values)
        self._count_ids, self._counts, self._forbidden = _NO_IDS, _NO_VALUES, _NO_IDS
        repetition, frequency, presence = rules
        self._fields = Edits(
            num_allowed=_EVERY_TOKEN if allowed is None else len(allowed),
            allowed=None if allowed is None else allowed.ctypes.data,
            num_biases=len(bias_ids),
            bias_ids=bias_ids.ctypes.data,
            bias_values=bias_values.ctypes.data,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )
        self.address = ctypes.addressof(self._fields)

    def set_counts(self, ids: Ids, counts: Values, size: int) -> None:
        """Set the tokens that penalties apply to: the first `size` of these."""
        if ids is not self._count_ids:
            self._count_ids, self._counts = ids, counts
            self._fields.count_ids = ids.ctypes.data
            self._fields.counts = counts.ctypes.data
        self._fields.num_counts = size

    def set_forbidden(self, token_ids: Sequence[int]) -> None:
        """Set the tokens that cannot be chosen now."""
        self._fields.num_forbidden = len(token_ids)
        if token_ids:
            self._forbidden = np.array(token_ids, dtype=np.int64)
            self._fields.forbidden = self._forbidden.ctypes.data


class TokenCounts:
    """How often each token is among the outputs.

    seen: tokens that are listed too, with a count of 0 unless they are outputs. The distinct
    tokens are in no order, but a token keeps its index:

        ids      5 9 2 7 . .
        counts   0 3 1 1 . .
    """

    def __init__(self, seen: Sequence[int], outputs: Sequence[int]) -> None:
        self._index_of: dict[int, int] = {}
        self._ids = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.float32)
        distinct, counts = np.unique(np.array(outputs, dtype=np.int64), return_counts=True)
        rest = np.setdiff1d(np.array(seen, dtype=np.int64), distinct)
        self._reserve(len(distinct) + len(rest))
        for index, token_id in enumerate([*distinct.tolist(), *rest.tolist()]):
            self._index_of[token_id] = index
            self._ids[index] = token_id
        self._counts[: len(distinct)] = counts

    def add(self, token_id: int) -> None:
        """Append an output."""
        index = self._index_of.setdefault(token_id, len(self._index_of))
        if index == len(self._ids):
            self._reserve(2 * index + 8)
        self._ids[index] = token_id
        self._counts[index] += 1

    @property
    def ids(self) -> Ids:
        """Distinct tokens, int64 [D]."""
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of them is among the outputs, float32 [D]."""
        return self._counts[: len(self._index_of)]

    def show(self, view: EditsView) -> None:
        """Point a view at the current counts."""
        view.set_counts(self._ids, self._counts, len(self._index_of))

    def _reserve(self, size: int) -> None:
        ids, counts = np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        ids[: len(self._ids)] = self._ids
        counts[: len(self._counts)] = self._counts
        self._ids, self._counts = ids, counts


class BadWords:
    """Sequences of tokens that must not occur in the outputs.

    bad word a b c, outputs … a b   →   c is forbidden now
    """

    def __init__(self, words: Sequence[Sequence[int]], outputs: Sequence[int]) -> None:
        ends: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in words:
            ends[tuple(word[:-1])].add(word[-1])
        self._ends = {begin: sorted(last) for begin, last in ends.items()}
        self._by_known: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for begin, last in self._ends.items():
            if begin:
                self._by_known[begin[:-1]] += [(token_id, begin[-1]) for token_id in last]
        self._lengths = sorted({len(begin) for begin in ends})
        longest = max(self._lengths, default=0)
        self._tail = list(outputs[len(outputs) - min(longest, len(outputs)) :])
        self._longest = longest

    def add(self, token_id: int) -> None:
        """Append an output."""
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: -self._longest]

    @property
    def forbidden(self) -> list[int]:
        """Tokens that would complete a bad word now, perhaps with duplicates."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                found += self._ends.get(tuple(self._tail[len(self._tail) - length :]), ())
        return found

    def forbidden_after(self) -> list[tuple[int, int]]:
        """Return (token, output) pairs: the token is forbidden if the pending output is that one.

        bad word a b c, outputs … a ?   →   c is forbidden if ? is b
        """
        found: list[tuple[int, int]] = []
        for length in self._lengths:
            if 1 <= length <= len(self._tail) + 1:
                known = tuple(self._tail[len(self._tail) - length + 1 :])
                found += self._by_known.get(known, ())
        return found

    @property
    def always(self) -> list[int]:
        """Bad words of one token."""
        return self._ends.get((), [])


class RowEdits:
    """The edits of one sequence, and the tokens they depend on.

    All of it follows from prompt and outputs, so it is the same after a preemption or in another
    process. Made only for sequences with edits.
    allowed: int64 [A], the only tokens that can be chosen, or None for all.
    bias_ids int64 [B], bias_values float32 [B].
    repetition, frequency, presence: penalties. counts: the tokens they apply to, if `penalises`.
    """

    __slots__ = (
        "_allowed_words",
        "_bad_words",
        "_view",
        "allowed",
        "bias_ids",
        "bias_values",
        "counts",
        "frequency",
        "penalises",
        "presence",
        "repetition",
    )

    def __init__(self, edits: LogitEdits, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        self.allowed = None
        if edits.allowed_token_ids is not None:
            self.allowed = np.array(edits.allowed_token_ids, dtype=np.int64)
        self.bias_ids = np.array(edits.bias_token_ids, dtype=np.int64)
        self.bias_values = np.array(edits.bias_values, dtype=np.float32)
        self.repetition = edits.repetition_penalty
        self.frequency = edits.frequency_penalty
        self.presence = edits.presence_penalty
        self.penalises = edits.penalises
        seen = prompt if edits.repetition_penalty != 1.0 else ()
        self.counts = TokenCounts(seen, outputs if edits.penalises else ())
        self._bad_words = BadWords(edits.bad_words, outputs)
        self._allowed_words: npt.NDArray[np.uint32] | None = None
        rules = (self.repetition, self.frequency, self.presence)
        self._view = EditsView(self.allowed, self.bias_ids, self.bias_values, rules)

    def append(self, token_id: int) -> None:
        """Append an output of the sequence."""
        if self.penalises:
            self.counts.add(token_id)
        self._bad_words.add(token_id)

    @property
    def forbidden(self) -> list[int]:
        """Tokens that cannot be chosen now."""
        return self._bad_words.forbidden

    @property
    def forbidden_always(self) -> list[int]:
        """Those of them that do not depend on outputs."""
        return self._bad_words.always

    def forbidden_after(self) -> list[tuple[int, int]]:
        """Return the (token, output) pairs that depend on an output not known yet."""
        return self._bad_words.forbidden_after()

    def allowed_words(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """Return `allowed` in the form of a grammar mask: uint32 [ceil(vocab_size / 32)]."""
        if self._allowed_words is None:
            assert self.allowed is not None
            bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.bool_)
            bits[self.allowed] = True
            self._allowed_words = np.packbits(bits, bitorder="little").view("<u4")
        return self._allowed_words

    def address(self, suppressed: Sequence[int] = ()) -> int:
        """Return the address of a TokendEdits with the current edits, valid until the next call.

        suppressed: tokens that cannot be chosen yet, beside those of the bad words.
        """
        self.counts.show(self._view)
        self._view.set_forbidden([*self.forbidden, *suppressed])
        return self._view.address


EditsByRow = Sequence[tuple[int, RowEdits]]
NEVER = np.float32("-inf")


def edit_logits(logits: torch.Tensor, edits: EditsByRow) -> None:
    """Make edits, (row, edits) pairs, in logits float32 [N, V], contiguous and on the host."""
    array = logits.numpy()
    for row, edit in edits:
        if edit.allowed is not None:
            _keep_only(array[row], edit.allowed)
    flat = logits.view(-1).numpy()
    width = logits.shape[1]
    forbidden = [row * width + token_id for row, edit in edits for token_id in edit.forbidden]
    if forbidden:
        flat[forbidden] = NEVER
    biased = [(row, edit) for row, edit in edits if len(edit.bias_ids)]
    if biased:
        indices = np.concatenate([row * width + edit.bias_ids for row, edit in biased])
        flat[indices] += np.concatenate([edit.bias_values for _, edit in biased])
    penalised = [(row, edit) for row, edit in edits if len(edit.counts.ids)]
    if penalised:
        _penalise(flat, width, penalised)


def _keep_only(logits: Values, allowed: Ids) -> None:
    """Forbid all tokens but these; logits: [V]."""
    kept = logits[allowed]
    logits.fill(NEVER)
    logits[allowed] = kept


def _penalise(flat: Values, width: int, edits: EditsByRow) -> None:
    """Make penalties in flat [N * V], rows of `width` logits."""
    indices = np.concatenate([row * width + edit.counts.ids for row, edit in edits])
    counts = np.concatenate([edit.counts.counts for _, edit in edits])
    lengths = [len(edit.counts.ids) for _, edit in edits]
    rules = np.array([(e.repetition, e.frequency, e.presence) for _, e in edits], dtype=np.float32)
    repetition, frequency, presence = np.repeat(rules, lengths, axis=0).T
    logits = flat[indices]
    logits = np.where(logits > 0, logits / repetition, logits * repetition)
    flat[indices] = logits - frequency * counts - presence * (counts > 0)
