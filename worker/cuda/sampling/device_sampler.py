"""From the logits of a step to its tokens and log-probabilities, all of it on an accelerator.

    logits ─▶ listed edits ─▶ penalties, masks ─▶ filters, draw ─▶ tokens ─▶ counts
       └───────────── of the rows that request them ───────────────┴──▶ log-probabilities

The stages are those of worker/sampling/sampler.py, with the same results. Nothing here waits for
the device. `DeviceSampler` calls them in this order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from proto.messages.sampling_params import GREEDY_TEMPERATURE
from proto.messages.scheduler_output import GrammarOutput
from worker.batch.input_batch import InputBatch
from worker.batch.step_inputs import SampledPositions
from worker.batch.transfers import Transfers
from worker.cuda.accelerator import Accelerator
from worker.cuda.sampling.device_filters import RowFilters
from worker.cuda.sampling.device_kernels import (
    ANY_TOKEN,
    NONE,
    SEEN,
    ListedEdits,
    RowEditArrays,
    TritonDraw,
    TritonEdits,
)
from worker.cuda.transfers import QueuedTransfers
from worker.sampling.logit_edits import NEVER, WORD_BITS, Ids, RowEdits, Values, grammar_masks
from worker.sampling.logprobs import NO_LOGPROBS, queue_logprobs
from worker.sampling.row_params import RowParams, needs_filter, neutral_params, torch_columns

NEUTRAL = (1.0, 0.0, 0.0)
"""Penalties without effect: repetition, frequency, presence."""


class DeviceSampler:
    """Samples the steps of one runner on the device; nothing waits for it.

    last: int64 [rows], the last token of each row, on the device.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        batch: InputBatch,
        last: torch.Tensor,
        vocab_size: int,
        draw: TritonDraw,
        edits: TritonEdits,
    ) -> None:
        self._batch = batch
        self._last = last
        self._vocab_size = vocab_size
        self._edits = edits
        self._drawing = DeviceDraw(QueuedTransfers(accelerator), draw)
        self._counts = DeviceCounts(accelerator, vocab_size, len(batch.num_tokens), batch.edits.get)
        self._sent_edits = QueuedTransfers(accelerator)
        self._sent_logprobs = QueuedTransfers(accelerator)

    def sample(
        self,
        logits: torch.Tensor,
        positions: SampledPositions,
        grammars: GrammarOutput,
        logprobs: "LogprobRequests",
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return tokens int64 [N] for logits [N, V], which are not changed, and log-probabilities.

        The latter are the tensors of `queue_logprobs`, or nothing if `logprobs` is empty. A row has
        at most one token that the host does not know.
        """
        edits = batch_logit_edits(self._batch, positions, grammars, self._vocab_size)
        edited = logits
        slots = self._counts.slots_of(edits.penalised)
        if edits:
            edited, counted, row_slots = self._edit(logits, edits, slots)
        token_ids = self._drawing.draw_tokens(edited, self._batch.params_of(positions))
        if edits.penalised:
            self._counts.count_outputs(
                edits.penalised, row_slots, token_ids.index_select(0, counted)
            )
        return token_ids, self._queue_logprobs(logits, token_ids, logprobs) if logprobs else []

    def _edit(
        self, logits: torch.Tensor, edits: "BatchLogitEdits", slots: Ids
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return edited logits float32 [N, V], the penalised positions, and their rows' slots."""
        slot_of_edit = np.full(len(edits.positions), NONE, dtype=np.int64)
        penalised = [position.edit_index for position in edits.penalised]
        slot_of_edit[penalised] = slots
        arrays: list[npt.NDArray[Any]] = [
            *edits.listed,
            edits.positions,
            slot_of_edit,
            edits.masks,
            edits.rules,
            edits.words,
            edits.positions[penalised],
            self._counts.row_slots(edits.penalised),
        ]
        sent = self._sent_edits.to_device(arrays)
        listed, (positions, slot_of, masks, rules, words, counted, row_slots) = sent[:4], sent[4:]
        wide = logits.to(torch.float32, copy=True).contiguous()
        if len(edits.listed[0]):
            self._edits.add_listed(wide, ListedEdits(*listed), self._last)
        if len(edits.positions):
            row_edits = RowEditArrays(
                positions, slot_of, masks, rules.view(-1, 3), words.view(-1, edits.words.shape[1])
            )
            self._edits.edit_rows(wide, row_edits, self._counts.counts)
        return wide, counted, row_slots

    def _queue_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, requests: "LogprobRequests"
    ) -> list[torch.Tensor]:
        width = max(map(len, requests.named))
        named = np.zeros((len(requests.indices), width), dtype=np.int64)
        for row, ids in enumerate(requests.named):
            named[row, : len(ids)] = ids
        rows, names = self._sent_logprobs.to_device([requests.indices, named])
        num_best = int(requests.num_logprobs.max())
        return queue_logprobs(logits, rows, token_ids, num_best, names.view(named.shape))


