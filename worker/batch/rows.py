"""Rows: what the worker remembers of each sequence between steps.

A running sequence has a row in arrays that a step reads with one index operation.
A preempted one is parked: its tokens are kept, its row is free. Rows never move.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proto.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from proto.scheduler_output import NewRequestData, SchedulerOutput
from worker.batch.block_table import BlockTable
from worker.sample.row_edits import RowEdits

NO_LOGPROBS = -1
"""In arrays of logprob counts: the row asks for none."""
PENDING = -1
"""In token_ids: sampled, and not on the host yet."""
_OTHER_BYTES = 256
"""Of a row, at most: its parameters, its counts and its place in the list of those free."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """What never changes about a sequence."""

    handle: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    choice: int


class Rows:
    """Arrays indexed by row, all [num_rows] unless said.

    token_ids: int32 [num_rows, max_model_len + 1], prompt then outputs.
    num_tokens, num_prompt_tokens: int32.
    temperature, top_p, min_p: float32; top_k, num_logprobs: int32; seed: uint64; choice: uint32.
    num_candidates: int32, best next tokens that a row reports instead of sampling; 0: it samples.
    num_prompt_logprobs: int32, alternatives beside each prompt token.
    greedy: bool, the row wants the best token, once its scores are changed, and nothing else.
    edits: what changes the scores of a row, only of rows that have theirs changed.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.block_table = BlockTable(num_rows, max_model_len, block_size, num_groups)
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int32)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.choice = np.zeros(num_rows, dtype=np.uint32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.num_candidates = np.zeros(num_rows, dtype=np.int32)
        self.min_output = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int32)
        self.greedy = np.zeros(num_rows, dtype=np.bool_)
        self.edits: dict[int, RowEdits] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._sequences: dict[int, Sequence] = {}

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
        for handle in step.finished_handles:
            self._forget(handle)
        for handle in step.preempted_handles:
            self._release_row(handle)
        for new in step.new_requests:
            self._add(new)
        cached = step.cached_requests
        resumed = dict(zip(cached.resumed_handles, cached.resumed_output_token_ids, strict=True))
        for handle, block_ids in zip(cached.handles, cached.new_block_ids, strict=True):
            if handle in resumed:
                self._place(self._sequences[handle], resumed[handle])
                assert block_ids is not None, "a resumed sequence brings its block table"
                self.block_table.replace(self._row_of[handle], block_ids)
            elif block_ids is not None:
                self.block_table.append(self._row_of[handle], block_ids)
        for handle, token_id in zip(
            cached.dictated_handles, cached.dictated_token_ids, strict=True
        ):
            self.append_sampled(np.array([self._row_of[handle]]), np.array([token_id]))
        handles = [new.handle for new in step.new_requests] + cached.handles
        return np.fromiter(map(self._row_of.__getitem__, handles), np.int64, len(handles))

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
        handles: list[int],
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        token_ids: NDArray[np.int64],
    ) -> None:
        """What `append_pending` left open, all [n]; nothing for a row that is another's by now."""
        for handle, row, place, token_id in zip(
            handles, rows.tolist(), places.tolist(), token_ids.tolist(), strict=True
        ):
            if self._row_of.get(handle) == row and self.token_ids[row, place] == PENDING:
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

    def params(self, handle: int) -> SamplingParams:
        """The sampling parameters of a sequence."""
        return self._sequences[handle].params

    def clear(self) -> None:
        """Forget every sequence."""
        for handle in list(self._sequences):
            self._forget(handle)

    @property
    def num_sequences(self) -> int:
        """Sequences known, running or parked."""
        return len(self._sequences)

    def _add(self, new: NewRequestData) -> None:
        sequence = Sequence(
            new.handle, new.prompt_token_ids, new.sampling_params, new.seed, new.choice
        )
        self._sequences[new.handle] = sequence
        self._place(sequence, new.output_token_ids)
        self.block_table.replace(self._row_of[new.handle], new.block_ids)

    def _place(self, sequence: Sequence, output_token_ids: list[int]) -> None:
        """Fill a row: the one that the sequence has, or a free one."""
        if sequence.handle not in self._row_of:
            self._row_of[sequence.handle] = self._free.pop()
        row = self._row_of[sequence.handle]
        prompt_end = len(sequence.prompt_token_ids)
        end = prompt_end + len(output_token_ids)
        self.token_ids[row, :prompt_end] = sequence.prompt_token_ids
        self.token_ids[row, prompt_end:end] = output_token_ids
        self.num_prompt_tokens[row] = prompt_end
        self.num_tokens[row] = end
        params = sequence.params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = sequence.seed
        self.choice[row] = sequence.choice
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

    def _release_row(self, handle: int) -> None:
        row = self._row_of.pop(handle)
        self.edits.pop(row, None)
        self._free.append(row)

    def _forget(self, handle: int) -> None:
        if handle in self._row_of:
            self._release_row(handle)
        self._sequences.pop(handle, None)
