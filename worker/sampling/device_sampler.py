"""From the logits of a step to its tokens and log-probabilities, all of it on an accelerator.

    logits ─▶ listed edits ─▶ penalties, masks ─▶ filters, draw ─▶ tokens ─▶ counts
       └──────────────── of the rows that ask ─────────────────────┴──▶ log-probabilities

The order of work is that of sampler.py. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from proto.engine_io import LogprobsArrays
from proto.sampling_params import GREEDY_TEMPERATURE
from proto.scheduler_output import GrammarOutput
from worker.device.accelerator import Accelerator
from worker.device.placement import OnDevice, Placement
from worker.input_batch import NO_LOGPROBS, InputBatch
from worker.sampling.device_kernels import (
    ANY_TOKEN,
    NONE,
    SEEN,
    ListedEdits,
    RowEditArrays,
    TritonEdits,
)
from worker.sampling.grammar_masks import WORD_BITS, row_masks
from worker.sampling.logit_edits import NEVER, RowEdits
from worker.sampling.row_params import (
    FILTERS,
    RowParams,
    needs_filter,
    neutral_params,
    widened,
)
from worker.sampling.torch_backend import (
    FilterPlan,
    filter_logits,
    order_keys,
    token_ids_of,
    token_ranks,
)

KeyedDraw = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""TritonDraw: logits, temperature, seed, choice and position of N rows → token ids."""

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
NEUTRAL = (1.0, 0.0, 0.0)
"""Penalties that change nothing: repetition, frequency, presence."""


@dataclass(frozen=True, slots=True)
class PenalisedRow:
    """A row with penalties.

    number: index in `BatchLogitEdits.at`. num_outputs: pending ones included.
    """

    number: int
    row: int
    edits: RowEdits
    num_outputs: int


@dataclass(frozen=True, slots=True)
class BatchLogitEdits:
    """Edits of the logits of N sequences, as arrays to be sent to a device.

    listed: index, value, source and needed of `ListedEdits`.
    at, masks, rules, words: as in `RowEditArrays`, at is rows. penalised: by ascending number.
    """

    listed: tuple[Ids, Values, Ids, Ids]
    at: npt.NDArray[np.int64]
    masks: npt.NDArray[np.int64]
    rules: npt.NDArray[np.float32]
    words: npt.NDArray[np.int32]
    penalised: tuple[PenalisedRow, ...]

    def __bool__(self) -> bool:
        return bool(len(self.listed[0]) or len(self.at))


@dataclass(frozen=True, slots=True)
class LogprobRequests:
    """The W of N sequences that asked for log-probabilities.

    at: int64 [W], indices of them. num_logprobs: int32 [W]; position: uint32 [W], of the output.
    named: token ids of each, in place of the best ones where there are some.
    """

    at: npt.NDArray[np.int64]
    num_logprobs: npt.NDArray[np.int32]
    position: npt.NDArray[np.uint32]
    named: tuple[tuple[int, ...], ...]

    def __bool__(self) -> bool:
        return bool(len(self.at))


