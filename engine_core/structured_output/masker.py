"""Masks of the constrained sequences of a step, made while the model computes it.

One thread, in which alone matchers move: it takes in the tokens that are known since the last
mask, then says which may follow. Tokens that were dropped never come here, so nothing has to be
taken back.

    engine   send step N ─▶ order(N) ──────────▶ event_fd ─▶ send GrammarOutput(N)
    thread                   └ consume, fill ──┘
    worker        step N: rows, forward ───────────────── wait ─▶ sample
"""

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine_core.structured_output.base import GrammarBackend, MaskRow, Matcher, mask_words
from engine_core.structured_output.compiler import start_thread
from engine_core.structured_output.thinking import fill
from proto.scheduler_output import GrammarOutput

logger = logging.getLogger("tokend.grammars")


@dataclass(slots=True)
class MaskJob:
    """A step; parallel lists of its constrained sequences, those that are not over.

    token_ids: of each, those that its matcher has not seen.
    """

    epoch: int
    step: int
    backend: GrammarBackend
    seq_ids: list[int] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """output: for the worker. rows: the same masks, by seq_id. errors: of seq_ids that failed."""

    output: GrammarOutput
    rows: dict[int, MaskRow]
    errors: dict[int, str]


class Masker:
    """Turns jobs into masks, in order. ring: when there are some to take."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._jobs: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepMasks] = queue.SimpleQueue()
        self._thread = start_thread("grammar masks", self._run)

    def order(self, job: MaskJob) -> None:
        self._jobs.put(job)

    def take(self) -> list[StepMasks]:
        """What was made since the last call."""
        taken = []
        while not self._done.empty():
            taken.append(self._done.get())
        return taken

    def close(self) -> None:
        """Make no more."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                masks = made(job)
            except Exception:  # the step waits for an answer
                logger.exception("the masks of step %d could not be made", job.step)
                errors = dict.fromkeys(job.seq_ids, "")
                masks = StepMasks(GrammarOutput(job.epoch, job.step, [], b""), {}, errors)
            self._done.put(masks)
            self._ring()


def made(job: MaskJob) -> StepMasks:
    """Take the tokens in, then fill a mask for each; uint32 [len(job.seq_ids), words]."""
    for matcher, token_ids in zip(job.matchers, job.token_ids, strict=True):
        matcher.consume(token_ids)
    masks = np.empty((len(job.seq_ids), mask_words(job.backend.vocab_size)), dtype=np.int32)
    fill(job.backend, job.matchers, masks)
    errors = {
        seq_id: matcher.error
        for seq_id, matcher in zip(job.seq_ids, job.matchers, strict=True)
        if matcher.error
    }
    output = GrammarOutput(job.epoch, job.step, job.seq_ids, masks.tobytes())
    return StepMasks(output, dict(zip(job.seq_ids, masks, strict=True)), errors)