@dataclass(frozen=True, slots=True)
class PenalisedPosition:
    """A sampled position of a row with penalties.

    edit_index: index in `BatchLogitEdits.positions`. row: of the batch. edits: with all tokens
    before the position. num_outputs: outputs before the position, pending ones included.
    num_drafts: how many of them are drafts.
    """

    edit_index: int
    row: int
    edits: RowEdits
    num_outputs: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class BatchLogitEdits:
    """Logit edits of N sampled positions, as arrays to be sent to a device.

    listed: index, value, source and needed of `ListedEdits`.
    positions: int64 [R], indices of the sampled positions with penalties or masks. masks, rules,
    words: as in `RowEditArrays`. penalised: by ascending edit_index.
    """

    listed: tuple[Ids, Values, Ids, Ids]
    positions: Ids
    masks: Ids
    rules: npt.NDArray[np.float32]
    words: npt.NDArray[np.int32]
    penalised: tuple[PenalisedPosition, ...]

    def __bool__(self) -> bool:
        return bool(len(self.listed[0]) or len(self.positions))


@dataclass(frozen=True, slots=True)
class LogprobRequests:
    """The W of N sampled positions whose sequences request log-probabilities.

    indices: int64 [W], of the positions. num_logprobs: int32 [W]. position: uint32 [W], index of
    the output. named: [W], token ids that replace the best ones; empty for the best ones.
    """

    indices: Ids
    num_logprobs: npt.NDArray[np.int32]
    position: npt.NDArray[np.uint32]
    named: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, batch: InputBatch, positions: SampledPositions) -> "LogprobRequests":
        """Collect the requests of sampled positions."""
        num_logprobs = batch.num_logprobs[positions.rows]
        indices = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        return cls(
            indices,
            num_logprobs[indices],
            positions.output_index[indices].astype(np.uint32),
            tuple(
                batch.params(positions.seq_ids[index]).logprob_token_ids
                for index in indices.tolist()
            ),
        )

    def __bool__(self) -> bool:
        return bool(len(self.indices))


@dataclass(slots=True)
class _ListedEditBuilder:
    """Collects the arrays of ListedEdits."""

    vocab_size: int
    parts: list[tuple[Ids, Values, Ids, Ids]] = field(default_factory=list)

    def add_edits(
        self,
        at: int,
        token_ids: Sequence[int] | Ids,
        values: float | Values,
        source: int = 0,
        needed: int | Sequence[int] = ANY_TOKEN,
    ) -> None:
        """Add values to the logits of tokens, in row `at` of the logits."""
        index = at * self.vocab_size + np.asarray(token_ids, dtype=np.int64)
        others = (
            np.asarray(values, dtype=np.float32),
            np.int64(source),
            np.asarray(needed, dtype=np.int64),
        )
        self.parts.append((index, *(np.broadcast_to(array, index.shape) for array in others)))  # type: ignore[arg-type]

    def add_row_edits(self, at: int, row: int, edits: RowEdits, is_pending: bool) -> None:
        """Add biases and forbidden tokens. is_pending: the row's last token is not known yet."""
        if len(edits.bias_ids):
            self.add_edits(at, edits.bias_ids, edits.bias_values)
        bad_words = edits.bad_words
        if forbidden := bad_words.always if is_pending else bad_words.forbidden:
            self.add_edits(at, forbidden, float(NEVER))
        if is_pending and (pairs := bad_words.forbidden_after()):
            token_ids, needed = zip(*pairs, strict=True)
            self.add_edits(at, token_ids, float(NEVER), row, needed)

    def arrays(self) -> tuple[Ids, Values, Ids, Ids]:
        if not self.parts:
            empty = np.empty(0, dtype=np.int64)
            return empty, np.empty(0, dtype=np.float32), empty, empty
        index, value, source, needed = map(np.concatenate, zip(*self.parts, strict=True))
        return index, value, source, needed