class _EditList:
    """Collects ListedEdits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._parts: list[tuple[Ids, Values, Ids, Ids]] = []

    def add(
        self,
        at: int,
        token_ids: Sequence[int] | Ids,
        values: float | Values,
        source: int = 0,
        needed: int | Sequence[int] = ANY_TOKEN,
    ) -> None:
        """Add to tokens of the sequence with this index."""
        index = at * self._vocab_size + np.asarray(token_ids, dtype=np.int64)
        others = (
            np.asarray(values, dtype=np.float32),
            np.int64(source),
            np.asarray(needed, dtype=np.int64),
        )
        self._parts.append((index, *(np.broadcast_to(array, index.shape) for array in others)))  # type: ignore[arg-type]

    def arrays(self) -> tuple[Ids, Values, Ids, Ids]:
        if not self._parts:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, np.empty(0, dtype=np.float32), nothing, nothing
        index, value, source, needed = map(np.concatenate, zip(*self._parts, strict=True))
        return index, value, source, needed


def batch_logit_edits(
    batch: InputBatch,
    at: npt.NDArray[np.int64],
    seq_ids: Sequence[int],
    grammars: GrammarOutput,
    vocab_size: int,
) -> BatchLogitEdits:
    """Collect the edits of the rows `at` [N] with these seq_ids. A row's last token may be pending.

    grammars: masks of some of the rows.
    """
    listing = _EditList(vocab_size)
    num_outputs = batch.num_outputs(at)
    for index in np.flatnonzero(num_outputs < batch.min_output[at]).tolist():
        listing.add(index, sorted(batch.params(seq_ids[index]).stop_ids), float(NEVER))
    masks = row_masks(grammars, seq_ids)
    words = dict(zip(masks.rows.tolist(), masks.words, strict=True))
    rules = dict.fromkeys(words, NEUTRAL)
    penalised: dict[int, RowEdits] = {}
    for index, row in enumerate(at.tolist()) if batch.edits else ():
        if (edits := batch.edits.get(row)) is None:
            continue
        _list_edits(listing, index, row, edits, batch.last_is_pending(row))
        if edits.allowed is not None:
            allowed = edits.allowed_words(vocab_size)
            words[index] = words[index] & allowed if index in words else allowed
            rules[index] = NEUTRAL
        if edits.penalises:
            penalised[index] = edits
            rules[index] = (edits.repetition, edits.frequency, edits.presence)
    number_of = {index: number for number, index in enumerate(rules)}
    word_row = {index: number for number, index in enumerate(words)}
    return BatchLogitEdits(
        listing.arrays(),
        np.array(list(rules), dtype=np.int64),
        np.array([word_row.get(index, NONE) for index in rules], dtype=np.int64),
        np.array(list(rules.values()), dtype=np.float32).reshape(-1, 3),
        np.array(list(words.values()), dtype="<u4")
        .reshape(-1, -(-vocab_size // WORD_BITS))
        .view(np.int32),
        tuple(
            PenalisedRow(number_of[index], int(at[index]), edits, int(num_outputs[index]))
            for index, edits in penalised.items()
        ),
    )


def _list_edits(listing: _EditList, at: int, row: int, edits: RowEdits, pending: bool) -> None:
    """List biases and forbidden tokens; pending: the row's last token is not known yet."""
    if len(edits.bias_ids):
        listing.add(at, edits.bias_ids, edits.bias_values)
    if forbidden := edits.forbidden_always if pending else edits.forbidden:
        listing.add(at, forbidden, float(NEVER))
    if pending and (pairs := edits.forbidden_after()):
        token_ids, needed = zip(*pairs, strict=True)
        listing.add(at, token_ids, float(NEVER), row, needed)


def logprob_requests(
    batch: InputBatch, at: npt.NDArray[np.int64], seq_ids: Sequence[int]
) -> LogprobRequests:
    """Collect the requests of the rows `at` [N] with these seq_ids."""
    asking = np.flatnonzero(batch.num_logprobs[at] != NO_LOGPROBS)
    some = at[asking]
    return LogprobRequests(
        asking,
        batch.num_logprobs[some],
        batch.num_outputs(some).astype(np.uint32),
        tuple(batch.params(seq_ids[index]).logprob_token_ids for index in asking.tolist()),
    )


@dataclass(slots=True)
class _Slot:
    number: int
    edits: RowEdits
    num_outputs: int


