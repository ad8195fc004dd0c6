"""How often rows have said each token, on the device, for their penalties.

    host      row 7: prompt and outputs ──once──▶ slot 0    then each token that is sampled is
              row 2: prompt and outputs ──once──▶ slot 1    counted where it was sampled

Owns the counts, int32 [slots, vocabulary], and which row has which slot. A row whose counts
have fallen behind, because the host has sampled for it or it is another's by now, has them
sent again. There is a slot for every row from the start, so that no step takes memory that the
largest one did not have when it was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice
from worker.sample.device_edits import SEEN
from worker.sample.row_edits import RowEdits


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
