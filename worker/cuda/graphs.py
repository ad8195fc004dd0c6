"""Decode steps as captured CUDA graphs: one launch instead of one for every kernel.

A graph is the same kernels on the same addresses, so a graph is captured for each of a ladder of
batch sizes. A step uses the next larger graph and leaves the rest of its rows empty:

    step      [ a ][ b ][ c ]            3 sequences
    graph     [ a ][ b ][ c ][ - ]       4 rows: the last reads and writes nothing

A draft is more rows of its sequence, so steps that verify drafts use the same graphs. Before a
replay the step's values are copied to fixed addresses: token ids and positions here, slots
and plans by the attention backend and by the states of recurrent layers. Steps with prefills, and
steps with more sequences than the largest graph, run kernel by kernel.

A model that is served with adapters has two graphs of each size: that of steps without adapters has
no kernel of adapters. Steps in which adapters multiply outputs (DoRA) run kernel by kernel.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from proto.settings.config import memory_size
from worker.attention.backend import AttentionBackend, AttentionInputs
from worker.attention.state_cache import AttentionWithStates
from worker.batch.input_batch import BlockTable, dummy_inputs
from worker.cuda.accelerator import Accelerator
from worker.cuda.attention.paged_batch import pad_decodes
from worker.cuda.layers.adapter_slots import SlotAdapters
from worker.cuda.states import CudaStates
from worker.models.decoder import Decoder

logger = logging.getLogger("tokend.graphs")

_LADDER_STEP: Final = 8
_LARGEST_SIZE: Final = 256
"""Rows of the largest graph; from there on a kernel takes much longer than its launch."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: 1, 2, 4, then multiples of 8, up to max_num_seqs."""
    largest = min(max_num_seqs, _LARGEST_SIZE)
    sizes = {1, 2, 4, *range(_LADDER_STEP, largest + 1, _LADDER_STEP), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


class DecodeGraphs:
    """CUDA graphs of decode steps, one for each of `sizes`, or two with adapters.

    attention: has a plan for each size at a fixed address.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        accelerator: Accelerator,
        sizes: Sequence[int],
    ) -> None:
        self._model = model
        self._attention = attention
        self._accelerator = accelerator
        self._sizes = sorted(sizes)
        largest = self._sizes[-1]
        self._token_ids = accelerator.zeros(largest, torch.int64)
        self._positions = accelerator.zeros(largest, torch.int64)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._adapters: SlotAdapters | None = None
        if isinstance(model.adapters, SlotAdapters):
            self._adapters = model.adapters
            self._adapters.reserve_graphs(largest)

    @torch.inference_mode()
    def capture(
        self, table: BlockTable, on_progress: Callable[[float], None], num_groups: int | None = None
    ) -> None:
        """Capture all sizes, the largest first, so that smaller ones reuse its memory.

        table: has the shape of a step's block tables. on_progress: called with the finished
        fraction. num_groups: KV groups of the model; None for those of the table.
        """
        num_groups = num_groups or table.num_groups
        started, before = time.monotonic(), self._accelerator.memory_taken()
        for done, size in enumerate(reversed(self._sizes)):
            inputs = dummy_inputs(size, size, table).attention[:1] * num_groups
            self._capture_size(size, inputs)
            if self._adapters is not None:
                with self._adapters.in_graph(size):
                    self._capture_size(size, inputs, has_adapters=True)
            on_progress((done + 1) / len(self._sizes))
        logger.info(
            "captured %d graphs of up to %d sequences in %.1f s, %s",
            len(self._graphs),
            self._sizes[-1],
            time.monotonic() - started,
            memory_size(self._accelerator.memory_taken() - before),
        )

    def _capture_size(
        self, size: int, inputs: Sequence[AttentionInputs], *, has_adapters: bool = False
    ) -> None:
        self._plan(inputs, size)
        # Run once without recording: a graph must not contain what kernels set up at first.
        self._forward(size)
        self._plan(inputs, size)
        self._graphs[size, has_adapters] = self._accelerator.capture(lambda: self._forward(size))

    def fits(self, inputs: Sequence[AttentionInputs]) -> bool:
        """Return whether a step, one entry per KV cache group, is of decodes that a graph has."""
        if self._adapters is not None and self._adapters.multiplies_outputs:
            return False
        return inputs[0].is_decode and inputs[0].num_tokens <= self._sizes[-1]

    def replay(
        self,
        inputs: Sequence[AttentionInputs],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the hidden states [T, H] of a step that fits, valid until the next step.

        The running step's adapters are added.

        token_ids, positions: int64 [T], on the device.
        """
        count = inputs[0].num_tokens
        size = next(size for size in self._sizes if size >= count)
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._plan(inputs, size)
        has_adapters = self._adapters is not None and bool(self._adapters.groups)
        if self._adapters is not None and has_adapters:
            self._adapters.fill_graph(size)
        graph, hidden = self._graphs[size, has_adapters]
        graph.replay()
        return hidden[:count]

    def _plan(self, inputs: Sequence[AttentionInputs], size: int) -> None:
        """Plan a step for the graph of this size; with states their group is the last."""
        attention = self._attention
        if isinstance(attention, AttentionWithStates):
            assert isinstance(attention.states, CudaStates)
            *inputs, of_states = inputs
            attention.states.plan_graph(of_states, size)
            attention = attention.attention
        attention.plan([pad_decodes(group, size) for group in inputs])

    def _forward(self, size: int) -> torch.Tensor:
        return self._model.forward(self._token_ids[:size], self._positions[:size], self._attention)
