"""Changes of scores on a device: what edits.py and grammar_masks.py define, without waiting.

    listed   numbers added to single scores: biases, −inf for tokens that are forbidden
    rows     penalties from counts that are on the device, then −inf for what a mask leaves out

Two ways that give the same numbers: torch, and a kernel of Triton for each of the two. A row
that changes nothing has no part in either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.sampling.grammar_masks import WORD_BITS
from worker.sampling.logit_edits import RowEdits

# How often rows have said each token, on the device, for their penalties.
#
#     host      row 7: prompt and outputs ──once──▶ slot 0    then each token that is sampled is
#               row 2: prompt and outputs ──once──▶ slot 1    counted where it was sampled
#
# Owns the counts, int32 [slots, vocabulary], and which row has which slot. A row whose counts
# have fallen behind, because the host has sampled for it or it is another's by now, has them
# sent again. There is a slot for every row from the start, so that no step takes memory that the
# largest one did not have when it was measured.


@dataclass(slots=True)
class _Slot:
    number: int
    edits: RowEdits
    num_outputs: int


class DeviceCounts:
    """Counts of the rows of one runner.

    edits_of: what changes the scores of a row now, as the host knows it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        vocab_size: int,
        num_rows: int,
        edits_of: Callable[[int], RowEdits | None],
    ) -> None:
        self._accelerator = accelerator
        self._placement = OnDevice(accelerator)
        self._vocab_size = vocab_size
        self._edits_of = edits_of
        self._slots: dict[int, _Slot] = {}
        self._free = list(range(num_rows))
        counts = accelerator.zeros(num_rows * vocab_size, torch.int32)
        self.counts = counts.view(num_rows, vocab_size)
        """int32 [rows, V], as in `ScoreEdits`."""

    def slots_of(
        self, rows: Sequence[int], edits: Sequence[RowEdits], num_outputs: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """int64 [n]: where rows have their counts, of so many outputs, which are all there."""
        stale = []
        for row, each, count in zip(rows, edits, num_outputs, strict=True):
            slot = self._slots.get(row)
            if slot is None or slot.edits is not each:
                self._slots[row] = _Slot(self._slot_for(row), each, count)
                stale.append(row)
            elif slot.num_outputs != count:
                slot.num_outputs = count
                stale.append(row)
        if stale:
            self._send(stale)
        return np.array([self._slots[row].number for row in rows], dtype=np.int64)

    def add(self, rows: Sequence[int], slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Each row has one more output, int64 [n] on the device."""
        for row in rows:
            self._slots[row].num_outputs += 1
        one = torch.ones_like(token_ids, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, slots * self._vocab_size + token_ids, one)

    def _slot_for(self, row: int) -> int:
        """The row's own, or a free one."""
        if row in self._slots:
            return self._slots[row].number
        if not self._free:
            self._take_back()
        return self._free.pop()

    def _take_back(self) -> None:
        """From rows that are free by now, or another's."""
        gone = [row for row, slot in self._slots.items() if self._edits_of(row) is not slot.edits]
        self._free += [self._slots.pop(row).number for row in gone]

    def _send(self, rows: Sequence[int]) -> None:
        """What the host has counted; nothing of these rows is on its way."""
        slots = [self._slots[row] for row in rows]
        assert all(slot.edits.counts.counts.sum() == slot.num_outputs for slot in slots)
        places = [slot.number * self._vocab_size + slot.edits.counts.ids for slot in slots]
        counts = [self._entries(slot.edits) for slot in slots]
        for slot in slots:
            self.counts[slot.number].zero_()
        place, count = self._placement.send([np.concatenate(places), np.concatenate(counts)])
        self.counts.view(-1).index_copy_(0, place, count)

    def _entries(self, edits: RowEdits) -> npt.NDArray[np.int32]:
        """As `counts` has them, of the tokens that were seen."""
        said: npt.NDArray[np.int32] = edits.counts.counts.astype(np.int32)
        return said + np.int32(SEEN)


SEEN: Final = 1 << 30
"""In a count: the token was there when the counting began. The rest of it counts outputs."""
ANY_TOKEN: Final = -1
"""Of a listed change: whatever the row's last token is."""
NONE: Final = -1
"""Of a row: it has no counts, or no mask."""
_LISTED_BLOCK: Final = 128
_ROW_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Listed:
    """E changes of single scores, as arrays of one device or of the host.

    place: int64 [E], row · V + token. value: float32 [E], added; a score that −inf is added
    to stays −inf. source: int64 [E], row of `last`. needed: int64 [E], only where that token
    is the last one of the source, or ANY_TOKEN.
    """

    place: torch.Tensor
    value: torch.Tensor
    source: torch.Tensor
    needed: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowChanges:
    """R rows, each with penalties or a mask or both.

    at: int64 [R], rows of the scores. slots: int64 [R], of the counts, or NONE. masks: int64
    [R], rows of `words`, or NONE. rules: float32 [R, 3], repetition, frequency and presence
    penalty. words: int32 [M, W], as in `RowMasks`.
    """

    at: torch.Tensor
    slots: torch.Tensor
    masks: torch.Tensor
    rules: torch.Tensor
    words: torch.Tensor


def hardest_changes(num_rows: int, vocab_size: int) -> list[npt.NDArray[Any]]:
    """at, slots, masks, rules and words of `RowChanges`, flat: every row has all that a row can.

    Of rows and slots alike: a penalty of each kind, and a mask that leaves all tokens in.
    """
    each = np.arange(num_rows, dtype=np.int64)
    rules = np.tile(np.array([1.1, 0.1, 0.1], dtype=np.float32), num_rows)
    words = np.full(num_rows * -(-vocab_size // WORD_BITS), -1, dtype=np.int32)
    return [each, each, each, rules, words]


class ScoreEdits(Protocol):
    """One way of changing scores; waits for nothing."""

    def add_listed(self, scores: torch.Tensor, listed: Listed, last: torch.Tensor) -> None:
        """Change scores float32 [N, V], contiguous, in place.

        last: int64, the last token of every row of the worker.
        """
        ...

    def change_rows(self, scores: torch.Tensor, rows: RowChanges, counts: torch.Tensor) -> None:
        """The same. counts: int32 [S, V]: 0 for a token that was not seen; see SEEN."""
        ...


class TritonEdits:
    """ScoreEdits as kernels of Triton."""

    def __init__(self) -> None:
        self.listed_kernel = _listed_kernel()
        self.kernel = _rows_kernel()

    def add_listed(self, scores: torch.Tensor, listed: Listed, last: torch.Tensor) -> None:
        """As the Protocol says."""
        count = len(listed.place)
        self.listed_kernel[(-(-count // _LISTED_BLOCK),)](
            scores,
            listed.place,
            listed.value,
            listed.source,
            listed.needed,
            last,
            count,
            any_token=ANY_TOKEN,
            block=_LISTED_BLOCK,
        )

    def change_rows(self, scores: torch.Tensor, rows: RowChanges, counts: torch.Tensor) -> None:
        """As the Protocol says; a product and a difference are rounded each, as on the host."""
        vocab_size = scores.shape[1]
        self.kernel[(len(rows.at), -(-vocab_size // _ROW_BLOCK))](
            scores,
            counts,
            rows.words,
            rows.at,
            rows.slots,
            rows.masks,
            rows.rules,
            vocab_size,
            rows.words.shape[1],
            seen=SEEN,
            block=_ROW_BLOCK,
            enable_fp_fusion=False,
        )


def _listed_kernel() -> Any:
    """One program for each block of changes."""
    import triton
    import triton.language as tl

    # Triton reads the annotations too, and knows none but its own.
    def add_listed(  # type: ignore[no-untyped-def]
        scores,
        places,
        values,
        sources,
        needed,
        last,
        count,
        any_token: tl.constexpr,
        block: tl.constexpr,
    ):
        index = tl.program_id(0) * block + tl.arange(0, block)
        inside = index < count
        wanted = tl.load(needed + index, mask=inside, other=any_token)
        source = tl.load(sources + index, mask=inside, other=0)
        found = tl.load(last + source, mask=inside, other=0)
        applies = inside & ((wanted == any_token) | (wanted == found))
        value = tl.load(values + index, mask=inside, other=0.0)
        place = tl.load(places + index, mask=inside, other=0)
        tl.atomic_add(scores + place, value, mask=applies)

    return triton.jit(add_listed)


def _rows_kernel() -> Any:
    """One program for each piece of each row."""
    import triton
    import triton.language as tl

    # Triton reads the annotations too, and knows none but its own.
    def change_piece(  # type: ignore[no-untyped-def]
        scores,
        counts,
        words,
        at,
        slots,
        masks,
        rules,
        vocab_size,
        num_words,
        seen: tl.constexpr,
        block: tl.constexpr,
    ):
        number, piece = tl.program_id(0), tl.program_id(1)
        token = piece * block + tl.arange(0, block)
        inside = token < vocab_size
        nothing = tl.zeros_like(token).to(tl.int64)
        slot, word_row = nothing + tl.load(slots + number), nothing + tl.load(masks + number)
        place = scores + tl.load(at + number) * vocab_size + token
        score = tl.load(place, mask=inside, other=0.0)
        entry = tl.load(counts + slot * vocab_size + token, mask=inside & (slot >= 0), other=0)
        said = (entry & (seen - 1)).to(tl.float32)
        repetition = tl.load(rules + 3 * number)
        frequency = tl.load(rules + 3 * number + 1)
        presence = tl.load(rules + 3 * number + 2)
        scaled = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        changed = scaled - frequency * said - tl.where(said > 0, presence, 0.0)
        score = tl.where(entry != 0, changed, score)
        word = tl.load(
            words + word_row * num_words + token // 32, mask=inside & (word_row >= 0), other=0
        )
        allowed = (word_row < 0) | (((word >> (token % 32)) & 1) != 0)
        tl.store(place, tl.where(allowed, score, float("-inf")), mask=inside)

    return triton.jit(change_piece)
