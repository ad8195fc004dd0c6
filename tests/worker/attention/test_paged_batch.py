"""The index arrays of a paged batch against a model that lists the tokens one by one."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.attention.backend import AttentionInputs
from worker.cuda.attention.kv_store import PADDING_SLOT
from worker.cuda.attention.paged_batch import (
    StepPages,
    gather_pages,
    order_of,
    pad_decodes,
    shared_pages,
    step_pages,
)

NO_BLOCK = 1 << 24
"""A block table entry that must not be read."""


@dataclass(frozen=True)
class Batch:
    """sequences: (KV tokens before the step, query tokens). windows: of the groups. common: leading
    pages that are the same block in all tables, up to a sequence's computed tokens.
    """

    sequences: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    block_size: int
    spare: int
    common: int


batches = st.builds(
    Batch,
    st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))),
        min_size=1,
        max_size=7,
    ).map(tuple),
    st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=1, max_size=3).map(tuple),
    st.sampled_from((1, 3, 4, 16)),
    st.integers(0, 2),
    st.integers(0, 5),
)


def inputs_of(batch: Batch, group: int) -> AttentionInputs:
    """A step whose blocks are all different, with NO_BLOCK in entries that must not be read."""
    size, window = batch.block_size, batch.windows[group]
    lens = [before + new for before, new in batch.sequences]
    width = -(-max(lens) // size) + batch.spare
    table = np.full((len(lens), width), NO_BLOCK, dtype=np.int32)
    for row, (before, new) in enumerate(batch.sequences):
        first = 0 if window is None else max(0, before + 1 - window) // size
        end = -(-(before + new) // size)
        table[row, first:end] = 1 + (group * len(lens) + row) * 100 + np.arange(first, end)
        common = min(batch.common, before // size)
        table[row, first:common] = 50_000 + np.arange(first, common)
    slots = [
        table[row, position // size] * size + position % size
        for row, (before, new) in enumerate(batch.sequences)
        for position in range(before, before + new)
    ]
    return AttentionInputs(
        query_start=np.cumsum([0] + [new for _, new in batch.sequences], dtype=np.int32),
        seq_lens=np.array(lens, dtype=np.int32),
        block_table=table,
        slot_mapping=np.array(slots, dtype=np.int64),
    )


def num_shared_pages(batch: Batch, step: list[AttentionInputs]) -> list[int]:
    """The pages of the shared prefix of every group; 0 with a window or without sharing."""
    return [
        shared_pages(inputs, batch.block_size) if window is None and len(batch.sequences) > 1 else 0
        for inputs, window in zip(step, batch.windows, strict=True)
    ]


def gathered(step: list[AttentionInputs], pages: StepPages) -> torch.Tensor:
    tables = np.concatenate([each.block_table.reshape(-1) for each in step])
    return gather_pages(*map(torch.from_numpy, (tables, pages.runs, pages.shift)), pages.num_pages)


@settings(deadline=None)
@given(batches)
def test_every_query_is_planned_once_with_its_visible_tokens(batch: Batch) -> None:
    step = [inputs_of(batch, group) for group in range(len(batch.windows))]
    shared = num_shared_pages(batch, step)
    pages = step_pages(step, batch.windows, batch.block_size, shared)
    indices = gathered(step, pages)
    assert indices.dtype == torch.int32
    assert len(indices) == pages.num_pages
    sequences = pages.order.sequences.tolist()
    begin = 0
    for group, window in enumerate(batch.windows):
        rows = []
        parts = pages.groups[group]
        prefix = indices[begin : begin + parts.prefix.num_pages].tolist()
        begin += parts.prefix.num_pages
        assert len(prefix) == shared[group]
        for part in (parts.decodes, parts.prefills):
            own = indices[begin : begin + part.num_pages].tolist()
            begin += part.num_pages
            for row in range(part.num_rows):
                run = own[part.kv_indptr[row] : part.kv_indptr[row + 1]]
                count = int(part.qo_indptr[row + 1] - part.qo_indptr[row])
                length = (len(run) - 1) * batch.block_size + int(part.last_page_len[row])
                assert length == part.kv_lens[row] >= count
                length += len(prefix) * batch.block_size
                slots = [
                    page * batch.block_size + i
                    for page in prefix + run
                    for i in range(batch.block_size)
                ]
                rows.append((count, slots[:length]))
        for place, (count, slots) in zip(sequences, rows, strict=True):
            before, new = batch.sequences[place]
            assert count == new
            table = step[group].block_table[place]
            for query in range(new):
                position = before + query
                first = 0 if window is None else max(0, position + 1 - window)
                seen = [
                    int(table[t // batch.block_size]) * batch.block_size + t % batch.block_size
                    for t in range(first, position + 1)
                ]
                # The kernel's causal mask: query j of n ends at length - n + j.
                end = len(slots) - new + query + 1
                assert slots[end - len(seen) : end] == seen
            assert all(slot < NO_BLOCK for slot in slots)
            assert (
                step[group].slot_mapping[step[group].query_start[place] :][:new].tolist()
                == (slots[len(slots) - new :])
            )


@settings(deadline=None)
@given(batches)
def test_shared_pages_are_those_that_all_sequences_have_computed(batch: Batch) -> None:
    inputs = inputs_of(replace(batch, windows=(None,)), 0)
    least = min(before // batch.block_size for before, _ in batch.sequences)
    expected = least if len(batch.sequences) == 1 else min(batch.common, least)
    assert shared_pages(inputs, batch.block_size) == expected
    padded = replace(batch, sequences=tuple((before, 1) for before, _ in batch.sequences))
    inputs = inputs_of(replace(padded, windows=(None,)), 0)
    assert shared_pages(pad_decodes(inputs, len(batch.sequences) + 1), batch.block_size) == 0


def test_equal_pages_after_a_difference_are_not_shared() -> None:
    inputs = AttentionInputs(
        query_start=np.array([0, 1, 2], dtype=np.int32),
        seq_lens=np.array([17, 18], dtype=np.int32),
        block_table=np.array([[4, 7, 2, 9, 5], [4, 8, 2, 9, 6]], dtype=np.int32),
        slot_mapping=np.array([20, 25], dtype=np.int64),
    )
    assert shared_pages(inputs, 4) == 1


@settings(deadline=None)
@given(batches)
def test_arrays_have_the_dtypes_and_shapes_that_the_library_requires(batch: Batch) -> None:
    step = [inputs_of(batch, group) for group in range(len(batch.windows))]
    shared = num_shared_pages(batch, step)
    pages = step_pages(step, batch.windows, batch.block_size, shared)
    num_decodes = sum(new == 1 for _, new in batch.sequences)
    decodes, prefills = zip(*((each.decodes, each.prefills) for each in pages.groups), strict=True)
    prefixes = tuple(each.prefix for each in pages.groups if each.prefix.num_rows)
    for part in decodes + prefills + prefixes:
        for array in (part.qo_indptr, part.kv_indptr, part.last_page_len, part.kv_lens):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            assert array.ndim == 1
        for offsets in (part.qo_indptr, part.kv_indptr):
            assert offsets[0] == 0
            assert len(offsets) == part.num_rows + 1
            assert (np.diff(offsets) >= 1).all()
        assert ((part.last_page_len >= 1) & (part.last_page_len <= batch.block_size)).all()
    for part in decodes:
        assert part.num_rows == num_decodes
        assert part.num_tokens == num_decodes
    for part in prefills:
        assert part.num_rows == len(batch.sequences) - num_decodes
        assert part.longest_query == max((new for _, new in batch.sequences if new > 1), default=0)
    for part, num_shared in zip(prefixes, filter(None, shared), strict=True):
        assert part.qo_indptr.tolist() == [0, step[0].num_tokens]
        assert part.kv_indptr.tolist() == [0, num_shared]
        assert part.last_page_len.tolist() == [batch.block_size]
    for array in (pages.runs, pages.shift):
        assert array.dtype == np.int32


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=1, max_size=40))
def test_decodes_are_first_and_rows_are_restored_to_their_order(counts: list[int]) -> None:
    start = np.cumsum([0, *counts], dtype=np.int32)
    order = order_of(start)
    owners = np.repeat(np.arange(len(counts)), counts)
    moved = owners[order.tokens]
    expected = [i for i, n in enumerate(counts) if n == 1] + [
        i for i, n in enumerate(counts) if n > 1
    ]
    assert order.sequences.tolist() == expected
    assert list(dict.fromkeys(moved.tolist())) == expected
    assert order.num_decodes == counts.count(1)
    assert order.as_in_step == (expected == list(range(len(counts))))
    tokens = np.arange(start[-1])
    assert (tokens[order.tokens][order.back] == tokens).all()
    # The tokens of a sequence stay in order.
    for sequence in expected:
        assert (np.diff(order.tokens[moved == sequence]) == 1).all()


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_padding_rows_read_and_write_no_sequence(
    before: list[int], missing: int, window: int | None
) -> None:
    batch = Batch(tuple((n, 1) for n in before), (window,), 4, 1, 0)
    inputs = inputs_of(batch, 0)
    padded = pad_decodes(inputs, len(before) + missing)
    assert padded.num_seqs == padded.num_tokens == len(before) + missing
    assert (padded.slot_mapping[len(before) :] == PADDING_SLOT).all()
    plain, wide = (step_pages([each], [window], 4, [0]) for each in (inputs, padded))
    assert gathered([padded], wide).tolist() == gathered([inputs], plain).tolist()
    part, real = wide.groups[0].decodes, plain.groups[0].decodes
    assert part.num_rows == len(before) + missing
    assert part.kv_indptr.tolist() == real.kv_indptr.tolist() + [real.num_pages] * missing
    assert part.last_page_len.tolist() == real.last_page_len.tolist() + [1] * missing
    assert part.kv_lens.tolist() == real.kv_lens.tolist() + [0] * missing
    assert wide.groups[0].prefills.num_rows == 0
