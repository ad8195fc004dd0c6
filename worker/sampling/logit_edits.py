"""Edits of logits that requests ask for: allowed tokens, bad words, biases, penalties, grammars.

The cost depends on the number of tokens that are named or were output; rows without edits cost
nothing. The order is

    allowed     −inf for all tokens except the allowed ones
    forbidden   −inf for tokens that would complete a bad word
    bias        logit_bias is added
    penalties   repetition: a logit above 0 is divided, one below 0 multiplied;
                then − frequency · count − presence · (count > 0)
    grammar     −inf for tokens that the grammar mask rules out

as in vLLM's sampler: biases count before penalties, and neither of them makes a forbidden token
possible again. Start with `RowEdits`; `edit_logits` is the reference in numpy.
"""

import copy
import ctypes
from collections import defaultdict
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.logit_edits import LogitEdits
from proto.messages.scheduler_output import GrammarOutput

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
WORD_BITS: Final = 32
"""Tokens in a word of a mask; bit i of word j allows token 32 j + i."""
_EVERY_TOKEN: Final = -1


class Edits(ctypes.Structure):
    """The edits of a row for C++ kernels: TokendEdits of csrc/sampling/sampling.h."""

    _fields_ = [
        ("num_allowed", c_int64),
        ("allowed", c_void_p),
        ("num_forbidden", c_int64),
        ("forbidden", c_void_p),
        ("num_biases", c_int64),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("num_counts", c_int64),
        ("count_ids", c_void_p),
        ("counts", c_void_p),
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
    ]


