"""Steps of decodes alone as captured graphs: one launch instead of one for every kernel.

A graph is the same kernels on the same addresses, so there is one for each of a ladder of
batch sizes, and a step takes the next one up; the rows that are left over are nobody's:

    step      [ a ][ b ][ c ]            3 sequences
    graph     [ a ][ b ][ c ][ - ]       4 rows: the last reads and writes nothing

What changes from step to step is copied to fixed places before a replay: token ids and
positions here, slots and plans by the attention backend. Steps with prefills, and those of
more sequences than the ladder has, run kernel by kernel.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from worker.attention.base import AttentionBackend
from worker.attention.paged_batch import pad_decodes
from worker.device.accelerator import Accelerator, Graph
from worker.device.base import gib
from worker.forward import Forward
from worker.input_batch import BlockTable, StepInputs, dummy_inputs
from worker.models.decoder import Decoder

logger = logging.getLogger("tokend.graphs")

_STEP: Final = 8
_MOST: Final = 256
"""Rows of the largest graph; beyond, a kernel takes much longer than its launch."""


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then every eighth, up to what can run at once."""
    most = min(max_num_seqs, _MOST)
    sizes = {1, 2, 4, *range(_STEP, most + 1, _STEP), most}
    return tuple(sorted(size for size in sizes if size <= most))


class GraphForward:
    """Forward that replays a graph where one fits, and else hands on to `eager`.

    attention: has a plan for each of `sizes` that its kernels read from a fixed place.
    """

    def __init__(
        self,
        eager: Forward,
        model: Decoder,
        attention: AttentionBackend,
        accelerator: Accelerator,
        sizes: Sequence[int],
    ) -> None:
        self._eager = eager
        self._model = model
        self._attention = attention
        self._accelerator = accelerator
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        self._token_ids = accelerator.zeros(most, torch.int64)
        self._positions = accelerator.zeros(most, torch.int64)
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, table: BlockTable, progress: Callable[[float], None]) -> None:
        """Record every size, the largest first: the others then find their memory taken.

        table: tells what a step's block tables look like. progress: told the finished part.
        """
        started, before = time.monotonic(), self._accelerator.memory_taken()
        for done, size in enumerate(reversed(self._sizes)):
            inputs = dummy_inputs(size, size, table)
            self._attention.plan(inputs.attention)
            # Once without recording: what kernels set up on their first call must not be in it.
            self._run(size)
            self._attention.plan(inputs.attention)
            self._graphs[size] = self._accelerator.capture(lambda: self._run(size))  # noqa: B023
            progress((done + 1) / len(self._sizes))
        logger.info(
            "captured %d graphs of up to %d sequences in %.1f s, %s",
            len(self._graphs),
            self._sizes[-1],
            time.monotonic() - started,
            gib(self._accelerator.memory_taken() - before),
        )

    def __call__(
        self, inputs: StepInputs, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As the Protocol says; the result stands until the next step."""
        count = len(inputs.token_ids)
        size = next((each for each in self._sizes if each >= count), 0)
        if size not in self._graphs or count != len(inputs.rows):
            return self._eager(inputs, token_ids, positions)
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._attention.plan([pad_decodes(each, size) for each in inputs.attention])
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:count]

    def _run(self, size: int) -> torch.Tensor:
        return self._model.forward(self._token_ids[:size], self._positions[:size], self._attention)
