"""The arrays of one step, built from rows and counts with numpy.

sequence    0          1     2
tokens    | 0 1 2 3 4 | 5 | 6 7 8 |     query_start = [0 5 6 9]
positions   0 1 2 3 4   17  32 33 34    num_computed = [0 17 32]
seq_lens    5           18  35
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proto.scheduler_output import SchedulerOutput
from worker.attention.base import AttentionInputs
from worker.batch.block_table import BlockTable
from worker.batch.rows import Rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and the sampler need; T tokens, S sequences, N of which sample.

    token_ids, positions: int64 [T].
    rows: int64 [S], rows of the sequences.
    query_start: int32 [S + 1], where each sequence's tokens begin.
    seq_lens: int32 [S], tokens of each sequence once the step is computed.
    num_computed: int32 [S], tokens computed before the step.
    samples: bool [S], the sequences whose last known token is in this step.
    last_token: int64 [N], index on the token axis of the last token of those.
    attention: of each KV cache group; they differ in their block tables and slots.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    samples: NDArray[np.bool_]
    last_token: NDArray[np.int64]
    attention: tuple[AttentionInputs, ...]

    def rows_that_sample(self, hidden: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
        """Rows [N, H] of hidden states [T, H]: the last token of each sequence that samples.

        last_token: that of the inputs, where the hidden states are.
        """
        if len(self.last_token) == len(self.token_ids):
            return hidden
        return hidden.index_select(0, last_token)


def decodes_first(step: SchedulerOutput) -> NDArray[np.int64]:
    """int64 [S]: place i is for this sequence of the step; those with one token come first."""
    counts = [each.num_scheduled_tokens for each in step.new_requests]
    counts += step.cached_requests.num_scheduled_tokens
    return np.argsort(np.array(counts) > 1, kind="stable")


def build_inputs(
    step: SchedulerOutput,
    step_rows: NDArray[np.int64],
    rows: Rows,
    order: NDArray[np.int64] | slice = slice(None),
) -> StepInputs:
    """The inputs of a step whose changes `rows` has taken over.

    order: which sequence of the step is at each place; all arrays follow it.
    """
    new, cached = step.new_requests, step.cached_requests
    step_rows = step_rows[order]
    num_computed = np.array(
        [each.num_computed_tokens for each in new] + cached.num_computed_tokens, dtype=np.int32
    )[order]
    num_scheduled = np.array(
        [each.num_scheduled_tokens for each in new] + cached.num_scheduled_tokens, dtype=np.int32
    )[order]
    query_start = np.zeros(len(step_rows) + 1, dtype=np.int32)
    np.cumsum(num_scheduled, out=query_start[1:])
    seq_lens = num_computed + num_scheduled

    positions = np.arange(query_start[-1], dtype=np.int64)
    positions += np.repeat(num_computed - query_start[:-1], num_scheduled)
    token_rows = np.repeat(step_rows, num_scheduled)
    samples = seq_lens >= rows.num_tokens[step_rows]
    return StepInputs(
        token_ids=rows.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        rows=step_rows,
        query_start=query_start,
        seq_lens=seq_lens,
        num_computed=num_computed,
        samples=samples,
        last_token=(query_start[1:][samples] - 1).astype(np.int64),
        attention=_attention_inputs(
            rows.block_table, step_rows, token_rows, positions, query_start, seq_lens
        ),
    )


def nobodys_inputs(num_tokens: int, num_seqs: int, table: BlockTable) -> StepInputs:
    """A step of tokens 0 of sequences that nobody has, all in block 0, the null block.

    Each sequence begins in this step, with at most as many tokens as a row of the table has.
    """
    counts = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    counts[: num_tokens % num_seqs] += 1
    assert 0 < counts.min() <= counts.max() <= table.ids.shape[2] * table.block_size
    query_start = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.arange(num_tokens) - np.repeat(query_start[:-1], counts)
    blocks = np.zeros((num_seqs, -(-int(counts.max()) // table.block_size)), dtype=np.int32)
    attention = AttentionInputs(query_start, counts, blocks, positions % table.block_size)
    return StepInputs(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        rows=np.zeros(num_seqs, dtype=np.int64),
        query_start=query_start,
        seq_lens=counts,
        num_computed=np.zeros_like(counts),
        samples=np.ones(num_seqs, dtype=np.bool_),
        last_token=(query_start[1:] - 1).astype(np.int64),
        attention=(attention,) * table.num_groups,
    )


def _attention_inputs(
    table: BlockTable,
    step_rows: NDArray[np.int64],
    token_rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    query_start: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
) -> tuple[AttentionInputs, ...]:
    """Block tables of the step's rows and slots of its tokens, group by group."""
    block_index, offset = np.divmod(positions, table.block_size)
    max_blocks = -(-int(seq_lens.max()) // table.block_size)
    tables = np.ascontiguousarray(table.ids[:, step_rows, :max_blocks])
    slots = table.ids[:, token_rows, block_index].astype(np.int64) * table.block_size + offset
    return tuple(
        AttentionInputs(query_start, seq_lens, block_table, slot_mapping)
        for block_table, slot_mapping in zip(tables, np.ascontiguousarray(slots), strict=True)
    )