def batch_logit_edits(
    batch: InputBatch, positions: SampledPositions, grammars: GrammarOutput, vocab_size: int
) -> BatchLogitEdits:
    """Collect the logit edits of sampled positions; the last token of a row may be pending."""
    listed = _ListedEditBuilder(vocab_size)
    for index in np.flatnonzero(batch.before_min_tokens(positions)).tolist():
        stop_ids = batch.params(positions.seq_ids[index]).stop_ids
        listed.add_edits(index, sorted(stop_ids), float(NEVER))
    words = dict(grammar_masks(grammars, positions.seq_ids))
    rules = dict.fromkeys(words, NEUTRAL)
    penalised: dict[int, RowEdits] = {}
    for index, edits in batch.edits_of(positions):
        row = int(positions.rows[index])
        listed.add_row_edits(index, row, edits, batch.last_is_pending(row))
        if edits.allowed is not None:
            allowed = edits.allowed_words(vocab_size)
            words[index] = words[index] & allowed if index in words else allowed
            rules[index] = NEUTRAL
        if edits.penalises:
            penalised[index] = edits
            rules[index] = (edits.repetition, edits.frequency, edits.presence)
    edit_index = {position: index for index, position in enumerate(rules)}
    word_row = {position: index for index, position in enumerate(words)}
    return BatchLogitEdits(
        listed=listed.arrays(),
        positions=np.array(list(rules), dtype=np.int64),
        masks=np.array([word_row.get(index, NONE) for index in rules], dtype=np.int64),
        rules=np.array(list(rules.values()), dtype=np.float32).reshape(-1, 3),
        words=np.array(list(words.values()), dtype="<u4")
        .reshape(-1, -(-vocab_size // WORD_BITS))
        .view(np.int32),
        penalised=tuple(
            PenalisedPosition(
                edit_index[index],
                int(positions.rows[index]),
                edits,
                int(positions.output_index[index]),
                len(positions.drafts.get(index, ())),
            )
            for index, edits in penalised.items()
        ),
    )


@dataclass(slots=True)
class _Slot:
    """A row of the counts, and what is counted there: the outputs of a row with these edits."""

    index: int
    edits: RowEdits
    num_outputs: int


class DeviceCounts:
    """How often rows with penalties have output each token, counted on the device.

        host      row 7: prompt and outputs ──once──▶ slot 0    then the device counts each
                  row 2: prompt and outputs ──once──▶ slot 1    sampled token

    Owns the counts and the slot of each row. Counts are sent again if they are stale: the host has
    sampled for the row, or the row belongs to another sequence. There is a slot for every row, so
    that no step takes memory that the measured largest step did not. A position behind drafts takes
    a free slot for one step.

    edits_of: returns the present edits of a row.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        vocab_size: int,
        num_rows: int,
        edits_of: Callable[[int], RowEdits | None],
    ) -> None:
        self._transfers = QueuedTransfers(accelerator)
        self._vocab_size = vocab_size
        self._edits_of = edits_of
        self._slots: dict[tuple[int, int], _Slot] = {}
        """By row and number of drafts."""
        self._free = list(range(num_rows))
        counts = accelerator.zeros(num_rows * vocab_size, torch.int32)
        self.counts = counts.view(num_rows, vocab_size)
        """int32 [rows, V], as in `TritonEdits.edit_rows`."""

    def slots_of(self, positions: Sequence[PenalisedPosition]) -> Ids:
        """Return the slot of each position, int64 [n], with all outputs before it counted."""
        stale = []
        for position in positions:
            key = position.row, position.num_drafts
            slot = self._slots.get(key)
            if slot is None or slot.edits is not position.edits:
                slot = _Slot(self._slot_index(key), position.edits, position.num_outputs)
                self._slots[key] = slot
                stale.append(slot)
            elif slot.num_outputs != position.num_outputs:
                slot.num_outputs = position.num_outputs
                stale.append(slot)
        if stale:
            self._send_counts(stale)
        return np.array(
            [self._slots[position.row, position.num_drafts].index for position in positions],
            dtype=np.int64,
        )

    def row_slots(self, positions: Sequence[PenalisedPosition]) -> Ids:
        """Return the slot of the row of each position, int64 [n], where its output is counted."""
        return np.array([self._slots[position.row, 0].index for position in positions], np.int64)

    def count_outputs(
        self, positions: Sequence[PenalisedPosition], slots: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """Count one more output of each position's row; free the slots of drafts.

        slots: `row_slots`. token_ids: int64 [n]. Both are on the device.
        """
        for position in positions:
            self._slots[position.row, 0].num_outputs += 1
            if position.num_drafts:
                self._free.append(self._slots.pop((position.row, position.num_drafts)).index)
        one = torch.ones_like(token_ids, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, slots * self._vocab_size + token_ids, one)

    def _slot_index(self, key: tuple[int, int]) -> int:
        if key in self._slots:
            return self._slots[key].index
        if not self._free:
            self._free_stale_slots()
        return self._free.pop()

    def _free_stale_slots(self) -> None:
        """Free the slots of rows that were released or belong to another sequence."""
        stale = [
            (row, num_drafts)
            for (row, num_drafts), slot in self._slots.items()
            if num_drafts == 0 and self._edits_of(row) is not slot.edits
        ]
        self._free += [self._slots.pop(key).index for key in stale]

    def _send_counts(self, slots: Sequence[_Slot]) -> None:
        """Send the host's counts of slots; their rows have no pending tokens."""
        assert all(slot.edits.counts.counts.sum() == slot.num_outputs for slot in slots)
        indices = [slot.index * self._vocab_size + slot.edits.counts.ids for slot in slots]
        entries = [slot.edits.counts.counts.astype(np.int32) + np.int32(SEEN) for slot in slots]
        for slot in slots:
            self.counts[slot.index].zero_()
        index, entry = self._transfers.to_device([np.concatenate(indices), np.concatenate(entries)])
        self.counts.view(-1).index_copy_(0, index, entry)


def largest_params(num_rows: int) -> RowParams:
    """Return parameters of rows that take the most memory: every row may have candidates."""
    params = neutral_params(num_rows)
    params["top_p"] = 0.5
    return params


class DeviceDraw:
    """Filters logits on a device and draws tokens there, without waiting for it."""

    def __init__(self, transfers: Transfers, draw: TritonDraw) -> None:
        self._transfers = transfers
        self._draw = draw

    def draw_tokens(
        self, logits: torch.Tensor, params: RowParams, *, masks_dropped: bool = False
    ) -> torch.Tensor:
        """Return tokens int64 [N] for logits [N, V] of any floating dtype, which are not changed.

        params: records [N]; a temperature below GREEDY_TEMPERATURE takes the best token.
        masks_dropped: set logits that a filter drops to −inf all the same; they are float32 and
        contiguous then.
        """
        temperature = params["temperature"]
        random = temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return logits.argmax(dim=1)
        arrays = [
            np.where(random, temperature, np.float32(0)),
            *torch_columns(params, ("seed", "choice", "position")),
        ]
        filtered = (random & needs_filter(params)).nonzero()[0]
        needs_search = False
        if len(filtered):
            filter_of_row = np.full(len(params), -1, dtype=np.int64)
            filter_of_row[filtered] = np.arange(len(filtered))
            top_k, top_p, min_p = torch_columns(params[filtered], ("top_k", "top_p", "min_p"))
            top_k[top_k >= logits.shape[1]] = 0
            needs_search = bool(((top_k > 0) | (top_p < 1)).any())
            arrays += [filtered, filter_of_row, top_k, top_p, min_p]
        temperatures, seed, choice, position, *sent = self._transfers.to_device(arrays)
        filters = RowFilters(needs_search, *sent) if sent else None
        wide = logits.float().contiguous()
        return self._draw(wide, temperatures, seed, choice, position, filters, masks_dropped)
