"""InputBatch: what the worker remembers of each sequence between steps.

A running sequence has a row in arrays that a step reads with one index operation.
A preempted one is parked: its tokens are kept, its row is free. Rows never move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proto.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from proto.scheduler_output import BlockIds, NewRequestData, SchedulerOutput
from worker.attention.base import AttentionInputs
from worker.sampling.logit_edits import RowEdits
from worker.sampling.row_params import RowParams, neutral_params, record_of

# Block tables of all rows in all KV cache groups, as one array that a step gathers from.


class BlockTable:
    """`ids[group, row, i]` is the block that holds tokens [i * block_size, (i + 1) * block_size).

    ids: int32 [num_groups, num_rows, max_blocks]; entries past the end of a row are
        meaningless, and so are those of blocks that a group's window has passed.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.ids: NDArray[np.int32] = np.zeros(
            (num_groups, num_rows, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._length = [[0] * num_groups for _ in range(num_rows)]

    def replace(self, row: int, block_ids: BlockIds) -> None:
        """Give a row its whole table in each group."""
        self._length[row] = [0] * self.num_groups
        self.append(row, block_ids)

    def append(self, row: int, block_ids: BlockIds) -> None:
        """Add blocks at the end of a row; one list, perhaps empty, for each group."""
        length = self._length[row]
        for group, (start, added) in enumerate(zip(length, block_ids, strict=True)):
            self.ids[group, row, start : start + len(added)] = added
            length[group] = start + len(added)


NO_LOGPROBS = -1
"""In arrays of logprob counts: the row asks for none."""
PENDING = -1
"""In token_ids: sampled, and not on the host yet."""
_OTHER_BYTES = 256
"""Of a row, at most: its parameters, its counts and its place in the list of those free."""


@dataclass(frozen=True, slots=True)
class RowState:
    """What never changes about a sequence."""

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choice: int


class InputBatch:
    """Arrays indexed by row, all [num_rows] unless said.

    token_ids: int32 [num_rows, max_model_len + 1], prompt then outputs.
    num_tokens, num_prompt_tokens: int32.
    row_params: records of ROW_PARAMS, the position of each left at 0.
    num_logprobs: int32, alternatives beside the chosen token, NO_LOGPROBS for none.
    num_candidates: int32, best next tokens that a row reports instead of sampling; 0: it samples.
    num_prompt_logprobs: int32, alternatives beside each prompt token.
    greedy: bool, the row wants the best token after its edits, and nothing else.
    edits: edits of the logits of a row, only of rows that have some.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_table = BlockTable(num_rows, max_model_len, block_size, num_groups)
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int32)
        self.row_params = neutral_params(num_rows)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.num_candidates = np.zeros(num_rows, dtype=np.int32)
        self.min_output = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.greedy = np.zeros(num_rows, dtype=np.bool_)
        self.edits: dict[int, RowEdits] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._sequences: dict[int, RowState] = {}

    @staticmethod
    def bytes_needed(num_rows: int, max_model_len: int, block_size: int, num_groups: int) -> int:
        """What they come to take when all have been used at full length.

        Without what rows need that have their scores changed.
        """
        num_blocks = num_groups * -(-max_model_len // block_size)
        return num_rows * (4 * (max_model_len + 1 + num_blocks) + _OTHER_BYTES)

    def apply(self, step: SchedulerOutput) -> NDArray[np.int64]:
        """Take over what the scheduler changed; returns the rows of the step.

        The order is that of the step: new requests, then cached ones. int64 [num_sequences].
        """
        for seq_id in step.finished_seq_ids:
            self._forget(seq_id)
        for seq_id in step.preempted_seq_ids:
            self._release_row(seq_id)
        for new in step.new_requests:
            self._add(new)
        cached = step.cached_requests
        resumed = dict(zip(cached.resumed_seq_ids, cached.resumed_output_token_ids, strict=True))
        for seq_id, block_ids in zip(cached.seq_ids, cached.new_block_ids, strict=True):
            if seq_id in resumed:
                self._place(self._sequences[seq_id], resumed[seq_id])
                assert block_ids is not None, "a resumed sequence brings its block table"
                self.block_table.replace(self._row_of[seq_id], block_ids)
            elif block_ids is not None:
                self.block_table.append(self._row_of[seq_id], block_ids)
        for seq_id, token_id in zip(cached.forced_seq_ids, cached.forced_token_ids, strict=True):
            self.append_sampled(np.array([self._row_of[seq_id]]), np.array([token_id]))
        seq_ids = [new.seq_id for new in step.new_requests] + cached.seq_ids
        return np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))

    def append_sampled(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Each of `rows` [n] gets one more token."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        if self.edits:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self.edits and token_id != PENDING:
                    self.edits[row].append(token_id)

    def append_pending(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each of `rows` [n] gets one more token, to be known later; returns their places."""
        places = self.num_tokens[rows].astype(np.int64)
        self.append_sampled(rows, np.full(len(rows), PENDING))
        return places

    def fill_in(
        self,
        seq_ids: list[int],
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        token_ids: NDArray[np.int64],
    ) -> None:
        """What `append_pending` left open, all [n]; nothing for a row that is another's by now."""
        for seq_id, row, place, token_id in zip(
            seq_ids, rows.tolist(), places.tolist(), token_ids.tolist(), strict=True
        ):
            if self._row_of.get(seq_id) == row and self.token_ids[row, place] == PENDING:
                self.token_ids[row, place] = token_id
                if row in self.edits:
                    self.edits[row].append(token_id)

    def last_is_pending(self, row: int) -> bool:
        """Whether the last token of a row is to be known later."""
        return bool(self.token_ids[row, self.num_tokens[row] - 1] == PENDING)

    def need_host(
        self, rows: NDArray[np.int64], num_computed: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Bool [n]: rows that want what only the host makes in a step.

        That is candidates of a beam, and log-probabilities of prompt tokens that follow the
        `num_computed` [n] tokens before the step and the first one in it.
        """
        prompts = (self.num_prompt_logprobs[rows] != NO_LOGPROBS) & (
            num_computed + 1 < self.num_prompt_tokens[rows]
        )
        found: NDArray[np.bool_] = prompts | (self.num_candidates[rows] > 0)
        return found

    def num_outputs(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Outputs of `rows` [n], pending ones included."""
        found: NDArray[np.int32] = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        return found

    def params_of_step(self, rows: NDArray[np.int64]) -> RowParams:
        """Records of `rows` [n], with the position of the token that each samples next."""
        params = self.row_params[rows]
        params["position"] = self.num_outputs(rows)
        return params

    def params(self, seq_id: int) -> SamplingParams:
        """The sampling parameters of a sequence."""
        return self._sequences[seq_id].params

    def clear(self) -> None:
        """Forget every sequence."""
        for seq_id in list(self._sequences):
            self._forget(seq_id)

    @property
    def num_sequences(self) -> int:
        """Sequences known, running or parked."""
        return len(self._sequences)

    def _add(self, new: NewRequestData) -> None:
        sequence = RowState(
            new.seq_id, new.prompt_token_ids, new.sampling_params, new.seed, new.choice
        )
        self._sequences[new.seq_id] = sequence
        self._place(sequence, new.output_token_ids)
        self.block_table.replace(self._row_of[new.seq_id], new.block_ids)

    def _place(self, sequence: RowState, output_token_ids: list[int]) -> None:
        """Fill a row: the one that the sequence has, or a free one."""
        if sequence.seq_id not in self._row_of:
            self._row_of[sequence.seq_id] = self._free.pop()
        row = self._row_of[sequence.seq_id]
        prompt_end = len(sequence.prompt_token_ids)
        end = prompt_end + len(output_token_ids)
        self.token_ids[row, :prompt_end] = sequence.prompt_token_ids
        self.token_ids[row, prompt_end:end] = output_token_ids
        self.num_prompt_tokens[row] = prompt_end
        self.num_tokens[row] = end
        params = sequence.params
        self.row_params[row] = record_of(params, sequence.seed, sequence.choice)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_candidates[row] = params.num_candidates
        self.min_output[row] = params.min_tokens
        self.num_prompt_logprobs[row] = (
            NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        )
        self.greedy[row] = (
            params.temperature < GREEDY_TEMPERATURE
            and params.logprobs is None
            and params.num_candidates == 0
        )
        self.edits.pop(row, None)
        if params.edits is not None:
            self.edits[row] = RowEdits(params.edits, sequence.prompt_token_ids, output_token_ids)

    def _release_row(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id)
        self.edits.pop(row, None)
        self._free.append(row)

    def _forget(self, seq_id: int) -> None:
        if seq_id in self._row_of:
            self._release_row(seq_id)
        self._sequences.pop(seq_id, None)


# The arrays of one step, built from rows and counts with numpy.
#
# sequence    0          1     2
# tokens    | 0 1 2 3 4 | 5 | 6 7 8 |     query_start = [0 5 6 9]
# positions   0 1 2 3 4   17  32 33 34    num_computed = [0 17 32]
# seq_lens    5           18  35


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
    rows: InputBatch,
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


def dummy_inputs(num_tokens: int, num_seqs: int, table: BlockTable) -> StepInputs:
    """A step of dummy sequences of token 0, all in block 0, the null block.

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