class DeviceCounts:
    """How often rows with penalties have produced each token, counted on the device.

        host      row 7: prompt and outputs ──once──▶ slot 0    then each sampled token is
                  row 2: prompt and outputs ──once──▶ slot 1    counted on the device

    Owns the counts and which row has which slot. Counts of a row are sent again when they fell
    behind, because the host has sampled for the row or it belongs to another sequence now. There
    is a slot for every row, so that no step takes memory that the measured largest step did not.

    edits_of: returns the edits of a row as they are now.
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
        """int32 [rows, V], as in `TritonEdits.edit_rows`."""

    def slots_of(
        self, rows: Sequence[int], edits: Sequence[RowEdits], num_outputs: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Return the slots int64 [n] of rows with so many outputs, with all of these counted."""
        stale = []
        for row, edit, count in zip(rows, edits, num_outputs, strict=True):
            slot = self._slots.get(row)
            if slot is None or slot.edits is not edit:
                self._slots[row] = _Slot(self._slot_for(row), edit, count)
                stale.append(row)
            elif slot.num_outputs != count:
                slot.num_outputs = count
                stale.append(row)
        if stale:
            self._send(stale)
        return np.array([self._slots[row].number for row in rows], dtype=np.int64)

    def add(self, rows: Sequence[int], slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one more output of each row; slots and token_ids: int64 [n] on the device."""
        for row in rows:
            self._slots[row].num_outputs += 1
        one = torch.ones_like(token_ids, dtype=torch.int32)
        self.counts.view(-1).index_add_(0, slots * self._vocab_size + token_ids, one)

    def _slot_for(self, row: int) -> int:
        """Return the number of the row's slot, or of a free one."""
        if row in self._slots:
            return self._slots[row].number
        if not self._free:
            self._free_stale_slots()
        return self._free.pop()

    def _free_stale_slots(self) -> None:
        """Free the slots of rows that have been released or belong to another sequence."""
        stale = [row for row, slot in self._slots.items() if self._edits_of(row) is not slot.edits]
        self._free += [self._slots.pop(row).number for row in stale]

    def _send(self, rows: Sequence[int]) -> None:
        """Send the host's counts of rows, which have no pending tokens."""
        slots = [self._slots[row] for row in rows]
        assert all(slot.edits.counts.counts.sum() == slot.num_outputs for slot in slots)
        indices = [slot.number * self._vocab_size + slot.edits.counts.ids for slot in slots]
        counts = [self._entries(slot.edits) for slot in slots]
        for slot in slots:
            self.counts[slot.number].zero_()
        index, count = self._placement.send([np.concatenate(indices), np.concatenate(counts)])
        self.counts.view(-1).index_copy_(0, index, count)

    def _entries(self, edits: RowEdits) -> npt.NDArray[np.int32]:
        """Return the entries of `counts` for the tokens that were seen."""
        outputs: npt.NDArray[np.int32] = edits.counts.counts.astype(np.int32)
        return outputs + np.int32(SEEN)


CHUNK_BYTES: Final = 64 << 20
"""Most bytes of float32 logits in one chunk of rows."""


def queue_logprobs(
    logits: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> list[torch.Tensor]:
    """Queue what logprobs.py defines; return tensors on the device without waiting for it.

    Ids int32 and log-probabilities float32 [W, 1 + num_best + M], ranks int32 [W]. Columns are
    the chosen token, the best ones in order, the named ones.
    logits: [N, V] of any floating dtype, as they come from the model. at: int64 [W], the rows
    that ask. token_ids: int64 [N], chosen. named: int64 [W, M].
    """
    rows_at_once = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    parts = [
        _columns(logits, rows, token_ids, num_best, ids)
        for rows, ids in zip(
            torch.split(at, rows_at_once), torch.split(named, rows_at_once), strict=True
        )
    ]
    return [torch.cat(chunks) for chunks in zip(*parts, strict=True)]


def pack_logprobs(
    found: Sequence[npt.NDArray[Any]],
    num_logprobs: npt.NDArray[np.int32],
    positions: npt.NDArray[np.uint32],
    named: Sequence[Sequence[int]],
) -> list[LogprobsArrays]:
    """Return one LogprobsArrays a row of what `queue_logprobs` gave, flat and on the host."""
    num_rows = len(num_logprobs)
    ids, values = (array.reshape(num_rows, -1) for array in found[:2])
    num_best = ids.shape[1] - 1 - max(map(len, named))
    packed = []
    for row, (count, at, names) in enumerate(
        zip(num_logprobs.tolist(), positions.tolist(), named, strict=True)
    ):
        columns = [*range(count + 1)]
        if names:
            columns = [0, *range(1 + num_best, 1 + num_best + len(names))]
        packed.append(
            LogprobsArrays(
                first_position=at,
                width=len(columns),
                token_ids=ids[row, columns].astype("<i4").tobytes(),
                logprobs=values[row, columns].astype("<f4").tobytes(),
                ranks=found[2][row : row + 1].astype("<i4").tobytes(),
            )
        )
    return packed


def _columns(
    logits: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    num_best: int,
    named: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raw = logits.index_select(0, at).float()
    chosen = token_ids.index_select(0, at)[:, None]
    columns = [chosen]
    if num_best:
        columns.append(token_ids_of(order_keys(raw).topk(num_best, dim=1).values))
    ids = torch.cat((*columns, named), dim=1)
    values = raw.log_softmax(dim=1).gather(1, ids)
    return ids.to(torch.int32), values, token_ranks(raw, chosen).to(torch.int32)


def largest_params(num_rows: int) -> RowParams:
    """Return records of rows that take the most memory: every filter, and a top-p without top-k."""
    params = neutral_params(num_rows)
    params["top_p"], params["min_p"] = 0.5, 0.1
    return params


class DeviceDraw:
    """Filters logits on a device and draws tokens there, without waiting for it."""

    def __init__(self, placement: Placement, draw: KeyedDraw) -> None:
        self._placement = placement
        self._draw = draw

    def tokens(self, logits: torch.Tensor, params: RowParams) -> torch.Tensor:
        """Return int64 [N] for logits [N, V] of any floating dtype, which stay as they are.

        params: records [N]; a temperature below GREEDY_TEMPERATURE takes the best token.
        """
        temperature = params["temperature"]
        random = temperature >= GREEDY_TEMPERATURE
        if not random.any():
            return logits.argmax(dim=1)
        filtered = (random & needs_filter(params)).nonzero()[0]
        some = params[filtered]
        sent = self._placement.send(
            [
                np.where(random, temperature, np.float32(0)),
                *widened(params, ("seed", "choice", "position")),
                filtered,
                some["temperature"].copy(),
                *widened(some, FILTERS),
            ]
        )
        keys, (index, *filters) = sent[:4], sent[4:]
        wide = logits.float().contiguous()
        if len(filtered):
            plan = FilterPlan.of(some, logits.shape[1])
            kept = filter_logits(wide.index_select(0, index), plan, *filters)
            wide = wide.index_copy(0, index, kept)
        return self._draw(wide, *keys)


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
        draw: KeyedDraw,
        edits: TritonEdits,
    ) -> None:
        self._batch = batch
        self._last = last
        self._vocab_size = vocab_size
        self._edits = edits
        self._drawing = DeviceDraw(OnDevice(accelerator), draw)
        self._counts = DeviceCounts(accelerator, vocab_size, len(batch.num_tokens), batch.edits.get)
        self._sent_edits = OnDevice(accelerator)
        self._sent_logprobs = OnDevice(accelerator)

    def logprobs_of(self, at: Ids, seq_ids: Sequence[int]) -> LogprobRequests:
        """Collect the logprob requests of the rows `at` [N], before they get another token."""
        return logprob_requests(self._batch, at, seq_ids)

    def sample(
        self,
        logits: torch.Tensor,
        at: Ids,
        seq_ids: Sequence[int],
        grammars: GrammarOutput,
        logprobs: LogprobRequests,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return tokens int64 [N] for logits [N, V], which stay, and `queue_logprobs` of them.

        at: int64 [N], rows of the sequences, each with at most one token that is not known.
        """
        edits = batch_logit_edits(self._batch, at, seq_ids, grammars, self._vocab_size)
        edited = logits
        penalised = [row.row for row in edits.penalised]
        slots = self._counts.slots_of(
            penalised,
            [row.edits for row in edits.penalised],
            [row.num_outputs for row in edits.penalised],
        )
        if edits:
            edited, counted, device_slots = self._edit(logits, edits, slots)
        token_ids = self._drawing.tokens(edited, self._batch.params_of_step(at))
        if penalised:
            self._counts.add(penalised, device_slots, token_ids.index_select(0, counted))
        return token_ids, self._logprobs(logits, token_ids, logprobs) if logprobs else []

    def _edit(
        self, logits: torch.Tensor, edits: BatchLogitEdits, slots: Ids
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return edited logits float32 [N, V], and indices and slots of penalised rows."""
        slot_of_edit = np.full(len(edits.at), NONE, dtype=np.int64)
        numbers = [row.number for row in edits.penalised]
        slot_of_edit[numbers] = slots
        sent = self._sent_edits.send(
            [
                *edits.listed,
                edits.at,
                slot_of_edit,
                edits.masks,
                edits.rules,
                edits.words,
                edits.at[numbers],
                slots,
            ]
        )
        listed, (at, slot_of, masks, rules, words, counted, device_slots) = sent[:4], sent[4:]
        wide = logits.to(torch.float32, copy=True).contiguous()
        if len(edits.listed[0]):
            self._edits.add_listed(wide, ListedEdits(*listed), self._last)
        if len(edits.at):
            arrays = RowEditArrays(
                at, slot_of, masks, rules.view(-1, 3), words.view(-1, edits.words.shape[1])
            )
            self._edits.edit_rows(wide, arrays, self._counts.counts)
        return wide, counted, device_slots

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, wanted: LogprobRequests
    ) -> list[torch.Tensor]:
        width = max(map(len, wanted.named))
        named = np.zeros((len(wanted.at), width), dtype=np.int64)
        for row, ids in enumerate(wanted.named):
            named[row, : len(ids)] = ids
        at, names = self._sent_logprobs.send([wanted.at, named])
        num_best = int(wanted.num_logprobs.max())
        return queue_logprobs(logits, at, token_ids, num_best, names.view(named.shape))