class TokenCounts:
    """How often each token is among the outputs.

    seen: tokens that are listed too, with a count of 0 unless they are outputs. The distinct
    tokens are in no order, but a token keeps its index:

        ids      5 9 2 7 . .
        counts   0 3 1 1 . .
    """

    def __init__(self, seen: Sequence[int], outputs: Sequence[int]) -> None:
        distinct, counts = np.unique(np.array(outputs, dtype=np.int64), return_counts=True)
        rest = np.setdiff1d(np.array(seen, dtype=np.int64), distinct)
        self._ids = np.concatenate([distinct, rest])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._counts[: len(distinct)] = counts
        self._num_ids = len(self._ids)
        self._index_of = {token_id: index for index, token_id in enumerate(self._ids.tolist())}
        self._index_of_more: dict[int, int] | None = None

    def after(self, outputs: Sequence[int]) -> "TokenCounts":
        """Return the counts behind more outputs; these counts stay.

        A draft takes them for each of its positions, so the index, which a long prompt makes
        large, is shared and not copied. Valid until this object counts another output.
        """
        made = copy.copy(self)
        made._index_of_more = {}
        made._reserve(self._num_ids + len(outputs))
        for token_id in outputs:
            made.count_output(token_id)
        return made

    def count_output(self, token_id: int) -> None:
        index = self._index_of.get(token_id)
        if index is None:
            more = self._index_of if self._index_of_more is None else self._index_of_more
            index = more.setdefault(token_id, self._num_ids)
            if index == self._num_ids:
                if index == len(self._ids):
                    self._reserve(2 * index + 8)
                self._ids[index] = token_id
                self._num_ids += 1
        self._counts[index] += 1

    @property
    def ids(self) -> Ids:
        """Distinct tokens, int64 [D]."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> Values:
        """How often each distinct token is among the outputs, float32 [D]."""
        return self._counts[: self._num_ids]

    @property
    def buffers(self) -> tuple[Ids, Values]:
        """The memory of `ids` and `counts`, which may be longer; replaced when it is too short."""
        return self._ids, self._counts

    def _reserve(self, size: int) -> None:
        ids, counts = np.empty(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        ids[: self._num_ids], counts[: self._num_ids] = self.ids, self.counts
        self._ids, self._counts = ids, counts


class BadWords:
    """Token sequences that must not occur in the outputs.

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

    def after(self, outputs: Sequence[int]) -> "BadWords":
        """Return the same words behind more outputs; this object stays."""
        made = copy.copy(self)
        made._tail = self._tail.copy()
        for token_id in outputs:
            made.append(token_id)
        return made

    def append(self, token_id: int) -> None:
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: -self._longest]

    @property
    def forbidden(self) -> list[int]:
        """Tokens that would complete a bad word if they came next, perhaps with duplicates."""
        found: list[int] = []
        for length in self._lengths:
            if length <= len(self._tail):
                found += self._ends.get(tuple(self._tail[len(self._tail) - length :]), ())
        return found

    def forbidden_after(self) -> list[tuple[int, int]]:
        """Return (token, output) pairs: the token is forbidden if the pending output is `output`.

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
        """Bad words of a single token, which are always forbidden."""
        return self._ends.get((), [])


class RowEdits:
    """The logit edits of one sequence, which follow from its prompt and outputs alone.

    Exists only for sequences with edits.
    allowed: int64 [A], the only tokens that can be chosen, or None for all.
    bias_ids int64 [B], bias_values float32 [B].
    repetition, frequency, presence: penalties. penalises: whether any of them has an effect.
    counts: the tokens that penalties apply to.
    """

    __slots__ = (
        "_allowed_words",
        "_count_buffers",
        "_fields",
        "_forbidden",
        "allowed",
        "bad_words",
        "bias_ids",
        "bias_values",
        "counts",
        "frequency",
        "penalises",
        "presence",
        "repetition",
    )

    def __init__(self, edits: LogitEdits, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        self.allowed: Ids | None = None
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
        self.bad_words = BadWords(edits.bad_words, outputs)
        self._allowed_words: npt.NDArray[np.uint32] | None = None
        self._forbidden = np.empty(0, dtype=np.int64)
        self._count_buffers: tuple[Ids, Values] | None = None
        self._fields = Edits(
            num_allowed=_EVERY_TOKEN if self.allowed is None else len(self.allowed),
            allowed=None if self.allowed is None else self.allowed.ctypes.data,
            num_biases=len(self.bias_ids),
            bias_ids=self.bias_ids.ctypes.data,
            bias_values=self.bias_values.ctypes.data,
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
        )

    def after(self, token_ids: Sequence[int]) -> "RowEdits":
        """Return the edits behind more outputs, which may be drafts; these edits stay."""
        made = copy.copy(self)
        made.counts = self.counts.after(token_ids if self.penalises else ())
        made.bad_words = self.bad_words.after(token_ids)
        made._fields, made._count_buffers = Edits.from_buffer_copy(self._fields), None
        return made

    def append(self, token_id: int) -> None:
        if self.penalises:
            self.counts.count_output(token_id)
        self.bad_words.append(token_id)

    def allowed_words(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """Return `allowed` in the form of a grammar mask: uint32 [ceil(vocab_size / 32)]."""
        if self._allowed_words is None:
            assert self.allowed is not None
            bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.bool_)
            bits[self.allowed] = True
            self._allowed_words = np.packbits(bits, bitorder="little").view("<u4")
        return self._allowed_words

    def address(self, suppressed: Sequence[int] = ()) -> int:
        """Return the address of a TokendEdits of csrc/sampling/sampling.h, until the next call.

        suppressed: tokens to forbid beside those of the bad words.
        """
        ids, counts = self.counts.buffers
        if self._count_buffers is None or ids is not self._count_buffers[0]:
            self._count_buffers = ids, counts  # kept alive, as the struct points to their memory
            self._fields.count_ids = ids.ctypes.data
            self._fields.counts = counts.ctypes.data
        self._fields.num_counts = len(self.counts.ids)
        forbidden = [*self.bad_words.forbidden, *suppressed]
        self._fields.num_forbidden = len(forbidden)
        if forbidden:
            self._forbidden = np.array(forbidden, dtype=np.int64)
            self._fields.forbidden = self._forbidden.ctypes.data
        return ctypes.addressof(self._fields)


EditsByRow = Sequence[tuple[int, RowEdits]]
NEVER = np.float32("-inf")


def edit_logits(logits: torch.Tensor, edits: EditsByRow) -> None:
    """Apply edits, (row, edits) pairs, to logits float32 [N, V], contiguous and on the host."""
    array = logits.numpy()
    for row, edit in edits:
        if edit.allowed is not None:
            _keep_only(array[row], edit.allowed)
    flat = logits.view(-1).numpy()
    width = logits.shape[1]
    forbidden = [
        row * width + token_id for row, edit in edits for token_id in edit.bad_words.forbidden
    ]
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
    """Forbid all tokens except `allowed` in logits [V]."""
    kept = logits[allowed]
    logits.fill(NEVER)
    logits[allowed] = kept


def _penalise(flat: Values, width: int, edits: EditsByRow) -> None:
    """Apply penalties to flat [N * V], rows of `width` logits."""
    indices = np.concatenate([row * width + edit.counts.ids for row, edit in edits])
    counts = np.concatenate([edit.counts.counts for _, edit in edits])
    lengths = [len(edit.counts.ids) for _, edit in edits]
    penalties = np.array(
        [(edit.repetition, edit.frequency, edit.presence) for _, edit in edits], dtype=np.float32
    )
    repetition, frequency, presence = np.repeat(penalties, lengths, axis=0).T
    logits = flat[indices]
    logits = np.where(logits > 0, logits / repetition, logits * repetition)
    flat[indices] = logits - frequency * counts - presence * (counts > 0)


RowMask = tuple[int, npt.NDArray[np.uint32]]
"""A row of the logits and its grammar mask, uint32 [W]."""


def grammar_masks(grammars: GrammarOutput, seq_ids: Sequence[int]) -> list[RowMask]:
    """Return the masks of the rows of logits that a grammar constrains.

    seq_ids: [N], sequence of each row of the logits. A sequence with several rows has a mask for
    each of them in `grammars`, in the same order.
    """
    if not grammars.seq_ids:
        return []
    words = np.frombuffer(grammars.masks, dtype="<u4").reshape(len(grammars.seq_ids), -1)
    masks_of: defaultdict[int, list[int]] = defaultdict(list)
    for index, seq_id in enumerate(grammars.seq_ids):
        masks_of[seq_id].insert(0, index)
    return [
        (row, words[masks_of[seq_id].pop()])
        for row, seq_id in enumerate(seq_ids)
        if masks_of.get(seq_id)
    ]


def apply_grammar_masks(logits: torch.Tensor, masks: Sequence[RowMask]) -> None:
    """Write −inf over the tokens that a mask rules out, in rows of logits float32 [N, V]."""
    vocab_size = logits.shape[1]
    for row, words in masks:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
        forbidden = torch.from_numpy(bits == 0)
        logits[row].masked_fill_(forbidden.to(logits.device), float("-inf"))
