"""Beam search: which hypotheses continue, which are finished, and when the search ends.

The rules, their order and the float32 arithmetic are those of `generate(num_beams=…)` of
transformers, so results are the same (the search: Vijayakumar et al. 2016, section 2; length
penalty: Wu et al. 2016, section 7, with the length alone as its base). In a round

    every hypothesis × its best tokens → one list, sorted by the sum of log-probabilities
    the first `width` of the list      those that end here are finished
    the whole list                     the first `width` that do not end continue

Requests, blocks and workers are unknown here.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from proto.messages.sampling_params import EarlyStopping


class Branch(NamedTuple):
    """A hypothesis of the next round: the one of slot `parent`, with one more token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished hypothesis; score: sum of log-probabilities / length ** length penalty."""

    score: np.float32
    token_ids: list[int]


class BeamSearch:
    """The hypotheses of one request, in slots 0 … width - 1; at first only slot 0.

    max_tokens: of a hypothesis. stop_ids: tokens that end a hypothesis.
    finished: best first, at most `width`.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: Collection[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
    ) -> None:
        self.finished: list[Finished] = []
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._length = 0
        self._outputs: list[list[int]] = [[]]
        self._scores = np.zeros(1, dtype=np.float32)

    @property
    def num_slots(self) -> int:
        """Number of hypotheses that continue."""
        return len(self._outputs)

    def advance(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> list[Branch]:
        """Compute one round; return the next hypothesis of each slot, or nothing at the end.

        token_ids, logprobs: [num_slots, columns], the best next tokens of each slot in order; at
        least `width` and one for each stop id. The first child of a hypothesis keeps its slot;
        others take the slots of hypotheses without children.
        """
        self._length += 1
        sums = (logprobs + self._scores[:, None]).ravel()
        at_end = self._length >= self._max_tokens
        living: list[tuple[Branch, np.float32]] = []
        for rank, index in enumerate(np.argsort(-sums, kind="stable").tolist()):
            if rank >= self._width and (at_end or len(living) == self._width):
                break
            branch = Branch(index // logprobs.shape[1], int(token_ids.flat[index]))
            if at_end or branch.token_id in self._stop_ids:
                if rank < self._width:
                    self._finish(branch, sums[index])
            elif len(living) < self._width:
                living.append((branch, sums[index]))
        if at_end or self._is_over(living[0][1]):
            return []
        return self._assign_slots(living)

    def _finish(self, branch: Branch, total: np.float32) -> None:
        token_ids = [*self._outputs[branch.parent], branch.token_id]
        self.finished.append(Finished(self._weighted(total, self._length), token_ids))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._width :]

    def _is_over(self, best: np.float32) -> bool:
        """Return whether the best hypothesis can no longer improve the finished ones."""
        if len(self.finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        hopeful = self._early_stopping == "never" and self._length_penalty > 0
        reachable = self._weighted(best, self._max_tokens if hopeful else self._length)
        return bool(reachable <= self.finished[-1].score)

    def _weighted(self, total: np.float32, length: int) -> np.float32:
        return np.float32(total / np.float32(length**self._length_penalty))

    def _assign_slots(self, living: list[tuple[Branch, np.float32]]) -> list[Branch]:
        parents = {branch.parent for branch, _ in living}
        vacant = [slot for slot in range(self._width - 1, -1, -1) if slot not in parents]
        taken: dict[int, tuple[Branch, np.float32]] = {}
        for branch, total in living:
            slot = vacant.pop() if branch.parent in taken else branch.parent
            taken[slot] = branch, total
        branches = [taken[slot][0] for slot in range(len(taken))]
        self._scores = np.array([taken[slot][1] for slot in range(len(taken))], dtype=np.float32)
        self._outputs = [[*self._outputs[branch.parent], branch.token_id] for branch in branches]
        return branches
