"""What one sequence's parameters change about its scores, and the tokens that this depends on.

Owns the token counts of a sequence with penalties, and the end of its outputs where it has bad
words. All of it follows from prompt and outputs, so a sequence that comes back after a
preemption or in another process has what it had. Made only for sequences that change scores.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from proto.logit_edits import LogitEdits
from worker.sample.edits_view import EditsView
from worker.sample.grammar_masks import WORD_BITS

Ids = npt.NDArray[np.int64]


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
