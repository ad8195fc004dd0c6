"""Which tokens the constrained rows of a step may have, and how the others are ruled out.

Owns nothing between steps. The masks come from the engine, a bit for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from proto.scheduler_output import GrammarOutput, SchedulerOutput

WORD_BITS: Final = 32


class MaskSource(Protocol):
    """Where the masks of a step come from."""

    def masks_of(self, step: SchedulerOutput) -> GrammarOutput:
        """Those of a step with constrained sequences; waits until they are here."""
        ...


class NoMasks:
    """For steps without constrained sequences."""

    def masks_of(self, step: SchedulerOutput) -> GrammarOutput:
        raise AssertionError(f"nobody makes masks for step {step.step}")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """rows: int64 [M], of the logits. words: uint32 [M, W], as in `GrammarOutput`."""

    rows: npt.NDArray[np.int64]
    words: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.rows)


NO_ROW_MASKS: Final = RowMasks(np.empty(0, np.int64), np.empty((0, 0), np.uint32))


def row_masks(masks: GrammarOutput, seq_ids: Sequence[int]) -> RowMasks:
    """The masks of those of `seq_ids`, one for each row of the logits, that have one."""
    if not masks.seq_ids:
        return NO_ROW_MASKS
    words = np.frombuffer(masks.masks, dtype="<u4").reshape(len(masks.seq_ids), -1)
    place = {seq_id: number for number, seq_id in enumerate(masks.seq_ids)}
    rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in place]
    return RowMasks(np.array(rows, np.int64), words[[place[seq_ids[row]] for row in rows]])


def rule_out(logits: torch.Tensor, masks: RowMasks) -> None:
    """What its mask does not allow becomes -inf in a row of logits, float32 [N, V]."""
    vocab_size = logits.shape[1]
    for row, words in zip(masks.rows.tolist(), masks.words, strict=True):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
        forbidden = torch.from_numpy(bits == 0)
        logits[row].masked_fill_(forbidden.to(logits.device), float("-inf"))
