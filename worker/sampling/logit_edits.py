"""Changes of scores that requests ask for, made for all rows of a step at once.

Works on index lists over the whole batch: the cost is that of the tokens that are named or
were said, and rows that change nothing have no part in it. The order is

    allowed     −inf for all but the allowed tokens
    forbidden   −inf for tokens that would complete a bad word
    bias        is added
    penalties   repetition: a score above 0 is divided, one below multiplied;
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

# One row's changes of scores as the kernels read them: a struct of pointers.
#
# Owns the struct, and keeps alive what it points to. Most of it never changes, so it is made
# once a sequence and not once a step.


Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
_EVERY_TOKEN: Final = -1
_NO_IDS: Final = np.empty(0, dtype=np.int64)
_NO_VALUES: Final = np.empty(0, dtype=np.float32)


class EditsView:
    """TokendEdits of csrc/edits.h.

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
        """The first `size` of these are the tokens that penalties are for."""
        if ids is not self._count_ids:
            self._count_ids, self._counts = ids, counts
            self._fields.count_ids = ids.ctypes.data
            self._fields.counts = counts.ctypes.data
        self._fields.num_counts = size

    def set_forbidden(self, token_ids: Sequence[int]) -> None:
        """Tokens that cannot be chosen now."""
        self._fields.num_forbidden = len(token_ids)
        if token_ids:
            self._forbidden = np.array(token_ids, dtype=np.int64)
            self._fields.forbidden = self._forbidden.ctypes.data


# What one sequence's parameters change about its scores, and the tokens that this depends on.
#
# Owns the token counts of a sequence with penalties, and the end of its outputs where it has bad
# words. All of it follows from prompt and outputs, so a sequence that comes back after a
# preemption or in another process has what it had. Made only for sequences that change scores.


class TokenCounts:
    """How often each token is among the outputs; also those of the prompt, with 0, if wanted.

    The distinct tokens are in no order, each at the same place for good:

        ids      5 9 2 7 . .
        counts   0 3 1 1 . .
    """

    def __init__(self, seen: Sequence[int], outputs: Sequence[int]) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.float32)
        distinct, counts = np.unique(np.array(outputs, dtype=np.int64), return_counts=True)
        rest = np.setdiff1d(np.array(seen, dtype=np.int64), distinct)
        self._reserve(len(distinct) + len(rest))
        for place, token_id in enumerate([*distinct.tolist(), *rest.tolist()]):
            self._place[token_id] = place
            self._ids[place] = token_id
        self._counts[: len(distinct)] = counts

    def add(self, token_id: int) -> None:
        """One more output."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._reserve(2 * place + 8)
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        """Distinct tokens, int64 [D]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of them is among the outputs, float32 [D]."""
        return self._counts[: len(self._place)]

    def show(self, view: EditsView) -> None:
        """Let the kernels see them as they are now."""
        view.set_counts(self._ids, self._counts, len(self._place))

    def _reserve(self, size: int) -> None:
        ids, counts = np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        ids[: len(self._ids)] = self._ids
        counts[: len(self._counts)] = self._counts
        self._ids, self._counts = ids, counts


class BadWords:
    """Sequences of tokens that the outputs are not to come to hold.

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
                self._by_known[begin[:-1]] += [(each, begin[-1]) for each in last]
        self._lengths = sorted({len(begin) for begin in ends})
        longest = max(self._lengths, default=0)
        self._tail = list(outputs[len(outputs) - min(longest, len(outputs)) :])
        self._longest = longest

    def add(self, token_id: int) -> None:
        """One more output."""
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: -self._longest]

    @property
    def forbidden(self) -> list[int]:
        """Tokens that would complete a word now; one may be there twice."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                found += self._ends.get(tuple(self._tail[len(self._tail) - length :]), ())
        return found

    def forbidden_after(self) -> list[tuple[int, int]]:
        """(token, output) pairs: what each next output would forbid, which is not known yet.

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
        """Tokens that are words by themselves."""
        return self._ends.get((), [])


class RowEdits:
    """One sequence's changes of scores.

    allowed: int64 [A], the only tokens that can be chosen, or None for all.
    bias_ids int64 [B], bias_values float32 [B].
    repetition, frequency, presence: penalties; counts: what they are for, where it `penalises`.
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
        """The sequence has one more output."""
        if self.penalises:
            self.counts.add(token_id)
        self._bad_words.add(token_id)

    @property
    def forbidden(self) -> list[int]:
        """Tokens that cannot be chosen now."""
        return self._bad_words.forbidden

    @property
    def forbidden_always(self) -> list[int]:
        """Those of them that no output matters to."""
        return self._bad_words.always

    def forbidden_after(self) -> list[tuple[int, int]]:
        """(token, output) pairs: the others, by an output that is not known yet."""
        return self._bad_words.forbidden_after()

    def allowed_words(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """`allowed`, where there is, as a mask of a grammar: uint32 [ceil(vocab_size / 32)]."""
        if self._allowed_words is None:
            assert self.allowed is not None
            bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.bool_)
            bits[self.allowed] = True
            self._allowed_words = np.packbits(bits, bitorder="little").view("<u4")
        return self._allowed_words

    def address(self, late: Sequence[int] = ()) -> int:
        """Of a TokendEdits with what the changes are now; its own until it is asked for again.

        late: tokens that cannot be chosen yet, beside those of the bad words.
        """
        self.counts.show(self._view)
        self._view.set_forbidden([*self.forbidden, *late])
        return self._view.address


EditsByRow = Sequence[tuple[int, RowEdits]]
Scores = npt.NDArray[np.float32]
NEVER = np.float32("-inf")


def edit_logits(logits: torch.Tensor, edits: EditsByRow) -> None:
    """Change logits float32 [N, V], contiguous and on the host, in place.

    edits: (row, what to change) pairs.
    """
    scores = logits.numpy()
    for row, each in edits:
        if each.allowed is not None:
            _keep_only(scores[row], each.allowed)
    flat = logits.view(-1).numpy()
    width = logits.shape[1]
    forbidden = [row * width + each for row, edit in edits for each in edit.forbidden]
    if forbidden:
        flat[forbidden] = NEVER
    biased = [(row, each) for row, each in edits if len(each.bias_ids)]
    if biased:
        places = np.concatenate([row * width + each.bias_ids for row, each in biased])
        flat[places] += np.concatenate([each.bias_values for _, each in biased])
    penalised = [(row, each) for row, each in edits if len(each.counts.ids)]
    if penalised:
        _penalise(flat, width, penalised)


def _keep_only(scores: Scores, allowed: npt.NDArray[np.int64]) -> None:
    """Forbid all tokens of scores [V] but these."""
    kept = scores[allowed]
    scores.fill(NEVER)
    scores[allowed] = kept


def _penalise(flat: Scores, width: int, edits: EditsByRow) -> None:
    """flat [N * V]: rows of `width` scores one after the other."""
    places = np.concatenate([row * width + each.counts.ids for row, each in edits])
    counts = np.concatenate([each.counts.counts for _, each in edits])
    lengths = [len(each.counts.ids) for _, each in edits]
    rules = np.array([(e.repetition, e.frequency, e.presence) for _, e in edits], dtype=np.float32)
    repetition, frequency, presence = np.repeat(rules, lengths, axis=0).T
    scores = flat[places]
    scores = np.where(scores > 0, scores / repetition, scores * repetition)
    flat[places] = scores - frequency * counts - presence * (counts > 0)
