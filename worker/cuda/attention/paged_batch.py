"""A step as FlashInfer's index arrays: which pages each sequence reads, and in which batch it is.

Pure functions on numpy; start at step_pages. Sequences with one query token are decodes, the
others prefills; each kind has its own wrapper, so decodes go first:

    step       0: 5 tokens   1: 1 token   2: 1 token   3: 7 tokens
    batch      1, 2 | 0, 3                 decodes | prefills

In a group with a window, pages before the window of a sequence's first query are left
out, because they may belong to other sequences by now:

    pages      [ gone ][ gone ][ . . w w ][ w w q . ]       w: visible   q: the query
    planned                    [ . . w w ][ w w q   ]       7 tokens, the last page has 3

Masks count from the right (query j of n sees keys up to kv_len - n + j), so what is left
out on the left changes nothing. In the same way a prefix that all sequences share may be left
out, and attended to once by all queries as if they belonged to one sequence:

    tables     [ 4 ][ 7 ][ 2 ][ 9 ]          prefix     [ 4 ][ 7 ]
               [ 4 ][ 7 ][ 3 ]               planned    [ 2 ][ 9 ] and [ 3 ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from worker.attention.backend import AttentionInputs, start_offsets
from worker.attention.kv_cache import Window
from worker.cuda.attention.kv_store import PADDING_SLOT

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a batch: decodes, then prefills, each kind in the order of the step.

    sequences: int64 [S], sequence i of the batch is this sequence of the step.
    tokens: int64 [T], token i of the batch is this token of the step.
    back: int64 [T], token i of the step is this token of the batch.
    num_decodes: number of decodes, which is also the number of their tokens.
    """

    sequences: Int64s
    tokens: Int64s
    back: Int64s
    num_decodes: int

    @property
    def as_in_step(self) -> bool:
        """Whether the batch has the order of the step."""
        return bool((self.sequences[1:] > self.sequences[:-1]).all())


def order_of(query_start: Int32s) -> Order:
    """Return the batch order of a step; query_start int32 [S + 1] as in AttentionInputs."""
    lengths = np.diff(query_start)
    sequences = np.argsort(lengths > 1, kind="stable")
    counts = lengths[sequences]
    ends = np.cumsum(counts, dtype=np.int64)
    # Within a sequence tokens follow each other; each one begins elsewhere.
    shift = query_start[:-1][sequences] - (ends - counts)
    tokens = np.arange(query_start[-1], dtype=np.int64) + np.repeat(shift, counts)
    back = np.empty_like(tokens)
    back[tokens] = np.arange(len(tokens))
    return Order(sequences, tokens, back, int((lengths == 1).sum()))


@dataclass(frozen=True, slots=True)
class Part:
    """The R sequences that one wrapper plans; int32, C-contiguous, on the host.

    qo_indptr: [R + 1], offsets into the queries of the part, from 0.
    kv_indptr: [R + 1], offsets into the page indices of the part, from 0.
    last_page_len: [R], tokens in the last page, 1 to block_size; 1 without any page.
    kv_lens: [R], tokens in the pages; 0 for padding.
    """

    qo_indptr: Int32s
    kv_indptr: Int32s
    last_page_len: Int32s
    kv_lens: Int32s

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])

    @property
    def longest_query(self) -> int:
        """The most query tokens of a row; 0 without rows."""
        return int(np.diff(self.qo_indptr).max(initial=0))


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The parts that the wrappers of one KV cache group plan; parts without rows are not planned.

    prefix: one row, whose queries are those of the whole step and see all its tokens.
    """

    prefix: Part
    decodes: Part
    prefills: Part

    @property
    def num_pages(self) -> int:
        return self.prefix.num_pages + self.decodes.num_pages + self.prefills.num_pages


@dataclass(frozen=True, slots=True)
class StepPages:
    """The parts of every group, and how the page indices of all of them are gathered.

    The page indices lie one behind the other, group after group, prefix before decodes
    before prefills. A run is the pages of one row; there are N of them, in that order.

    runs: int32 [N], pages of each run.
    shift: int32 [N], index i of the list is entry i + shift[its run] of the block tables
        of all groups laid out flat, one behind the other.
    """

    order: Order
    groups: tuple[GroupParts, ...]
    runs: Int32s
    shift: Int32s

    @property
    def num_pages(self) -> int:
        return sum(group.num_pages for group in self.groups)


def step_pages(
    step: Sequence[AttentionInputs],
    windows: Sequence[Window],
    block_size: int,
    shared: Sequence[int],
) -> StepPages:
    """Return the index arrays of a step, from one entry of each argument per group.

    shared: pages of the prefix that is planned once, 0 for none; see `shared_pages`.
    """
    order = order_of(step[0].query_start)
    counts = np.diff(step[0].query_start)[order.sequences]
    groups: list[GroupParts] = []
    runs: list[Int32s] = []
    begins: list[Int64s] = []
    num_entries = 0
    for inputs, window, num_shared in zip(step, windows, shared, strict=True):
        seq_lens = inputs.seq_lens[order.sequences]
        first_page = _first_page(seq_lens, counts, window, block_size) + np.int32(num_shared)
        kv_lens = seq_lens - first_page * block_size
        pages = -(-kv_lens // block_size)
        prefix = _prefix(num_shared, inputs.num_tokens, block_size)
        decodes, prefills = (
            _part(counts[at], pages[at], kv_lens[at], block_size)
            for at in (slice(order.num_decodes), slice(order.num_decodes, None))
        )
        groups.append(GroupParts(prefix, decodes, prefills))
        row_begins = order.sequences * inputs.block_table.shape[1] + first_page
        if num_shared:
            runs.append(np.array([num_shared], dtype=np.int32))
            begins.append(np.array([num_entries], dtype=np.int64))
        runs.append(pages)
        begins.append(num_entries + row_begins)
        num_entries += inputs.block_table.size
    all_runs = np.concatenate(runs)
    before = np.cumsum(all_runs, dtype=np.int64) - all_runs
    shift = (np.concatenate(begins) - before).astype(np.int32)
    return StepPages(order, tuple(groups), all_runs, shift)


def shared_pages(inputs: AttentionInputs, block_size: int) -> int:
    """Return the number of leading full pages that all sequences share and no query is in."""
    computed = inputs.seq_lens - np.diff(inputs.query_start)
    most = max(0, int(computed.min()) // block_size)
    table = inputs.block_table[:, :most]
    return int(np.logical_and.accumulate((table == table[:1]).all(axis=0)).sum())


def gather_pages(
    tables: torch.Tensor, runs: torch.Tensor, shift: torch.Tensor, num_pages: int
) -> torch.Tensor:
    """Return the page indices of a step, int32 [num_pages], by one gather on the device.

    tables: int32, the block tables of all groups, flat. runs, shift: as in StepPages. num_pages is
    known on the host, so no device has to be waited for.
    """
    at = torch.repeat_interleave(shift, runs, output_size=num_pages)
    at += torch.arange(num_pages, out=torch.empty_like(at))
    return tables.index_select(0, at)


def pad_decodes(inputs: AttentionInputs, num_rows: int) -> AttentionInputs:
    """Return a step of decodes with rows added up to `num_rows`, for a graph of that size.

    An added row has a query token and no KV token, and writes nothing.
    """
    missing = num_rows - inputs.num_seqs
    assert missing >= 0, "more sequences than rows"
    assert inputs.num_tokens == inputs.num_seqs, "only decodes are padded"
    return replace(
        inputs,
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=np.pad(inputs.seq_lens, (0, missing)),
        block_table=np.pad(inputs.block_table, ((0, missing), (0, 0))),
        slot_mapping=np.pad(inputs.slot_mapping, (0, missing), constant_values=PADDING_SLOT),
    )


def _first_page(seq_lens: Int32s, counts: Int32s, window: Window, block_size: int) -> Int32s:
    """Return the page with the first token that the first query of each sequence sees."""
    if window is None:
        return np.zeros_like(seq_lens)
    first: Int32s = np.maximum(seq_lens - counts + 1 - window, 0)
    return first // block_size


def _part(counts: Int32s, pages: Int32s, kv_lens: Int32s, block_size: int) -> Part:
    last = kv_lens - (pages - 1) * block_size
    last[pages == 0] = 1
    return Part(start_offsets(counts), start_offsets(pages), last, np.ascontiguousarray(kv_lens))


def _prefix(num_pages: int, num_tokens: int, block_size: int) -> Part:
    """Return a row of full pages for all tokens of the step, or no row."""
    rows = np.array([num_pages] if num_pages else [], dtype=np.int32)
    return _part(np.full_like(rows, num_tokens), rows, rows * block_size, block_size)
